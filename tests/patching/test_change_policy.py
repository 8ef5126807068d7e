"""Another policy for blocks in place: the same gradients, other bytes, and a report that stays true."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_neuron_moe import patch_model, set_activations, unpatch_model
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError
from hf_neuron_moe.modules.block import NeuronBlock
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model, tokens


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_only_what_is_kept_changes(home: str) -> None:
    model = tiny_model("qwen2_moe")
    first = patch_model(model, {"weights": home})
    expected = gradients(model)
    policy = {"keep": "full", "modules": {"*.0.*experts": "recompute"}}
    changed = set_activations(model, policy)
    assert list(changed.values()) == ["recompute", "full", "full", "full"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    report = patch_model(model, {"weights": home, "activations": policy})
    assert {entry.name: entry.activations for entry in report.patched} == changed
    assert report.saved_bytes_per_token == sum(
        module.saved_bytes_per_token for module in model.modules() if isinstance(module, NeuronBlock)
    )
    assert {entry.activations for entry in first.patched} == {"minimal"}
    with refused(UnsupportedModelError, "model", "activations=.* instead of"):
        patch_model(model, {"weights": home})
    unpatch_model(model)


def test_budgets_and_copies() -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=640)
    patch_model(model)
    twin = copy.deepcopy(model)
    assert sorted(set_activations(twin, "2816B/token").values()) == ["full", "recompute"]
    kept = [module.saved_bytes_per_token for module in model.modules() if isinstance(module, NeuronBlock)]
    assert kept == [2432.0, 2432.0], "the original of the copy is left alone"


@pytest.mark.parametrize(
    ("activations", "argument", "says"),
    [
        ("10B/token", "activations", "got 10 bytes per token"),
        ("gate_act", "activations", "only the mxfp8"),
        ({"modules": {"x": "fp8"}}, "activations.modules", "got 'x'"),
    ],
)
def test_refusals_change_nothing(activations: object, argument: str, says: str) -> None:
    model = tiny_model("llama")
    report = patch_model(model)
    with refused(ConfigError, argument, says):
        set_activations(model, activations)
    assert patch_model(model) is report
    assert all(m.neuron_keep == "minimal" for m in model.modules() if isinstance(m, NeuronBlock))


def test_a_model_without_blocks_is_refused() -> None:
    with refused(UnsupportedModelError, "model", got="a LlamaForCausalLM"):
        set_activations(tiny_model("llama"), "fp8")
