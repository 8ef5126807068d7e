"""Tiny runs of real Trainers for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
from tests.tiny_models import tokens

SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "seed": 5,
    "disable_tqdm": True,
}


class Rows(Dataset[dict[str, Tensor]]):
    """A few fixed sequences; with `padding` the first of them are padded, as the attention mask says."""

    def __init__(self, count: int = 16, padding: int = 0) -> None:
        self.ids = tokens(count, 12, seed=11)
        self.mask = torch.ones_like(self.ids)
        self.mask[: count // 2, :padding] = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, mask = self.ids[index], self.mask[index]
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder: Path, **options: Any) -> NeuronMoETrainingArguments:
    """Training arguments of a few steps."""
    return NeuronMoETrainingArguments(output_dir=str(folder), **{**SETTINGS, **options})


def trainer(model: nn.Module | None, folder: Path, *, rows: Rows | None = None, **options: Any) -> NeuronMoETrainer:
    """A NeuronMoETrainer; options that are no training arguments go to the Trainer itself."""
    own = {key: options.pop(key) for key in ("model_init", "optimizers", "callbacks") if key in options}
    if model is not None:
        own["model"] = model
    return NeuronMoETrainer(args=arguments(folder, **options), train_dataset=rows or Rows(), **own)


def losses(run: Trainer) -> list[float]:
    """The loss of every logging step, all digits."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def train_logs(run: Trainer) -> list[dict[str, Any]]:
    """The logs of the training steps."""
    return [entry for entry in run.state.log_history if "loss" in entry]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "neuron_moe" / "metrics.jsonl").read_text().splitlines()]
