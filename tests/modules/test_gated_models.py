"""Models whose experts have other gates, layouts or calls: training, saving, stock loading, generation, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.backends.torch.gating import gating_of
from hf_neuron_moe.errors import UnsupportedModelError
from tests.modules.test_equals_stock import assert_close, run
from tests.refusals import refused
from tests.tiny_models import LATER_GATES, OTHER_CALLS, OTHER_GATES, assert_same_snapshot, snapshot, tiny_model, tokens

FAMILIES = (*OTHER_GATES, *OTHER_CALLS)
STOCK_ONLY = ("dbrx", "jetmoe")
LAYOUTS = [(family, layout) for family in FAMILIES for layout in ("stock", "kernel")]
LAYOUTS = [case for case in LAYOUTS if case[1] == "stock" or case[0] not in STOCK_ONLY]


def patched(model: nn.Module, layout: str) -> nn.Module:
    """The model with its experts patched in fp32."""
    report = patch_model(model, {"precision": "fp32", "weights": layout}, include=["*"], strict=False)
    assert sum(entry.kind == "experts" for entry in report.patched) >= 1
    assert all(entry.kind == "mlp" or not entry.gated for entry in report.refused)
    return model


@pytest.mark.parametrize("family", [*OTHER_GATES, *LATER_GATES])
def test_the_first_patch_may_come_under_another_default_dtype(family: str) -> None:
    """As in ``from_pretrained(dtype=...)``: what is made once for all models with a gate keeps its digits."""
    stock = tiny_model(family)
    before = torch.get_default_dtype()
    gating_of.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = patched(copy.deepcopy(stock), "stock")
    finally:
        torch.set_default_dtype(before)
    assert_close(run(model)[0], run(stock)[0], "logits")


@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, layout in LAYOUTS if family in OTHER_CALLS]
)
def test_logits_and_gradients_equal_stock(family: str, layout: str) -> None:
    stock = tiny_model(family)
    model = patched(copy.deepcopy(stock), layout)
    found, expected = run(model), run(stock)
    assert_close(found[0], expected[0], "logits")
    assert_close(found[1], expected[1], "input gradient")
    assert found[2].keys() == expected[2].keys()
    experts = [name for name in expected[2] if "experts" in name or "input_linear" in name]
    assert experts
    for name, gradient in expected[2].items():
        assert name not in experts or gradient.abs().max() > 0, name
        assert_close(found[2][name], gradient, name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "layout"),
    [*LAYOUTS, *(pytest.param(family, "kernel", marks=pytest.mark.slow) for family in LATER_GATES)],
)
def test_saved_weights_load_into_a_stock_model(family: str, layout: str, tmp_path: Path) -> None:
    stock = tiny_model(family).eval()
    before = snapshot(stock)
    state = {name: value.clone() for name, value in stock.state_dict().items()}
    model = patched(stock, layout)
    logits = model(tokens()).logits
    model.save_pretrained(tmp_path)
    assert [*model.state_dict()] == [*state]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert_close(again.eval()(tokens()).logits, logits, "logits")
    ids = model.generate(tokens()[:, :4], max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, again.generate(tokens()[:, :4], max_new_tokens=4, do_sample=False))
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)


def adapted(model: nn.Module, family: str) -> nn.Module:
    """The model with adapters on its experts' weights."""
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    torch.manual_seed(1)
    targets: dict[str, Any] = {"target_modules": [], "target_parameters": [f"experts.{first}", "experts.down_proj"]}
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **targets))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "nemotron_h", "longcat_flash"])
@pytest.mark.parametrize("layout", ["stock", "kernel"])
def test_adapters_on_experts(family: str, layout: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    model = adapted(patched(copy.deepcopy(stock), layout), family)
    logits = model(tokens()).logits
    logits.square().mean().backward()
    trained = [param.grad for param in model.parameters() if param.requires_grad]
    assert trained and all(gradient is not None and gradient.abs().max() > 0 for gradient in trained)
    if family == "gpt_oss" and layout == "kernel":
        with refused(UnsupportedModelError, "the block", "merge_and_unload"):
            model.save_pretrained(tmp_path)
        adapters = {"base_model.model." + name: torch.zeros(1) for name in ("model.layers.0.mlp.experts.lora_A.w",)}
        with refused(UnsupportedModelError, "the block", "columns have another order"):
            model.load_state_dict(adapters, strict=False)
    else:
        model.save_pretrained(tmp_path)
        other = adapted(stock, family)
        other.load_adapter(tmp_path, "default")
        assert_close(other(tokens()).logits, logits, "logits")
    merged = model.merge_and_unload()
    assert_close(merged(tokens()).logits, logits, "logits")
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").train()
    assert_close(again(tokens()).logits, logits, "logits")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family",
    ["gpt_oss", *(pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES[1:], *LATER_GATES))],
)
def test_a_trainer_run_gives_the_stock_losses(family: str, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
    losses = []
    for layout in (None, "stock", *(["kernel"] if family not in STOCK_ONLY else [])):
        model = tiny_model(family)
        if layout is not None:
            patched(model, layout)
        options: dict[str, Any] = {"report_to": [], "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
        arguments = TrainingArguments(
            str(tmp_path / str(layout)), max_steps=4, per_device_train_batch_size=2, learning_rate=0.01, **options
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if layout == "kernel" and family != "deepseek_v4":  # whose config transformers 5.23 refuses when it resumes
            resumed = Trainer(patched(tiny_model(family), layout), arguments, train_dataset=rows)
            resumed.train(resume_from_checkpoint=str(tmp_path / "kernel" / "checkpoint-2"))
            for name, value in resumed.model.state_dict().items():
                assert torch.equal(value, model.state_dict()[name]), name
    # Adam divides small gradients by their own size, which makes more of a rounding.
    for found in losses[1:]:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[0]), rtol=1e-4, atol=0)
