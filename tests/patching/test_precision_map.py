"""A precision per block: each block computes, saves and reports as if the whole model had its precision."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import HfArgumentParser

from hf_neuron_moe import NeuronMoEConfig, NeuronMoETrainingArguments, patch_model, set_activations, unpatch_model
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError
from hf_neuron_moe.modules.experts import register_experts_implementation
from hf_neuron_moe.precision_map import PrecisionMap
from tests.refusals import refused
from tests.tiny_models import SOME_SLOW_LAYOUTS, tiny_model, tokens

FIRST_IN_BF16 = {"*": "mxfp8", "model.layers.0.*": "bf16"}


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits and all gradients of one step."""
    logits = model(tokens()).logits
    logits.square().mean().backward()
    return logits.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("weights", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_blocks_equal_those_of_uniformly_patched_models(family: str, weights: str) -> None:
    mixed, uniform = tiny_model(family), {name: tiny_model(family) for name in ("bf16", "mxfp8")}
    report = patch_model(mixed, {"precision": FIRST_IN_BF16, "weights": weights})
    assert [entry.precision for entry in report.patched] == ["bf16", "mxfp8"]
    for name, model in uniform.items():
        patch_model(model, {"precision": name, "weights": weights})
    composed = uniform["bf16"]
    composed.model.layers[1] = uniform["mxfp8"].model.layers[1]
    (logits, grads), (expected, theirs) = step(mixed), step(composed)
    assert torch.equal(logits, expected)
    for name, grad in grads.items():
        other = theirs[name]
        assert (grad is None) == (other is None) and (grad is None or torch.equal(grad, other)), name
    for name in ("bf16", "mxfp8"):
        model = tiny_model(family)
        patch_model(model, {"precision": name, "weights": weights})
        assert not torch.equal(model(tokens()).logits, logits)


def test_every_name_of_a_block_and_every_level_can_be_matched() -> None:
    model = tiny_model("qwen2_moe")
    model.model.layers[1].mlp.shared_expert = model.model.layers[0].mlp.shared_expert
    report = patch_model(
        model, {"precision": {"*": "bf16", "*.1.mlp.shared_expert": "fp32", "*.1.mlp.experts": "mxfp8"}}
    )
    shown = {entry.name: entry.precision for entry in report.patched}
    assert shown == {
        "model.layers.0.mlp.experts": "bf16",
        "model.layers.0.mlp.shared_expert": "fp32",  # the other name is an alias
        "model.layers.1.mlp.experts": "mxfp8",
    }
    for name, precision in shown.items():
        assert model.get_submodule(name).neuron_config.precision == precision


def test_the_report_and_the_saved_bytes_are_each_blocks_own() -> None:
    model, options = tiny_model("llama"), {"precision": FIRST_IN_BF16, "activations": "full"}
    own = []
    for precision in ("bf16", "mxfp8"):
        own.append(patch_model(model, {"precision": precision, "activations": "full"}).entries)
        unpatch_model(model)
    assert "  precision  " not in str(patch_model(model, {"activations": "full"}))
    unpatch_model(model)
    report = patch_model(model, options)
    assert report.entries == (own[0][0], own[1][1])
    assert own[0][0].saved_bytes_per_token != own[1][0].saved_bytes_per_token
    assert "(precision mxfp8, model.layers.0.*: bf16, activations full" in str(report)
    assert "  precision  " in str(report)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["config"]["precision"] == FIRST_IN_BF16
    assert [entry["precision"] for entry in plain["entries"]] == ["bf16", "mxfp8"]
    assert patch_model(model, options) is report
    with pytest.raises(UnsupportedModelError, match=r"precision='mxfp8' instead of \{.*\}\. Call unpatch"):
        patch_model(model, {**options, "precision": "mxfp8"})
    set_activations(model, f"{report.saved_bytes_per_token}B/token")
    assert [block.neuron_keep for block in model.modules() if hasattr(block, "neuron_keep")] == [
        "gate_pre+up",
        "gate_pre+gate_act+up+intermediate",
    ]


def test_a_policy_is_checked_against_each_blocks_kernels() -> None:
    model, extra = tiny_model("llama"), {"keep": ["gate_pre", "gate_act", "up"]}
    with refused(ConfigError, "activations", "the bf16 kernels have"):
        patch_model(model, {"precision": FIRST_IN_BF16, "activations": extra})
    with refused(ConfigError, "activations", "kernels have"):
        NeuronMoEConfig(precision={"*": "fp32", "a": "bf16"}, activations=extra)
    assert not any(hasattr(module, "neuron_config") for module in model.modules())
    policy = {"keep": "full", "modules": {"*.1.*": extra}}
    report = patch_model(model, {"precision": FIRST_IN_BF16, "activations": policy})
    assert [entry.activations for entry in report.patched] == ["full", "gate_pre+gate_act+up"]


def test_forms_are_equal_and_come_back() -> None:
    config = NeuronMoEConfig(precision=dict(reversed(FIRST_IN_BF16.items())))
    same = NeuronMoEConfig(precision=PrecisionMap(FIRST_IN_BF16))
    assert config == same and hash(config) == hash(same) and config.precision == FIRST_IN_BF16
    assert NeuronMoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == eval(repr(config)) == config
    assert type(config.to_dict()["precision"]) is dict
    assert NeuronMoEConfig(precision={"*": "fp32"}) == NeuronMoEConfig(precision="fp32")
    with pytest.raises(TypeError, match="cannot be changed"):
        config.precision["*"] = "bf16"
    with pytest.raises(TypeError, match="cannot be changed"):
        config.precision.update({"*": "bf16"})


@pytest.mark.parametrize(
    ("precision", "argument", "says"),
    [
        ({"*": "mxfp"}, "precision['*']", r"Did you mean 'mxfp8'\?"),
        ({"*": "bf16", "a": None}, "precision['a']", "got None"),
        ({"*": "bf16", "a": "mxfp4"}, "precision['a']", "one of bf16, mxfp8, fp32, got 'mxfp4'"),
        ({"*": "bf16", 3: "mxfp8"}, "precision", "globs over module names, got 3"),
        ({"a": "mxfp8"}, "precision", r'with the key "\*", got \{\'a\''),
        ({}, "precision", r"got \{\}"),
        ([("*", "bf16")], "precision", r"got \[\("),
    ],
)
def test_refused_maps(precision: Any, argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        NeuronMoEConfig(precision=precision)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"*.7.*": "bf16"}, r"got '\*\.7\.\*'"),
        ({"model.layer.0.mlp": "bf16"}, r"Did you mean 'model\.layers\.0\.mlp'"),
        ({"*.0.*": "bf16", "*mlp": "fp32"}, r"got '\*\.0\.\*' \(bf16\) and '\*mlp' \(fp32\).*'model\.layers\.0\.mlp'"),
    ],
)
def test_refused_globs_change_nothing(others: dict[str, str], says: str) -> None:
    model = tiny_model("llama")
    with refused(ConfigError, "precision", says, where="patch_model"):
        patch_model(model, {"precision": {"*": "mxfp8", **others}})
    assert not any(hasattr(module, "neuron_config") for module in model.modules())


def test_globs_that_agree_may_match_one_block() -> None:
    others = {"*.0.*": "bf16", "*.layers.0.mlp": "bf16"}
    report = patch_model(tiny_model("llama"), {"precision": {"*": "mxfp8", **others}})
    assert [entry.precision for entry in report.patched] == ["bf16", "mxfp8"]


def test_an_experts_implementation_has_one_precision() -> None:
    with refused(ConfigError, "config.precision", "does not know the names of the blocks"):
        register_experts_implementation({"precision": FIRST_IN_BF16}, name="neuron_moe_map")


def test_training_arguments(tmp_path: Path) -> None:
    parser = HfArgumentParser(NeuronMoETrainingArguments)
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--neuron_precision"]
    (arguments,) = parser.parse_args_into_dataclasses([*words, json.dumps(FIRST_IN_BF16)], look_for_args_file=False)
    (from_file,) = parser.parse_dict({"output_dir": str(tmp_path), "neuron_precision": FIRST_IN_BF16})
    for each in (arguments, from_file):
        assert each.neuron_config().precision == FIRST_IN_BF16
        json.dumps(each.to_dict())
    with refused(ConfigError, "neuron_precision", "a JSON object"):
        parser.parse_args_into_dataclasses([*words, '{"*": '], look_for_args_file=False)
