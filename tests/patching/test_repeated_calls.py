"""A second call tells the truth: what is patched, through which object, and whether it is still in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.block import NeuronBlock
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model


def wrapped_by_peft(model: nn.Module) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def blocks(model: nn.Module) -> int:
    return sum(isinstance(module, NeuronBlock) for module in model.modules())


def call_refused(call: Any, model: nn.Module, match: str) -> None:
    """`call` refuses with `match`, and `model` is as it was."""
    before = snapshot(model)
    with refused(UnsupportedModelError, "model", match):
        call()
    assert_same_snapshot(snapshot(model), before)


def test_a_patched_part_does_not_pass_for_the_whole() -> None:
    model = tiny_model("llama")
    part = model.model.layers[0]
    patch_model(part)
    call_refused(lambda: patch_model(model), model, r"part is patched: 'model.layers.0' \(1 block\).*unpatch_model")
    unpatch_model(part)
    assert len(patch_model(model).patched) == blocks(model) == 2


def test_a_patched_member_does_not_pass_for_its_container() -> None:
    both = nn.ModuleDict({"a": tiny_model("llama"), "b": tiny_model("mixtral")})
    patch_model(both["a"])
    call_refused(lambda: patch_model(both), both, r"part is patched: 'a' \(2 blocks\)")
    assert len(patch_model(both["b"]).patched) == 2
    call_refused(lambda: patch_model(both), both, r"'a' \(2 blocks\), 'b' \(2 blocks\)")


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_an_exchanged_block_is_noticed(home: str) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    patch_model(model, {"weights": home})
    model.model.layers[1].mlp = other.model.layers[1].mlp
    call_refused(lambda: patch_model(model, {"weights": home}), model, "exchanged: model.layers.1.mlp.*unpatch_model")
    unpatch_model(model)
    assert len(patch_model(model, {"weights": home}).patched) == 2


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2_moe"])
def test_the_same_call_again_answers_with_the_same_report(family: str, home: str) -> None:
    model = tiny_model(family)
    assert patch_model(model, {"weights": home}) is patch_model(model, {"weights": home})


def test_an_added_layer_is_noticed() -> None:
    model = tiny_model("llama")
    patch_model(model)
    model.model.layers.append(tiny_model("llama").model.layers[0])
    call_refused(lambda: patch_model(model), model, "further blocks: model.layers.2.mlp")


def test_strict_holds_for_a_repeated_call_too() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda layer, args, out: out)
    report = patch_model(model, strict=False)
    call_refused(
        lambda: patch_model(model),
        model,
        r"model.layers.1.mlp .*gate_proj is a linear layer with hooks\.\n.*strict=False",
    )
    assert patch_model(model, strict=False) is report


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_patch_outlives_the_adapters_wrapper(family: str, home: str) -> None:
    model = tiny_model(family)
    wrapper = wrapped_by_peft(model)
    report = patch_model(wrapper, {"weights": home}, exclude="base_model.model.model.layers.1.*")
    assert patch_model(wrapper, {"weights": home}, exclude="base_model.model.model.layers.1.*") is report
    base = wrapper.merge_and_unload()
    assert patch_model(base, {"weights": home}, exclude="base_model.model.model.layers.1.*") is report
    assert unpatch_model(base) is report
    assert blocks(base) == 0
    assert len(patch_model(base).patched) == 2


def test_a_wrapper_put_on_later_answers_as_the_model_does() -> None:
    model = tiny_model("mixtral")
    report = patch_model(model, exclude="model.layers.1.mlp.experts")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapper = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=parameters))
    assert patch_model(wrapper, exclude="model.layers.1.mlp.experts") is report
    assert patch_model(wrapper.base_model, exclude="model.layers.1.mlp.experts") is report
    assert unpatch_model(wrapper) is report


def test_prompt_learning_has_one_wrapper_less() -> None:
    model = tiny_model("llama")
    wrapper = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    report = patch_model(wrapper)
    assert report.patched[0].name == "base_model.model.layers.0.mlp"
    assert unpatch_model(model) is report


def test_a_part_of_a_patched_model_is_told_where_the_patch_is() -> None:
    model = tiny_model("llama")
    patch_model(model)
    for call in (patch_model, unpatch_model):
        for part in (model.model, model.model.layers[0], model.model.layers[0].mlp):
            shown = r"with (1 block|2 blocks) \(first: .*patched through an outer or another object.*unpatch_model"
            call_refused(partial(call, part), model, shown)
    unpatch_model(model)
    with refused(UnsupportedModelError, "model", "Nothing needs to be undone"):
        unpatch_model(model.model)


def test_a_block_compiled_before_patching_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.compile(backend="eager")
    call_refused(
        lambda: patch_model(model), model, r"layers.1.mlp .LlamaMLP.: it is compiled.*compile it after patching"
    )
    patch_model(model, exclude="model.layers.1.mlp")
    compiled = model.model.layers[0].mlp
    compiled.compile(backend="eager")
    patched, x = compiled._compiled_call_impl, torch.randn(3, 32)
    torch.testing.assert_close(patched(x), compiled.forward(x), rtol=0, atol=0)


def test_a_second_unpatch_says_that_nothing_is_patched() -> None:
    model = tiny_model("llama")
    patch_model(model)
    unpatch_model(model)
    call_refused(
        lambda: unpatch_model(model), model, r"nothing in it is patched \(any more\)\. Nothing needs to be undone"
    )


def test_unpatching_a_container_reports_every_model_in_it() -> None:
    both = nn.ModuleDict({"a": tiny_model("llama"), "b": wrapped_by_peft(tiny_model("mixtral")), "c": nn.Identity()})
    first = patch_model(both["a"], {"precision": "fp32"})
    second = patch_model(both["b"], {"weights": "kernel"}, exclude="*.layers.1.*")
    report = unpatch_model(both)
    assert blocks(both) == 0
    assert report.parts == (("a", first), ("b", second))
    assert [(entry.name, entry.status) for entry in report.entries] == [
        ("a.model.layers.0.mlp", "patched"),
        ("a.model.layers.1.mlp", "patched"),
        ("b.base_model.model.model.layers.0.mlp.experts", "patched"),
        ("b.base_model.model.model.layers.1.mlp.experts", "skipped"),
    ]
    assert all(isinstance(both.get_submodule(entry.name), nn.Module) for entry in report.entries)
    text = str(report)
    assert "a: 2 patched" in text and "b: 1 patched, 1 skipped" in text and "precision fp32" in text
    assert [part["config"]["precision"] for part in report.to_dict()["parts"].values()] == ["fp32", "bf16"]
    assert "parts" not in first.to_dict()
