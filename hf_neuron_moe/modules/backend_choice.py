"""Which backend computes a block that was not planned by ``patch_model``: decided at the call, once said aloud."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning, refuse


def usable_backend(
    config: NeuronMoEConfig, device: torch.device, what: str, why_not: Callable[[Any], str | None]
) -> str:
    """Return the name of the backend for a call: the configured one, or torch where `config` lets it fall back.

    Args:
        config: backend and fallback.
        device: of the call's operands.
        what: the block, for messages.
        why_not: asks a backend with kernels why it cannot compute the block; None where it can.

    Raises:
        BackendUnavailableError: the backend cannot run here.
        ConfigError: its kernels cannot compute the block and ``fallback`` is ``"refuse"``.
    """
    name = resolve_backend(config.backend, device)
    if name == "torch":
        return name
    reason = why_not(get_backend(name))
    if reason is None:
        return name
    if config.fallback == "torch":
        _tell(what, reason)
        return "torch"
    raise refuse(
        ConfigError,
        where=what,
        argument="backend",
        expected="one whose kernels compute the block",
        got=f"{name!r}: {reason}",
        remedy="Use fallback='torch' to compute it with PyTorch on the same device.",
    )


@functools.cache
def _tell(what: str, reason: str) -> None:
    """Warn once of every reason; the same words for every block of a kind."""
    if not torch.compiler.is_compiling():
        message = f"{what} is computed by PyTorch and not by the kernels: {reason}."
        warnings.warn(message, NeuronMoEWarning, stacklevel=4)
