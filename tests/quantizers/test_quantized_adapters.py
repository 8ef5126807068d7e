"""LoRA on top of a frozen MX base, through peft and the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from tests.quantizers.conftest import Converted, load
from tests.tiny_models import tokens

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
LINEAR = {"target_modules": "all-linear"}
ROUTER = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}


def adapted(model: Any, **targets: Any) -> Any:
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **targets))


def frozen_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("llama", ATTENTION, marks=pytest.mark.slow),
        ("mixtral", ATTENTION),
        ("mixtral", ROUTER),
        pytest.param("qwen2_moe", {"target_modules": "all-linear"}, marks=pytest.mark.slow),
    ],
    ids=["llama", "mixtral", "router", "all-linear"],
)
def test_the_trainer_trains_adapters_and_nothing_else(
    converted: Converted, tmp_path: Path, family: str, targets: dict[str, Any]
) -> None:
    folder = converted(family, precision="mxfp8", layout="kernel")
    model = adapted(load(folder), **targets)
    before = frozen_state(model)
    text = tokens(1, 8)[0]
    arguments = TrainingArguments(
        tmp_path, max_steps=16, learning_rate=3e-2, logging_steps=1, report_to=[], use_cpu=True, save_steps=16
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": text, "labels": text}] * 16)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    after = frozen_state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Only the adapter is saved, and it fits the base loaded again.
    saved = tmp_path / "checkpoint-16"
    assert (saved / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (saved / "model.safetensors").exists()
    again = PeftModel.from_pretrained(load(folder), saved)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_every_adapter_gets_a_gradient(converted: Converted) -> None:
    model = adapted(load(converted("mixtral", precision="mxfp8")), **ROUTER).train()
    model(tokens(), labels=tokens()).loss.backward()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    # peft starts lora_B at zero, so that the gradient of lora_A is zero at first; that of lora_B is not.
    assert all(param.grad is not None and param.grad.any() for name, param in trained.items() if "lora_B" in name)


def test_adapters_on_attention_can_be_merged(converted: Converted) -> None:
    model = adapted(load(converted("llama", precision="mxfp8"), dtype=torch.float32), **ATTENTION).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
        expected = model(tokens()).logits
        merged = model.merge_and_unload()
        # fp32 sums in another order, through the rounding to bf16 and MXFP8 of every block's input.
        torch.testing.assert_close(merged(tokens()).logits, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_a_full_fine_tuning_of_the_base_is_refused_by_the_trainer(converted: Converted, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="purely quantized models"):
        Trainer(load(converted("llama", precision="mxfp8")), TrainingArguments(tmp_path, report_to=[], use_cpu=True))


@pytest.mark.parametrize("targets", [{"target_modules": ["gate_proj"]}, {"target_parameters": ["gate_up_proj"]}])
def test_adapters_inside_frozen_blocks_are_refused_by_peft(converted: Converted, targets: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not found|no `target_parameters` found"):
        adapted(load(converted("mixtral", precision="mxfp8")), **targets)
