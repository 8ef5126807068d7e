"""The files that a run leaves in ``<output_dir>/neuron_moe/``: ``run.json``, ``metrics.jsonl``, ``evaluations.jsonl``.

Numbers that JSON does not know (NaN, infinities) are written as null.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_neuron_moe.output_files import replacing

FOLDER = "neuron_moe"
RUN_FILE, METRICS_FILE, EVALUATIONS_FILE = "run.json", "metrics.jsonl", "evaluations.jsonl"
GUARD_FILE = "guard.jsonl"
_PACKAGES = ("hf-neuron-moe", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "numpy")


class RunFiles:
    """Writer of a run's files, below the trainer's output folder (None is the present one); used by rank 0 only."""

    def __init__(self, output_dir: str | Path | None) -> None:
        self.folder = Path(output_dir or ".") / FOLDER

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Write `run` into ``run.json``, and drop earlier metrics of steps after `step`, 0 for a new run.

        A run that was interrupted after its last checkpoint wrote them, and this one will write them again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        *before, last = self._configurations() if step else [None]
        if last is not None and last["config"] != _plain(run.get("config")):
            before.append({**last, "until": step})
        if before:
            run = {**run, "before": before}
        write_whole(self.folder / RUN_FILE, json.dumps(_plain(run), indent=1, allow_nan=False) + "\n")
        for path in (self.folder / name for name in (METRICS_FILE, EVALUATIONS_FILE, GUARD_FILE)):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                write_whole(path, "".join(line for line in lines if _is_until(line, step)))

    def _configurations(self) -> list[Any]:
        """Return the configurations of the run that is continued, in turn; each but the last with its last step.

        The last is None where it is not known.
        """
        try:
            run = json.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))
            return [*run.get("before", []), {"config": run["config"]}]
        except (FileNotFoundError, ValueError, KeyError, AttributeError):
            return [None]  # another one's file, or none

    def append(self, record: Mapping[str, Any], name: str = METRICS_FILE) -> None:
        """Write one line of ``metrics.jsonl``, or of the file `name`."""
        line = json.dumps(_plain(record), allow_nan=False)
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def training_record(
    args: TrainingArguments, state: TrainerState, model: nn.Module, rows: int | None = None
) -> dict[str, Any]:
    """Return what of the training arguments, the state when training begins and the model makes runs comparable.

    ``resumed_from_step`` is 0 for a new run; ``parameters`` and ``trainable_parameters`` are numbers of elements,
    adapters included. ``adapter`` is peft's kind, null without; ``lora_rank`` is null where the kind has no rank.
    ``loss_type`` is TRL's, null without; `rows` is the size of the training data, None where it has none.
    """
    sizes = [(getattr(param, "ds_numel", param.numel()), param.requires_grad) for param in model.parameters()]
    wrapped = (getattr(module, "peft_config", None) for module in model.modules())  # peft's configurations by name
    adapters = next((found for found in wrapped if isinstance(found, Mapping) and found), {})
    adapter = next(iter(adapters.values()), None)
    kind = getattr(adapter, "peft_type", None)
    kinds = getattr(args, "loss_type", None) or ""  # of TRL's arguments
    return {
        "learning_rate": args.learning_rate,
        "batch_size_per_process": args.train_batch_size,
        "accumulation_steps": args.gradient_accumulation_steps,
        "processes": args.world_size,
        "max_steps": state.max_steps,
        "seed": args.seed,
        "resumed_from_step": state.global_step,
        "parameters": sum(count for count, _ in sizes),
        "trainable_parameters": sum(count for count, is_trained in sizes if is_trained),
        "adapter": None if kind is None else str(getattr(kind, "value", kind)).lower(),
        "lora_rank": getattr(adapter, "r", None),
        "optim": str(getattr(args.optim, "value", args.optim)),
        "loss_type": ", ".join([kinds] if isinstance(kinds, str) else kinds) or None,
        "rows": rows,
    }


def environment() -> dict[str, Any]:
    """Return what the run's figures depend on besides its configuration: versions, machine, threads, date."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": None if accelerator is None else str(accelerator),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_until(line: str, step: int) -> bool:
    """Whether a line is of a step up to `step`; one that was cut off is not."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except json.JSONDecodeError:
        return False


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
