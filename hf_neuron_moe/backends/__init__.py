"""Ways to compute the kernels' contract: PyTorch anywhere, nkilib on Trainium (imported only when asked for)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_neuron_moe.config import BACKENDS, DEFAULT_BACKEND, DEVICE_BACKENDS
from hf_neuron_moe.errors import BackendUnavailableError, not_one_of, public

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_neuron_moe.backends.base import Backend

NEURON_BACKENDS = ("neuron", "nki-sim")
"""Those that call nkilib's kernels."""


@public
def resolve_backend(name: str, device: torch.device) -> str:
    """Turn a configured backend name into the one that will run on `device`, where the model's parameters are.

    ``"auto"`` is ``"neuron"`` on Neuron devices, else ``"torch"``. A model may be moved later: ``"neuron"`` fits all.
    """
    import torch

    if name == "auto":
        name = DEVICE_BACKENDS.get(device.type, DEFAULT_BACKEND)
    if name not in BACKENDS:
        raise not_one_of("backend", name, ["auto", *BACKENDS])
    # What a program is traced with was resolved before; imports cannot be traced.
    if torch.compiler.is_compiling():
        return name
    kind = _load(name)  # each time: what it depends on may have been installed since
    error = kind.unavailable_reason(name)
    if error is not None:
        raise error
    if kind.traceable:
        from hf_neuron_moe.backends.operator_registration import register_again

        register_again()
    return name


@public
def get_backend(name: str) -> Backend:
    """Return the backend object for a name that :func:`resolve_backend` returned."""
    if name not in BACKENDS:
        expected, fix = f"one of {', '.join(BACKENDS)}", "Pass the result of resolve_backend."
        raise BackendUnavailableError.about("name", expected, repr(name), fix)
    instance: Backend = _class_of(name).instance(name)
    return instance


def is_traceable(name: str) -> bool:
    """Return whether programs may trace into the operators' bodies where this backend computes."""
    return bool(_class_of(name).traceable)


def trains_quantized(name: str) -> bool:
    """Return whether this backend trains through every block with MX weights, whatever can run here."""
    return bool(_class_of(name).trains_quantized)


def drop_weight_copies(weights: Iterable[Tensor]) -> int:
    """Drop the copies of `weights` that loaded backends keep, in their kernels' form; return their bytes."""
    sources = list(weights)
    return sum(kind.drop_weight_copies(sources) for kind in set(_classes.values()))


def release_gradient_memory() -> None:
    """Give back the memory that the torch backend keeps for the next step's gradients."""
    memory = sys.modules.get(f"{__name__}.torch.gradient_memory")
    if memory is not None:
        memory.gradient_memory().release()


_classes: dict[str, Any] = {}
"""By name in the table: the classes that were imported."""


def _class_of(name: str) -> Any:
    return _classes.get(name) or _load(name)


def _load(name: str) -> Any:
    module, _, kind = BACKENDS[name].partition(":")
    _classes[name] = getattr(importlib.import_module(module), kind)
    return _classes[name]
