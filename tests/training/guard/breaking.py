"""A callback that breaks a block in one step of a training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from hf_neuron_moe.training.blocks import patched_blocks
from tests.training.guard.faults import Fault, injected


class Breaking(TrainerCallback):
    """Breaks a block in one step, and puts it back before the update."""

    def __init__(self, fault: Fault, block: str, step: int) -> None:
        self.fault, self.block, self.step, self.broken = fault, block, step, ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.broken.enter_context(injected(self.fault, patched_blocks(kwargs["model"])[self.block]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.broken.close()
