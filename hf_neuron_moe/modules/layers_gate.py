"""A gate in torch's own differentiable functions, for blocks that compute through their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.backends.gate import Gate

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "squared_relu": lambda gate: F.relu(gate).square(),
}
"""Of the activations that a forward calls by their own names."""


def gate_by_layers(gate: Gate, activation: Any, gate_values: Tensor, up: Tensor) -> Tensor:
    """Return ``f(gate) * p(up)`` in the dtype of the projections ``[..., I]``.

    `activation` is the module's own; None where its forward calls or spells out the function. Softcaps and blocks
    without a gate do not occur in dense MLPs.
    """
    gate_values = _clamped(gate_values, gate.gate_min, gate.gate_max)
    if activation is not None:
        activated = activation(gate_values)
    elif gate.act == "swish":
        activated = gate_values * torch.sigmoid(gate_values * gate.alpha)
    else:
        activated = _FUNCTIONS[gate.act](gate_values)
    up = _clamped(up, gate.up_min, gate.up_max)
    if gate.up_offset:
        up = up + gate.up_offset
    return _clamped(activated, None, gate.act_max) * up


def _clamped(values: Tensor, low: float | None, high: float | None) -> Tensor:
    return values if low is high is None else values.clamp(min=low, max=high)
