"""Small models whose sizes the device kernels take, and short training runs of them. Letters: H hidden, I intermediate.

The dense MLP and the MXFP8 experts need H and I in multiples of 128, the bf16 experts an H in multiples of 512.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_neuron_moe import patch_model
from tests.tiny_models import tiny_model, tokens


@dataclass(frozen=True)
class Case:
    """A family in a precision that one of the chips has kernels for.

    Attributes:
        family: of ``tests.tiny_models``.
        precision: of the blocks.
        target: the chip.
        block_size: of the experts.
        sizes: of the model.
        bound: relative difference of losses to the torch backend's; 0 where the arithmetic is the same.
    """

    family: str
    precision: str
    target: str
    block_size: int = 512
    sizes: dict[str, Any] = field(default_factory=dict)
    bound: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``patch_model`` without the backend."""
        return {"precision": self.precision, "block_size": self.block_size}

    def model(self, layers: int = 1, **changes: Any) -> nn.Module:
        """The same model every time; its MLP weights are small enough for bf16 sums not to cancel."""
        model = tiny_model(self.family, **{"num_hidden_layers": layers, **self.sizes, **changes})
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "mlp" in name:
                    param.mul_(0.25)
        return model


DENSE = Case("llama", "mxfp8", "trn3", sizes={"hidden_size": 128, "intermediate_size": 256})
EXPERTS_MX = Case("mixtral", "mxfp8", "trn3", 128, {"hidden_size": 128, "intermediate_size": 128})
# The documented tolerance of the bf16 kernels is 2e-2 of the largest value; a loss averages over many of them.
EXPERTS = Case("mixtral", "bf16", "trn2", 256, {"hidden_size": 512, "intermediate_size": 64}, bound=1e-3)
DENSE_BF16 = Case("llama", "bf16", "trn2", sizes=DENSE.sizes, bound=1e-3)  # one expert of the same kernels
CASES = {"dense": DENSE, "experts-mxfp8": EXPERTS_MX, "experts-bf16": EXPERTS, "dense-bf16": DENSE_BF16}
SOME_SLOW = ["experts-bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "experts-mxfp8"))]
"""All cases, one of them in the fast run: where the others go the same way."""


def train(model: nn.Module, steps: int = 3, rate: float = 1e-2) -> list[float]:
    """Losses of a few SGD steps."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=rate)
    losses = []
    for step in range(steps):
        ids = tokens(2, 12, seed=step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(case: Case, backend: str, layers: int = 1, steps: int = 3, **options: Any) -> list[float]:
    """Patch the case's model for a backend and train it."""
    model = case.model(layers)
    patch_model(model, {**case.options, "backend": backend, **options})
    return train(model, steps)


def first_gradients(case: Case, backend: str, **options: Any) -> dict[str, Tensor]:
    """Gradients of one step by stock parameter."""
    model = case.model()
    patch_model(model, {**case.options, "backend": backend, "weights": "stock", **options})
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Rows(Dataset[dict[str, Tensor]]):
    """A few fixed sequences."""

    def __init__(self, count: int = 8) -> None:
        self.ids = tokens(count, 12, seed=11)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train_with_trainer(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Losses of a few steps of the stock Trainer, all digits."""
    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,  # else Adam's first step is as large where a gradient is nothing but rounding
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 5,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def close(losses: list[float], expected: list[float], bound: float) -> bool:
    """Equal, or within a relative bound."""
    pairs = list(zip(losses, expected, strict=True))
    return all(abs(mine - theirs) <= bound * abs(theirs) for mine, theirs in pairs)
