"""Fine-tunes once for every YAML file in a folder, in one group of processes; "stopped" is ended by Ctrl-C in one.

torchrun --nproc-per-node 2 -m tests.finetune.layout_driver FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_neuron_moe.finetune import finetune, read_options, train_run
from hf_neuron_moe.finetune.train_run import TrainingInterrupted


class PressCtrlC(TrainerCallback):
    """Sends the signal in the second step of the second process alone."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGINT)


def stop(file: Path) -> None:
    """Train until the processes agree to stop."""
    made = train_run.make_trainer

    def make(*given: Any) -> Any:
        trainer = made(*given)
        trainer.add_callback(PressCtrlC())
        return trainer

    train_run.make_trainer = make
    try:
        finetune(read_options([str(file)]), quiet=True)
    except TrainingInterrupted as interrupted:
        print(interrupted)
    train_run.make_trainer = made


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sorted(Path(sys.argv[1]).glob("*.yaml")):
        if file.stem == "stopped":
            stop(file)
        else:
            finetune(read_options([str(file)]), print, quiet=True)
    torch.distributed.destroy_process_group()
