"""Which activations are the SiLU that the kernels have."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn


def is_silu(activation: Any) -> bool:
    """Return whether `activation` is SiLU: ``nn.SiLU``, transformers' module of that name, or ``F.silu`` itself."""
    from transformers.activations import ACT2CLS

    entries = (ACT2CLS[name] for name in ("silu", "swish") if name in ACT2CLS)
    classes = {entry[0] if isinstance(entry, tuple) else entry for entry in entries}
    return activation is F.silu or type(activation) in {nn.SiLU, *classes}


def why_not_silu(activation: Any) -> str | None:
    """Return what `activation` is, if that is not SiLU or is SiLU with a forward of its own; else None."""
    if isinstance(activation, nn.Module) and "forward" in activation.__dict__:
        return f"a {type(activation).__name__} whose forward is overridden on the instance"
    return None if is_silu(activation) else describe_activation(activation)


def describe_activation(activation: Any) -> str:
    """Return a short name of an activation module or function."""
    return getattr(activation, "__name__", type(activation).__name__)
