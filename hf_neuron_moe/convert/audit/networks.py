"""What a block computes with its two weights, in float64, from the numbers of its gate: for the figure of its output.

A second opinion, as ``operands`` is: nothing here calls the functions that compute a patched block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.errors import not_one_of

_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}

ACTIVATIONS = ("swish", *_ACTIVATIONS)
_NUMBERS = {"alpha", "gate_max", "gate_min", "up_max", "up_min", "act_max", "up_offset", "gate_softcap", "up_softcap"}


def is_gate(gate: Mapping[str, Any], gated: bool) -> bool:
    """Whether these numbers define a function of gate and up, or of up alone where it is not `gated`."""
    numbers = {name: value for name, value in gate.items() if name not in ("act", "gated")}
    known = numbers.keys() <= _NUMBERS and all(type(each) in (int, float) for each in numbers.values())
    if not known or gate.get("act", "silu") not in ACTIVATIONS or gate.get("gated", True) is not gated:
        return False
    limits = [(gate.get(f"{part}_min", -math.inf), gate.get(f"{part}_max", math.inf)) for part in ("gate", "up")]
    return all(map(math.isfinite, numbers.values())) and all(low < high for low, high in limits)


def intermediate(gate: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """Return ``h`` of the pre-activations ``(g, u)``, or ``(u,)`` without a gate projection.

    `gate` has those numbers of the gate that are not those of ``silu(g) * u``, by the names of its record's fields.
    """
    act, g = gate.get("act", "silu"), parts[0].clamp(gate.get("gate_min", -math.inf), gate.get("gate_max", math.inf))
    if (cap := gate.get("gate_softcap")) is not None:
        value = cap * torch.tanh(g / cap) * torch.sigmoid(g)
    elif act == "swish":
        value = g * torch.sigmoid(gate.get("alpha", 1.0) * g)
    elif act in _ACTIVATIONS:
        value = _ACTIVATIONS[act](g)
    else:
        raise not_one_of("act", act, ACTIVATIONS)
    if len(parts) == 1:
        return value
    up = parts[1].clamp(gate.get("up_min", -math.inf), gate.get("up_max", math.inf)) + gate.get("up_offset", 0.0)
    up = up if (cap := gate.get("up_softcap")) is None else cap * torch.tanh(up / cap)
    return value.clamp(max=gate.get("act_max", math.inf)) * up
