"""What the benchmarks share: the shape that is measured, the machine, and the instruction set it is held to."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast


@dataclass(frozen=True)
class Shape:
    """Sizes of what is measured: H hidden, I intermediate, T tokens, E experts (none: dense), K experts per token."""

    name: str
    H: int
    I: int  # noqa: E741
    T: int
    E: int = 0
    K: int = 0

    @property
    def sizes(self) -> str:
        """In words, without the tokens."""
        return f"H={self.H} I={self.I}" + (f" E={self.E} k={self.K}" if self.E else " dense")


def positive(text: str) -> int:
    """Read an option that is a number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of 1 or more is needed, not {text!r}")
    return int(text)


def check_top_k(parser: argparse.ArgumentParser, experts: int, per_token: int) -> None:
    """End with an error if a token would have more experts than there are."""
    if per_token > experts:
        parser.error(f"argument --sizes: a token can have at most all {experts} experts, not {per_token}")


def processor() -> str:
    """Return the processor's model name where Linux tells it, else what Python knows (often only ``x86_64``)."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> dict[str, Any]:
    """Describe where the numbers come from."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "native_bf16_matmul": bf16_matmul_is_fast(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def restart_with_isa(isa: str) -> None:
    """Run again with the matmul libraries held to `isa`; they read it once, when they are loaded."""
    wanted = {"ONEDNN_MAX_CPU_ISA": isa.upper(), "ATEN_CPU_CAPABILITY": isa, "MKL_ENABLE_INSTRUCTIONS": isa.upper()}
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
