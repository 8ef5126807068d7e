"""Ways to compute the kernels' contract: PyTorch anywhere, nkilib on Trainium (imported only when asked for)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_neuron_moe.config import PLANNED_BACKENDS
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, nearest, public

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_neuron_moe.backends.base import Backend

NEURON_BACKENDS = ("neuron", "nki-sim")
"""Those that call nkilib's kernels."""

_WITHOUT_COPIES = "+no-copies"
_KNOWN = ("auto", "torch", *NEURON_BACKENDS, *PLANNED_BACKENDS)


@public
def resolve_backend(name: str, device: torch.device) -> str:
    """Turn a configured backend name into the one that will run on `device`.

    Args:
        name: ``"auto"``, ``"torch"``, ``"neuron"``, ``"nki-sim"`` or ``"triton"``.
        device: where the model's parameters are. ``"neuron"`` is not refused for other devices: a model may be moved
            after it was patched.

    Returns:
        The backend's name; for ``"auto"`` that is ``"neuron"`` on Neuron devices and ``"torch"`` elsewhere.

    Raises:
        ConfigError: unknown name.
        BackendUnavailableError: the named backend cannot run here.
    """
    if name == "auto":
        name = "neuron" if device.type == "neuron" else "torch"
    if name == "torch":
        return name
    if name in NEURON_BACKENDS:
        return _resolve_neuron(name)
    if name in PLANNED_BACKENDS:
        raise BackendUnavailableError.about(
            "backend",
            "one that this release implements: auto, torch, neuron or nki-sim",
            f"{name!r}, which is planned",
            f"The {PLANNED_BACKENDS[name]} backend is not part of this release. Use backend='torch': it "
            "computes the same contract on any device.",
        )
    raise ConfigError.about(
        "backend", f"one of {', '.join(_KNOWN)}", repr(name), f"Choose one of these.{nearest(name, list(_KNOWN))}"
    )


def without_copies(name: str) -> str:
    """Return the name for :func:`get_backend` of the same backend, keeping no copies of weights between calls.

    For weights that are gathered for one call. The torch backend keeps none anyway.
    """
    return name if name == "torch" or name.endswith(_WITHOUT_COPIES) else name + _WITHOUT_COPIES


def drop_weight_copies(weights: Iterable[Tensor]) -> int:
    """Drop the copies of `weights` that backends keep, in their kernels' orientation or quantized; return their bytes.

    Backends that are not loaded are not loaded for it.
    """
    neuron = sys.modules.get(f"{__name__}.neuron.backend")
    generation = sys.modules.get(f"{__name__}.torch.generation")
    sources = list(weights)
    dropped = 0 if generation is None else generation.generation_copies().drop(sources)
    return dropped + (0 if neuron is None else neuron.drop_copies(sources))


def release_gradient_memory() -> None:
    """Give back the memory that the torch backend keeps for the next step's gradients."""
    memory = sys.modules.get(f"{__name__}.torch.gradient_memory")
    if memory is not None:
        memory.gradient_memory().release()


@public
def get_backend(name: str) -> Backend:
    """Return the backend object for a name that :func:`resolve_backend` or :func:`without_copies` returned."""
    if name == "torch":
        return _torch_backend()
    plain = name.removesuffix(_WITHOUT_COPIES)
    if plain in NEURON_BACKENDS:
        from hf_neuron_moe.backends.neuron.backend import neuron_backend

        backend = neuron_backend(plain)
        return backend if plain == name else backend.without_copies
    raise BackendUnavailableError.about(
        "name", f"one of torch, {', '.join(NEURON_BACKENDS)}", repr(name), "Pass the result of resolve_backend."
    )


@functools.cache
def _torch_backend() -> Backend:
    from hf_neuron_moe.backends.torch.backend import TorchBackend

    return TorchBackend()


def _resolve_neuron(name: str) -> str:
    import torch

    if torch.compiler.is_compiling():  # what a program is traced with was resolved before; imports cannot be traced
        return name
    from hf_neuron_moe.backends.neuron.versions import toolchain
    from hf_neuron_moe.backends.operator_registration import register_again

    toolchain(simulator=name == "nki-sim")
    register_again()
    return name
