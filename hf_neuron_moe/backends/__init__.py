"""Ways to compute the kernels' contract; ``neuron`` and ``triton`` are names this release refuses with the reason."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, nearest, refuse

if TYPE_CHECKING:
    import torch

    from hf_neuron_moe.backends.base import Backend

_PLANNED = {"neuron": "NKI kernel", "triton": "CUDA"}
_IMPLEMENTED = ("torch",)


def resolve_backend(name: str, device: torch.device) -> str:
    """Turn a configured backend name into the one that will run on `device`.

    Args:
        name: ``"auto"``, ``"torch"``, ``"neuron"`` or ``"triton"``.
        device: where the model's parameters are.

    Returns:
        The backend's name; ``"torch"`` for ``"auto"`` on every device this release has no own kernels for.

    Raises:
        ConfigError: unknown name.
        BackendUnavailableError: the named backend cannot run here.
    """
    if name in ("auto", *_IMPLEMENTED):
        if device.type == "neuron":
            raise refuse(
                BackendUnavailableError,
                where="resolve_backend",
                argument="device",
                expected="one the torch backend computes on (cpu, cuda, mps, xpu, meta)",
                got="'neuron'",
                remedy="The NKI kernel backend is not part of this release; keep the model on another device.",
            )
        return "torch"
    if name not in _PLANNED:
        known = ["auto", *_IMPLEMENTED, *_PLANNED]
        raise refuse(
            ConfigError,
            where="resolve_backend",
            argument="backend",
            expected=f"one of {', '.join(known)}",
            got=repr(name),
            remedy=f"Choose one of these.{nearest(name, known)}",
        )
    raise refuse(
        BackendUnavailableError,
        where="resolve_backend",
        argument="backend",
        expected="one that this release implements: auto or torch",
        got=f"{name!r}, which is planned",
        remedy=f"The {_PLANNED[name]} backend is not part of this release. Use backend='torch': it computes the same "
        "contract on any device.",
    )


@functools.cache
def get_backend(name: str) -> Backend:
    """Return the backend object for a name that :func:`resolve_backend` returned."""
    if name not in _IMPLEMENTED:
        raise refuse(
            BackendUnavailableError,
            where="get_backend",
            argument="name",
            expected=f"one of {', '.join(_IMPLEMENTED)}",
            got=repr(name),
            remedy="Pass the result of resolve_backend.",
        )
    from hf_neuron_moe.backends.torch.backend import TorchBackend

    return TorchBackend()
