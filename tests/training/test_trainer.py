"""The stock Trainer on patched models: resume, checkpointing, accumulation, autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_neuron_moe import patch_model
from hf_neuron_moe.training import enable_moe_resume
from tests.tiny_models import SOME_SLOW_LAYOUTS, WEIGHT_LAYOUTS, tiny_model, tokens
from tests.training.runs import SETTINGS


class Rows(Dataset[dict[str, Tensor]]):
    """A few fixed sequences."""

    def __init__(self, count: int = 16) -> None:
        self.ids = tokens(count, 12, seed=11)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(model: nn.Module, folder: Path, resume: str | None = None, **options: Any) -> list[float]:
    """Train a few steps; return the loss of every step, as logged (all digits)."""
    arguments = TrainingArguments(output_dir=str(folder), **{**SETTINGS, **options})
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def prepared(family: str, home: str | None) -> nn.Module:
    """A tiny model, patched; or, for home None, a stock one that only reads its checkpoints."""
    model = tiny_model(family)
    if home is None:
        enable_moe_resume(model)
    else:
        patch_model(model, {"precision": "fp32", "weights": home})
    return model


@pytest.mark.parametrize("home", [*SOME_SLOW_LAYOUTS, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_resumed_run_equals_the_uninterrupted_one(family: str, home: str | None, tmp_path: Path) -> None:
    whole = prepared(family, home)
    losses = train(whole, tmp_path, save_strategy="steps", save_steps=2)
    assert len(set(losses)) == 4
    resumed = prepared(family, home)
    with torch.no_grad():
        for param in resumed.parameters():
            param.fill_(0.5)  # whatever is not restored would show
    again = train(resumed, tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))
    assert again == losses
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_checkpoint_of_the_patched_model_opens_in_stock_transformers(home: str, tmp_path: Path) -> None:
    model = prepared("mixtral", home)
    train(model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for name, value in stock.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    torch.testing.assert_close(
        stock.eval()(tokens()).logits, model.eval()(tokens()).logits, rtol=1e-5, atol=1e-5
    )  # fp32 rounding: the experts' sums run in another order


def counted(calls: list[bool], forward: Callable[..., Any], *args: Any) -> Any:
    calls.append(torch.is_grad_enabled())
    return forward(*args)


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_gradient_checkpointing_changes_nothing(family: str, home: str, tmp_path: Path) -> None:
    plain = train(prepared(family, home), tmp_path / "plain", max_steps=2)
    for reentrant in (False, True):
        model = prepared(family, home)
        calls: list[bool] = []
        layer = model.model.layers[0]
        inner = layer.mlp.experts if family == "mixtral" else layer.mlp
        inner.forward = functools.partial(counted, calls, inner.forward)
        losses = train(
            model,
            tmp_path / str(reentrant),
            max_steps=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        assert losses == plain
        assert len(calls) == 4  # two steps, each forward run again in its backward
        assert calls == ([False, True] * 2 if reentrant else [True] * 4)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3"])
def test_patched_training_follows_stock(family: str, tmp_path: Path) -> None:
    stock = train(tiny_model(family), tmp_path / "stock")
    for home in WEIGHT_LAYOUTS:
        losses = train(prepared(family, home), tmp_path / home)
        # Rounding differences of 1e-7 grow over AdamW steps of size 1e-2; they stay far below one step's change.
        assert losses == pytest.approx(stock, rel=1e-4)


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
def test_gradient_accumulation_equals_stock(home: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
    }
    stock = train(tiny_model("mixtral"), tmp_path / "stock", **options)
    # fp32 rounding, as above.
    assert train(prepared("mixtral", home), tmp_path / home, **options) == pytest.approx(stock, rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "mxfp8"),
        ("mixtral", "bf16"),
        pytest.param("llama", "bf16", marks=pytest.mark.slow),
        pytest.param("mixtral", "mxfp8", marks=pytest.mark.slow),
    ],
)
def test_bf16_autocast_trains(family: str, precision: str, home: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    patch_model(model, {"precision": precision, "weights": home})
    before = {name: value.clone() for name, value in model.state_dict().items() if "mlp" in name}
    seen: set[torch.dtype] = set()
    attention = model.model.layers[0].self_attn.q_proj
    attention.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    losses = train(model, tmp_path, bf16=True, max_steps=32)
    assert seen == {torch.bfloat16}  # autocast was on
    assert sum(losses[-8:]) < sum(losses[:8])  # the fourth time and the first time through the rows
    assert all(not torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert {param.dtype for param in model.parameters()} == {torch.float32}
