"""Which backend computes a call: what ``patch_model`` planned, or a decision at the call, once said aloud.

Everything here looks at shapes and settings only, so that a compiled program has the decision in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import Backend
from hf_neuron_moe.backends.spec import Support
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning


@dataclass
class LongCalls:
    """Calls with more tokens than the kernels take, which PyTorch computes; the blocks of a model share one object."""

    most: int  # number of tokens that the kernels take
    warned: bool = False

    def take(self, tokens: int, name: str) -> bool:
        """Return whether PyTorch computes a call of `tokens` tokens to the block `name`."""
        if tokens <= self.most:
            return False
        if not torch.compiler.is_compiling() and not self.warned:  # in this order: a compiler would watch warned
            self.warned = True
            message = (
                f"{name}: calls of more than {self.most:,} tokens are computed by PyTorch and not by the kernels, "
                f"and this one has {tokens:,}. Smaller micro-batches or shorter sequences use the kernels."
            )
            warnings.warn(message, NeuronMoEWarning, stacklevel=5)
        return True


def caches_weights(module: nn.Module) -> bool:
    """Return whether a backend may keep copies of the weights of `module` after a call.

    Not where FSDP gathers the weights for the call: both of its versions mark modules for ``torch.compile``. Nor in
    evaluation mode, where weights are exchanged through ``.data``, which no version counter shows.
    """
    return module.training and not getattr(module, "_is_fsdp_managed_module", False)


def usable_backend(
    config: NeuronMoEConfig,
    device: torch.device,
    what: str,
    support: Callable[[Backend], Support],
    warned: set[str],
    remedy: str = "",
) -> str:
    """Return the name of the backend for a call: the configured one, or torch where `config` lets it fall back.

    `device` is that of the operands, `what` the block for messages, `support` asks a backend whether it computes the
    block. `warned` holds the warnings given, which the blocks of a model share. `remedy` is added to an error.
    """
    name = resolve_backend(config.backend, device)
    kernels = get_backend(name)
    reason = None if kernels.universal else support(kernels).reason
    if reason is None:
        return name
    if config.fallback == "torch":
        message = f"{what} is computed by PyTorch and not by the kernels: {reason}."
        if not torch.compiler.is_compiling() and message not in warned:
            warned.add(message)
            warnings.warn(message, NeuronMoEWarning, stacklevel=3)
        return config.fallback
    fix = f"Use fallback='torch' to compute it with PyTorch on the same device.{remedy and ' '}{remedy}"
    expected = "one whose kernels compute the block"
    raise ConfigError.about("backend", expected, f"{name!r}: {reason}", fix).named(what)
