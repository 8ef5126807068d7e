"""Two processes with four of eight experts each; the second one computes with an expert's weights of some steps ago.

    python -m tests.training.guard.experts_driver FOLDER

Every process writes what it saw to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.training.guard.bands import Bands
from hf_neuron_moe.training.guard.watch import Watch
from hf_neuron_moe.training.metrics import TrainingMonitor
from tests.tiny_models import tiny_model, tokens
from tests.training.guard.faults import fault_named
from tests.training.guard.test_codes import FORWARD, _neighbor, _stack
from tests.training.sharded_driver import LAYOUTS, SIZES, in_processes, trainer

STALE = fault_named("stale down of one expert")
BAD = 2
"""The step in which the fault is."""


def broken(kernel: str, change: Callable[..., Any]) -> Any:
    """Return a context in which the second process's kernel is broken."""
    real = getattr(TorchBackend, kernel)

    def call(self: TorchBackend, *args: Any) -> Any:
        return change(real.__get__(self), *args)

    return patch.object(TorchBackend, kernel, call if dist.get_rank() == 1 else real)


class Breaking(TrainerCallback):
    """Breaks the second process's experts in one step."""

    def __init__(self) -> None:
        self.broken = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == BAD:
            self.broken.enter_context(broken("experts_forward", STALE.change))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.broken.close()


def divided(layout: str) -> DistributedConfig:
    """Return a layout in which each process has half of the experts."""
    sizes: Any = LAYOUTS[layout]
    assert sizes["ep_size"] == 2
    return DistributedConfig(**sizes)


def trained(home: Path, layout: str) -> list[str]:
    """Train some steps; return what the guard says."""
    options: dict[str, Any] = {"neuron_guard": "warn", "neuron_precision": "bf16", "save_strategy": "no"}
    model = AutoModelForCausalLM.from_pretrained(home / "model", distributed_config=divided(layout))
    run = trainer(home, layout, layout, model=model, max_steps=BAD + 1, callbacks=[Breaking()], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
    return [str(entry.message) for entry in caught if "The guard found" in str(entry.message)]


def of_codes(home: Path) -> dict[str, Any]:
    """Look at a step of experts whose weights are codes, of which one has its neighbor's, and count tokens."""
    model = AutoModelForCausalLM.from_pretrained(home / "codes", distributed_config=divided("ep2_fsdp2")).train()
    watch, monitor, ids = Watch(model, Bands()), TrainingMonitor(model), tokens(4, 40, seed=dist.get_rank())
    monitor.attach()
    watch.begin(1)
    with broken(FORWARD, _stack(down_codes=_neighbor)):
        model(input_ids=ids, labels=ids).loss.backward()
    watch.detach()
    monitor.detach()
    assert watch.looked is not None
    counted = next(iter(monitor.take()["experts"].values()))
    return {"alarms": watch.looked.alarms, "counted": counted}


def run(home: Path) -> None:
    """Run all of it in one process of the group."""
    found = {layout: trained(home, layout) for layout in ("ep2_fsdp2", "ep2_tp2")}
    result = {"said": found, "codes": of_codes(home)}
    (home / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result), encoding="utf-8")


def main(home: Path) -> None:
    """Make the models and run the processes."""
    torch.set_num_threads(1)
    tiny_model("mixtral", **SIZES).save_pretrained(home / "model")
    convert_checkpoint(home / "model", home / "codes", ConvertOptions(precision="mxfp8", layout="fused"))
    statuses = in_processes(2, home, run)
    if any(statuses):
        raise SystemExit(f"processes ended with {statuses}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
