"""Two processes train together and save safe checkpoints; then one gets a NaN, another precision, a stale weight.

    torchrun --nproc-per-node 2 -m tests.training.rank_driver FOLDER

Every process writes what it saw to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neuron_moe import NeuronMoECallback, patch_model
from hf_neuron_moe.errors import (
    GuardError,
    NeuronMoEWarning,
    NonFiniteWeightsError,
    RankError,
    UnsupportedModelError,
)
from hf_neuron_moe.training.checkpoints import SafeCheckpointMixin
from tests.tiny_models import tiny_model, tokens
from tests.training.guard.breaking import Breaking
from tests.training.guard.faults import fault_named


class SafeTrainer(SafeCheckpointMixin, Trainer):
    """The stock Trainer with safe checkpoints."""


class Spoiler(TrainerCallback):
    """Puts a NaN into the second process's copy of the model."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 6:
            with torch.no_grad():
                kwargs["model"].lm_head.weight[0, 0] = float("nan")


def trained(
    folder: Path,
    resume: bool,
    callbacks: list[TrainerCallback] | None = None,
    steps: int = 4,
    precision: str | None = "fp32",
) -> Trainer:
    """Train up to `steps`; return the trainer. Without a `precision` the model is not patched."""
    model = tiny_model("mixtral", num_hidden_layers=1, attention_dropout=0.2)
    if precision is not None:
        patch_model(model, {"precision": precision})
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        seed=5,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 12, seed=11)]
    trainer = SafeTrainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(folder: Path) -> None:
    """Train, damage a checkpoint, resume, and fail."""
    first = trained(folder / "run", False)
    rank = first.args.process_index
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    if rank == 0:
        (folder / "run" / "checkpoint-4" / "rng_state_1.pth").unlink()
    first.accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = trained(folder / "run", True)
    again = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    refused = ""
    try:
        trained(folder / "run", True, [Spoiler()], steps=6)
    except NonFiniteWeightsError as error:
        refused = str(error)
    differing = []
    for precisions in (("fp32", "bf16"), ("fp32", None)):  # weights of DDP's processes have the same shapes
        try:
            trained(folder / "other", False, [NeuronMoECallback()], precision=precisions[rank])
        except (RankError, UnsupportedModelError) as error:
            differing.append([type(error).__name__, str(error)])
    stopped = ""
    fault = fault_named("dropped expert")
    breaking = Breaking(fault, "model.layers.0.mlp.experts", 2)
    try:
        callbacks = [breaking, NeuronMoECallback(guard="stop")] if rank == 1 else [NeuronMoECallback(guard="stop")]
        trained(folder / "guarded", False, callbacks, precision="bf16")
    except GuardError as error:
        stopped = str(error)
    result = {
        "stopped": stopped,
        "differing": differing,
        "losses": losses,
        "again": again,
        "warned": [str(entry.message) for entry in caught if entry.category is NeuronMoEWarning],
        "refused": refused,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
