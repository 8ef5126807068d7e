"""Kernels that do not work, as the stages of a first run would show them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.neuron.double.contract import Double
from tests.neuron.double.memory import KernelTensor, Launch

FAULTS = ("trace", "fake", "compile", "run", "unclear", "hang", "hang in the run", "crash", "wrong", "close", "slow")


class HungError(BaseException):
    """In place of waiting for ever where tests share a process."""


def before(double: Double, launch: Launch, name: str) -> None:
    """Raise, block or end the process where the kernel has such a fault."""
    fault = double.faults.get(name)
    if fault == "trace" or (fault == "fake" and launch.fake):
        raise TypeError("tensor_copy got an unexpected keyword argument 'mask'")
    if launch.fake or fault is None:
        return
    if fault == "compile":
        raise RuntimeError("neuronx-cc: [NCC_EVRF066] the launch grid and the logical core differ")
    leave_executable(name)
    if fault == "run":
        raise RuntimeError("NRT_EXEC_HW_ERR_COLLECTIVES: the device raised")
    if fault == "unclear":
        raise RuntimeError("unknown status 1")
    if fault.startswith("hang"):
        raise HungError
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "slow":
        time.sleep(600)


def leave_executable(name: str) -> None:
    """Write what the compiler leaves in its cache."""
    cache = os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR")
    if cache is not None:
        folder = Path(cache)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.neff").write_bytes(b"")


def after(double: Double, launch: Launch, name: str, result: Any) -> None:
    """Change the results of a kernel that computes something else."""
    factor = {"wrong": 2.0, "close": None}.get(double.faults.get(name, ""), 1.0)
    first: KernelTensor = result[0] if isinstance(result, tuple) else result
    if launch.fake or factor == 1.0:
        return
    if factor is not None:
        first.data.mul_(factor)
    else:
        import torch

        first.data.mul_(1 + 0.05 * torch.randn(first.shape, generator=torch.Generator().manual_seed(1)))
