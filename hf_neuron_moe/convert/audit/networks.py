"""What a block computes with its two weights, in float64, from the numbers of its gate: for the figure of its output.

A second opinion, as ``operands`` is: nothing here calls the functions that compute a patched block. T tokens, I
intermediate size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.errors import not_one_of

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}


def intermediate(gate: Mapping[str, Any], parts: Sequence[Tensor]) -> Tensor:
    """Return ``h`` of the pre-activations ``(g, u)``, or ``(u,)`` without a gate projection, ``[T, I]`` each.

    `gate` has those numbers of the gate that are not those of ``silu(g) * u``, by the names of its record's fields.
    """
    act = gate.get("act", "silu")
    if act not in (*_ACTIVATIONS, "swish"):
        raise not_one_of("act", act, (*_ACTIVATIONS, "swish"))
    g = _clipped(parts[0], gate.get("gate_min"), gate.get("gate_max")) if len(parts) > 1 else parts[0]
    if gate.get("gate_softcap") is not None:
        value = _capped(g, gate["gate_softcap"]) * torch.sigmoid(g)
    elif act == "swish":
        value = g * torch.sigmoid(gate["alpha"] * g)
    else:
        value = _ACTIVATIONS[act](g)
    if len(parts) == 1:
        return value
    up = _clipped(parts[1], gate.get("up_min"), gate.get("up_max")) + gate.get("up_offset", 0.0)
    if gate.get("up_softcap") is not None:
        up = _capped(up, gate["up_softcap"])
    return _clipped(value, None, gate.get("act_max")) * up


def _clipped(values: Tensor, low: float | None, high: float | None) -> Tensor:
    return values if low is None and high is None else values.clamp(low, high)


def _capped(values: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(values / cap)
