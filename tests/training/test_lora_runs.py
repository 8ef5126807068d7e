"""LoRA through peft and the Trainer: trained, saved, loaded again, merged, and opened in stock transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_neuron_moe import patch_model
from tests.tiny_models import tiny_model, tokens

ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
LAYERS: dict[str, Any] = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
FUSED: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate_up_proj", "mlp.down_proj"]}
EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def patched(family: str, home: str) -> nn.Module:
    model = tiny_model(family)
    patch_model(model, {"precision": "fp32", "weights": home})
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


def assert_equal_to_1e_6(actual: nn.Module, expected: torch.Tensor) -> None:
    assert (logits(actual) - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "home", "targets"),
    [
        ("llama", "stock", ATTENTION),
        pytest.param("llama", "kernel", ATTENTION, marks=pytest.mark.slow),
        pytest.param("llama", "stock", LAYERS, marks=pytest.mark.slow),
        ("llama", "kernel", FUSED),
        pytest.param("mixtral", "stock", EXPERTS, marks=pytest.mark.slow),
        pytest.param("mixtral", "kernel", EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["attention", "attention-kernel", "layers", "fused-kernel", "experts", "experts-kernel"],
)
def test_adapters_are_trained_saved_merged_and_opened_in_stock(
    family: str, home: str, targets: dict[str, Any], tmp_path: Path
) -> None:
    base = patched(family, home)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **targets))
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(16, 12, seed=11)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=8, learning_rate=2e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found[-1] < found[0]
    expected = logits(model)
    assert (expected - logits(patched(family, home))).abs().max() > 1e-2 * expected.abs().max()

    if targets is FUSED:  # no stock model has this weight, so its adapters are not saved
        merged = model.merge_and_unload()
    else:
        model.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(patched(family, home), tmp_path / "adapter")
        assert torch.equal(logits(again), expected)
        assert_equal_to_1e_6(PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter"), expected)
        merged = again.merge_and_unload()
    assert_equal_to_1e_6(merged, expected)
    merged.save_pretrained(tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_equal_to_1e_6(stock, expected)
    # Nothing but the targets was changed.
    kept = [name for name in before if "q_proj" not in name and ("mlp" not in name or targets is ATTENTION)]
    kept = [name for name in kept if "_proj" not in name or targets is not ATTENTION or "mlp" in name]
    assert len(kept) > 3
    for name in kept:
        assert torch.equal(stock.state_dict()[name], before[name]), name
