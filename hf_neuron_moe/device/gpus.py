"""The GPUs of this machine, and whether PyTorch and Triton can use them. Imports torch only where a driver is."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""What the drivers of NVIDIA, of Windows' Linux and of AMD put there."""

_TRUE = ("1", "y", "yes", "t", "true", "on")  # as Triton reads TRITON_INTERPRET

_FAILURES = (ImportError, OSError, RuntimeError, AttributeError, ValueError)
"""What torch raises where it does not fit the driver, or cannot be imported."""


@dataclass(frozen=True)
class GPUs:
    """What :func:`inspect_gpus` found."""

    names: tuple[str, ...] = ()
    """Each GPU that PyTorch sees, with its compute capability."""
    reason: str | None = None
    """Why PyTorch sees none; None where it sees one."""
    triton_reason: str | None = None
    """Why ``backend="triton"`` cannot run here; None where it can."""


def inspect_gpus() -> GPUs:
    """Ask PyTorch for its GPUs where a driver is; what fails is the reason."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return _without("no driver of a GPU was found")
    try:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            places = range(torch.cuda.device_count())
            described = [(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in places]
            names = tuple(f"{name} (compute capability {major}.{minor})" for name, (major, minor) in described)
            return GPUs(names, None, _triton_missing())
    except _FAILURES as error:
        return _without(f"torch fails: {type(error).__name__}: {error}")
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return _without(f"torch {torch.__version__} is built for CPUs; install a build for CUDA")
    return _without(
        f"torch {torch.__version__}, built for {built}, finds none that it can use; see what nvidia-smi says"
    )


def _triton_missing() -> str | None:
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def _without(reason: str) -> GPUs:
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    return GPUs(
        (),
        reason,
        _triton_missing()
        or (None if interpreted else "there is no GPU (on a CPU, TRITON_INTERPRET=1 tries it, slowly)"),
    )
