"""How gate and up become the intermediate: activations and their derivatives, clamp masks, no gate at all.

============  =====================================  ==========================================
activation    value                                  derivative
============  =====================================  ==========================================
silu          ``x s(x)``, s the logistic function    ``s (1 + x (1 - s))``
swish         ``x s(1.702 x)``                       ``s (1 + 1.702 x (1 - s))``
gelu          ``x P(x)``, P the normal distribution  ``P(x) + x p(x)``, p its density
gelu_tanh     ``x/2 (1 + tanh q) = x s(2q)``         ``s (1 + 2 x q' (1 - s))``
squared_relu  ``max(x, 0)^2``                        ``2 max(x, 0)``
============  =====================================  ==========================================

``q = sqrt(2/pi) (x + 0.044715 x^3)``. Source: nki-library 2.29 and 2.33 ``common_types.ActFnType`` and its torch
reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

InPlace = Callable[[Tensor], Tensor]
"""Overwrites an fp32 tensor with a function of it and returns it."""

Limits = tuple[float | None, float | None]
"""Upper and lower clamp limit of the forward; None is absent."""


@dataclass(frozen=True)
class Gating:
    """How gate and up become the intermediate; the default is SiLU without limits."""

    rounds_itself: ClassVar[bool] = False
    """Whether :meth:`product` and :meth:`slope` have rounding points of their own, which then replace mxfp8's."""

    act_: InPlace | None = None
    """The activation; None is SiLU."""
    act_grad_: InPlace | None = None
    """Its derivative; None is that of SiLU."""
    gate_limits: Limits = (None, None)
    """The forward's limits on the gate pre-activation."""
    up_limits: Limits = (None, None)
    """Its limits on the up pre-activation."""
    skip_gate: bool = False
    """The intermediate is ``act(up)``; the gate is unused, its gradients are zero and up is not masked (nki-library
    2.33 ``skip_gate_proj``)."""

    def activate_(self, values: Tensor) -> Tensor:
        """Overwrite fp32 `values` with their activation and return them."""
        return F.silu(values, inplace=True) if self.act_ is None else self.act_(values)

    def activation(self, values: Tensor, out: Tensor) -> Tensor:
        """Write the activation of fp32 `values` into `out` and return it."""
        if self.act_ is None:
            result: Tensor = torch.ops.aten.silu.out(values, out=out)
            return result
        return self.act_(out.copy_(values))

    def product(self, gate: Tensor, up: Tensor, out: Tensor, act: Tensor) -> Tensor:
        """Write the intermediate into `out` and the activation into `act`; return `out`."""
        self.activation(up if self.skip_gate else gate, out=act)
        return out.copy_(act) if self.skip_gate else torch.mul(act, up, out=out)

    def slope(self, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Write ``factor * act'(values)`` into `out`."""
        if self.act_grad_ is None:
            result: Tensor = torch.ops.aten.silu_backward.grad_input(factor, values, grad_input=out)
            return result
        return self.act_grad_(out.copy_(values)).mul_(factor)


def mask_(gradient: Tensor, value: Tensor, limits: Limits) -> Tensor:
    """Multiply `gradient` by 1 where ``lower < value < upper`` and by 0 elsewhere, in place.

    Strict on the kept, already clamped values: what was clamped lies on the limit. As a product, 0 * NaN stays NaN
    (nki-library ``ClampLimits``).
    """
    upper, lower = limits
    if upper is not None:
        gradient.mul_(value < upper)
    if lower is not None:
        gradient.mul_(value > lower)
    return gradient


SWISH_BETA = 1.702
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def _logistic_grad_(x: Tensor, exponent: Tensor) -> Tensor:
    """Replace `x` by ``s (1 + x (1 - s))``, s the logistic function of `exponent`, which is overwritten too.

    ``1 - s`` is taken as the logistic function of the negative: the difference would cancel for large arguments.
    """
    s = torch.sigmoid(exponent)
    return x.mul_(exponent.neg_().sigmoid_()).add_(1).mul_(s)


def _gelu_grad_(x: Tensor) -> Tensor:
    density = x.square().mul_(-0.5).exp_().mul_(x).mul_(1 / math.sqrt(2 * math.pi))
    return x.mul_(1 / math.sqrt(2)).erf_().add_(1).mul_(0.5).add_(density)


def _gelu_tanh_grad_(x: Tensor) -> Tensor:
    square = x.square()
    exponent = square.mul(_TANH_CUBE).add_(1).mul_(x).mul_(2 * _TANH_SCALE)
    return _logistic_grad_(x.mul_(square.mul_(3 * _TANH_CUBE).add_(1).mul_(2 * _TANH_SCALE)), exponent)


class Activation(NamedTuple):
    """One row of the table at the top of this file, in fp32 or fp64."""

    value: Callable[[Tensor], Tensor]
    """Returns a new tensor; differentiable."""
    grad_: InPlace
    """Overwrites its argument with the derivative at it."""

    def value_(self, x: Tensor) -> Tensor:
        """Replace `x` by its activation and return it."""
        return F.silu(x, inplace=True) if self.value is F.silu else x.copy_(self.value(x))


ACTIVATIONS = {
    "silu": Activation(F.silu, lambda x: _logistic_grad_(x, x.clone())),
    "swish": Activation(
        lambda x: x * torch.sigmoid(x * SWISH_BETA), lambda x: _logistic_grad_(x.mul_(SWISH_BETA), x.clone())
    ),
    "gelu": Activation(F.gelu, _gelu_grad_),
    "gelu_tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_grad_),
    "squared_relu": Activation(lambda x: x.clamp(min=0).square(), lambda x: x.clamp_(min=0).mul_(2)),
}
"""The activations that the documented kernels know; patched blocks have those of :data:`GATES`."""

GATES: dict[str, Gating] = {"silu": Gating()}
"""The gates of patched blocks, by the name that a :class:`~hf_neuron_moe.backends.spec.BlockSpec` gives them.

``modules/structure.py`` says how each is recognized.
"""
SILU = GATES["silu"]
