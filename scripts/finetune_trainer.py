"""What transformers' Trainer refuses only when it is made, asked of the options of ``finetune.py`` beforehand."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from accelerate.utils import DynamoBackend
from finetune_places import one_line
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from hf_neuron_moe.errors import ConfigError, nearest


def check_trainer(training: TrainingArguments) -> None:
    """Refuse options that no Trainer of this process can be made with.

    Raises:
        ConfigError: ``output_dir`` cannot be made or written to, ``torch_compile_backend`` is unknown, or ``fsdp`` is
            asked for in one process.
    """
    check_output(training.output_dir)
    check_compile_backend(training)
    settings = training.fsdp_config if isinstance(training.fsdp_config, dict) else {}
    if training.fsdp and not settings.get("xla") and training.parallel_mode is not ParallelMode.DISTRIBUTED:
        remedy = (
            "Leave it out, or start several processes: "
            "`accelerate launch --config_file configs/accelerate/fsdp2-cpu.yaml scripts/finetune.py ...`."
        )
        raise _bad("fsdp", "unset in a run of one process", repr(training.fsdp), remedy)


def check_output(folder: str) -> None:
    """Refuse an output folder that cannot be made or written to; nothing of the probe stays behind.

    Raises:
        ConfigError: it cannot.
    """
    there = Path(folder).absolute()
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".finetune-", dir=there):
            pass
    except OSError as error:
        why = f"{there} is no folder" if not there.is_dir() else f"{there}: {error.strerror or one_line(error)}"
        expected = "a folder that exists or can be made, and that can be written to"
        raise _bad("output_dir", expected, f"{folder!r} ({why})", "Name another folder.") from error


def check_compile_backend(training: TrainingArguments) -> None:
    """Refuse a backend of ``torch.compile`` that accelerate does not know.

    Raises:
        ConfigError: as above.
    """
    name = training.torch_compile_backend
    known = sorted(backend.value.lower() for backend in DynamoBackend if backend is not DynamoBackend.NO)
    if training.torch_compile and name and name.lower() not in known:
        remedy = f"inductor suits most runs.{nearest(name.lower(), known)}"
        raise _bad("torch_compile_backend", f"one of {', '.join(known)}", repr(name), remedy)


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("finetune")
