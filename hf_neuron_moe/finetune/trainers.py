"""TRL's trainers with patched blocks, a model card of their own, and an end after the step on Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DPOTrainer, SFTTrainer

from hf_neuron_moe.finetune.card import card_of
from hf_neuron_moe.finetune.train_options import Options
from hf_neuron_moe.training.cpu_fsdp import CpuFSDP2Mixin
from hf_neuron_moe.training.trainer import NeuronMoETrainerMixin

_TOGETHER_S = 2.0
"""A launcher repeats the signal that the terminal sent: signals this close are one."""


class _OwnCard:
    """Writes this package's model card where TRL's trainers write theirs."""

    options: Options | None = None

    def create_model_card(self: Any, *_: object, **__: object) -> None:
        """Write ``README.md`` into the output folder."""
        if self.options is not None and self.is_world_process_zero():
            text = card_of(self, self.options)
            (Path(self.args.output_dir) / "README.md").write_text(text, encoding="utf-8")

    def _send_telemetry(self) -> None:
        """Send nothing: TRL's trainers would tell its authors about the run."""


class NeuronSFTTrainer(CpuFSDP2Mixin, NeuronMoETrainerMixin, _OwnCard, SFTTrainer):
    """``SFTTrainer`` that patches, measures, and keeps its checkpoints whole."""


class NeuronDPOTrainer(CpuFSDP2Mixin, NeuronMoETrainerMixin, _OwnCard, DPOTrainer):
    """``DPOTrainer`` that patches, measures, and keeps its checkpoints whole."""


TRAINERS: dict[str, type[NeuronSFTTrainer] | type[NeuronDPOTrainer]] = {
    "sft": NeuronSFTTrainer,
    "dpo": NeuronDPOTrainer,
}


class LogShortRuns(TrainerCallback):
    """Logs every step of a run that would end before its first log."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare the steps of the run with those of a log."""
        if state.logging_steps > state.max_steps:
            state.logging_steps = 1


class StopAfterStep(TrainerCallback):
    """Ends training after the present step, with a checkpoint, once Ctrl-C was pressed; at once if pressed again.

    A context manager around ``train``. Processes agree: one that got the signal stops all of them after one step.
    """

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.stopped = False
        self.steps = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n")
        elif now - self.asked_at > _TOGETHER_S:
            raise KeyboardInterrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if a process was asked to."""
        self.steps += 1
        asked = self.asked_at is not None
        if args.world_size > 1:
            flag = torch.tensor(int(asked), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            asked = bool(flag.item())
        if asked:
            self.stopped = control.should_save = control.should_training_stop = True
