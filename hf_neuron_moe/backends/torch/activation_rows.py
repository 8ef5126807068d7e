"""The activations of the documented kernels and of other models: values and derivatives, in as few passes as there are.

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

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.backends.torch.cpu.matmul import tanh_is_fast
from hf_neuron_moe.backends.torch.cpu.tanh import scaled_tanh, takes_tanh
from hf_neuron_moe.errors import not_one_of

InPlace = Callable[[Tensor], Tensor]
"""Overwrites an fp32 tensor with a function of it and returns it."""

Slope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called with x, a factor and a buffer: writes the factor times the derivative at x into the buffer, returns it.

The buffer may be x, but not the factor."""

AtOnce = Callable[[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]
"""Called with x and two buffers: writes the activation at x into the first. Returns what writes a factor times the
derivative at x into the second."""

Limits = tuple[float | None, float | None]
"""Upper and lower clamp limit of the forward; None is absent."""


def spare(values: Tensor, name: str) -> Tensor:
    """Return a buffer like `values`; fresh ones cost more than what is computed into them (page faults)."""
    return call_scratch(values.device).get(name, values.shape, values.dtype)


def scaled_product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    """Write ``scale * left * right`` into `out` in one pass."""
    if scale == 1:
        return torch.mul(left, right, out=out)
    zero = call_scratch(left.device).constant(0.0, left.dtype)
    return torch.addcmul(zero, left, right, value=scale, out=out)


def tanh_of_share(values: Tensor, cap: float, name: str, rounded: bool) -> Tensor:
    """Return ``tanh(values / cap)`` in a buffer that is the thread's until `name` is asked for again.

    It is made in the fastest way that is exact enough for fp32, or if `rounded` for bf16.
    """
    if not tanh_is_fast():
        if takes_tanh(values):
            return scaled_tanh(values, 1 / cap, name)
        if rounded:
            return tanh_to_round(torch.mul(values, 1 / cap, out=spare(values, f"{name}_share")), spare(values, name))
    return torch.mul(values, 1 / cap, out=spare(values, name)).tanh_()


def tanh_to_round(values: Tensor, out: Tensor) -> Tensor:
    """tanh in half of the time of torch's, each value within 2**-14 of itself; bf16 rounds to 2**-9.

    ``tanh(x) = 2 s(2x) - 1``, s the logistic function and slope of softplus, loses small values. So the result is the
    value itself, brought between two bounds a little below and above that difference.
    """
    scratch = call_scratch(values.device)
    range_, lower, upper = (scratch.constant(value, values.dtype) for value in _TANH_BOUNDS)
    torch.ops.aten.softplus_backward.grad_input(range_, values, 2, _LOGISTIC_IS_ONE, grad_input=out)
    above = torch.add(out, upper, out=scratch.get("tanh", values.shape, values.dtype))
    return torch.clamp(values, out.add_(lower), above, out=out)


def silu_slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """The :data:`Slope` of SiLU, in one pass."""
    result: Tensor = torch.ops.aten.silu_backward.grad_input(factor, values, grad_input=out)
    return result


SWISH_BETA = 1.702
_LOGISTIC_IS_ONE = 20.0  # from there on
_TANH_SPACE = 2.0**-21  # many times the rounding of s; x is between the bounds where x**3 / 3 is less than this
_TANH_BOUNDS = (2 - 2 * _TANH_SPACE, -1.0, 2 * _TANH_SPACE - 1)
"""The factor on s, and what is added for the lower and for the upper bound: they end in 1 exactly."""
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


def _gelu_tanh_exponent(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``2q``; differentiable without `out`."""
    scale = torch.full((), 2 * _TANH_SCALE, dtype=x.dtype, device=x.device)
    return torch.addcmul(scale, x, x, value=2 * _TANH_SCALE * _TANH_CUBE, out=out).mul_(x)


def _gelu_tanh_(x: Tensor) -> Tensor:
    """``x s(2q)`` in half of the time of torch's, which takes a tanh of each number by itself."""
    return x.mul_(_gelu_tanh_exponent(x, spare(x, "gelu_tanh")).sigmoid_())


def _gelu_tanh_both(x: Tensor, value: Tensor, grad: Tensor, rounded: bool = False) -> Tensor:
    """As :func:`_logistic_grad_`, in buffers; ``2 x q'`` is three times ``2q`` without ``4 sqrt(2/pi) x``.

    `rounded`, the derivative is within ``2**-18`` of one: ``1 - s`` may cancel.
    """
    exponent = _gelu_tanh_exponent(x, spare(x, "gelu_tanh"))
    s = torch.sigmoid(exponent, out=spare(x, "gelu_tanh_s"))
    if rounded:
        third = torch.add(exponent, x, alpha=-4 / 3 * _TANH_SCALE, out=exponent)
        torch.mul(x, s, out=value)
        torch.ops.aten.sigmoid_backward.grad_input(third, s, grad_input=third)
        return torch.add(s, third, alpha=3, out=grad)
    inner = torch.mul(exponent, 3, out=spare(x, "gelu_tanh_inner")).add_(x, alpha=-4 * _TANH_SCALE)
    inner.mul_(exponent.neg_().sigmoid_()).add_(1)
    torch.mul(x, s, out=value)
    return torch.mul(inner, s, out=grad)


def _gelu_tanh_slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    return _gelu_tanh_both(values, spare(values, "gelu_tanh_value"), out).mul_(factor)


def _gelu_slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward.grad_input(factor, values, grad_input=out)
    return result


class Activation(NamedTuple):
    """One row of the table at the top of this file, in fp32 or fp64."""

    value: Callable[[Tensor], Tensor]
    """Returns a new tensor; differentiable."""
    grad_: InPlace
    """Overwrites its argument with the derivative at it."""
    in_place: InPlace | None = None
    """Overwrites its argument with `gain` times the value, where there is a faster way than a copy of `value`."""
    fast_slope: Slope | None = None
    """The derivative times a factor, where there is a faster way than `grad_`."""

    both: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Writes value and derivative at its first argument into the others, where that is faster than apart."""
    gain: float = 1.0
    """The alpha of ``silu(alpha x) / alpha``, which the value comes times where the division can be had at no cost."""

    def gained_(self, x: Tensor) -> Tensor:
        """Replace `x` by `gain` times its activation and return it."""
        if self.in_place is not None:
            return self.in_place(x)
        return F.silu(x, inplace=True) if self.value is F.silu else x.copy_(self.value(x))

    def value_(self, x: Tensor) -> Tensor:
        """Replace `x` by its activation and return it."""
        return self.gained_(x) if self.gain == 1 else self.gained_(x).div_(self.gain)

    def at_once(self, limits: Limits) -> AtOnce | None:
        """Return how value, with limits on x, and derivative are made where that is faster at once."""
        both = self.both
        if self.gain != 1:
            return _swish_at_once(self.gain, limits)
        if both is None or limits != (None, None):
            return None
        return lambda x, value, grad: both(x, value, grad).mul_

    def slope(self, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """A :data:`Slope`."""
        if self.fast_slope is not None:
            return self.fast_slope(values, factor, out)
        return self.grad_(out.copy_(values)).mul_(factor)


ACTIVATIONS = {
    "silu": Activation(F.silu, lambda x: _logistic_grad_(x, x.clone())),
    "swish": Activation(
        lambda x: x * torch.sigmoid(x * SWISH_BETA), lambda x: _logistic_grad_(x.mul_(SWISH_BETA), x.clone())
    ),
    "gelu": Activation(F.gelu, _gelu_grad_, torch.ops.aten.gelu_, _gelu_slope),
    "gelu_tanh": Activation(
        lambda x: x * torch.sigmoid(_gelu_tanh_exponent(x)),
        lambda x: _gelu_tanh_both(x, spare(x, "gelu_tanh_value"), x),
        _gelu_tanh_,
        _gelu_tanh_slope,
        _gelu_tanh_both,
    ),
    "squared_relu": Activation(lambda x: x.clamp(min=0).square(), lambda x: x.clamp_(min=0).mul_(2)),
}
"""The activations that the documented kernels know."""


def activation_of(gate: Gate, rounded: bool) -> Activation:
    """Return a gate's activation; `rounded` where digits beyond those of bf16 need not be right."""
    if gate.act not in ACTIVATIONS:
        raise not_one_of("act", gate.act, ACTIVATIONS)
    if gate.act == "swish":
        return _swish(gate.alpha)
    if gate.gate_softcap is not None:
        return _softcapped_silu(gate.gate_softcap, rounded)
    if gate.act == "gelu_tanh" and rounded:
        return ACTIVATIONS["gelu_tanh"]._replace(both=functools.partial(_gelu_tanh_both, rounded=True))
    return ACTIVATIONS[gate.act]


def _swish(alpha: float) -> Activation:
    if alpha == 1:
        return ACTIVATIONS["silu"]

    def slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        return silu_slope(torch.mul(values, alpha, out=out), factor, out)

    # silu(alpha x) / alpha, by torch's own passes over SiLU and its derivative.
    return Activation(
        lambda x: x * torch.sigmoid(x * alpha),
        lambda x: slope(x, torch.ones_like(x), x),
        lambda x: F.silu(x.mul_(alpha), inplace=True),
        slope,
        gain=alpha,
    )


def _swish_at_once(alpha: float, limits: Limits) -> AtOnce:
    """Return the :data:`AtOnce` of ``silu(alpha x)`` with `limits` on x, of which the derivative takes no notice."""

    def scaled(limit: float) -> float:  # the bits that numbers at a limit get by the same product
        return float(torch.tensor(limit, dtype=torch.float32, device="cpu") * alpha)

    with unset_fake_temporarily():
        upper, lower = (None if limit is None else scaled(limit) for limit in limits)

    def at_once(x: Tensor, value: Tensor, rest: Tensor) -> Callable[[Tensor], Tensor]:
        torch.mul(x, alpha, out=rest)
        if (upper, lower) == (None, None):
            torch.ops.aten.silu.out(rest, out=value)
        else:
            F.silu(torch.clamp(rest, lower, upper, out=value), inplace=True)
        return lambda factor: silu_slope(rest, factor, rest)

    return at_once


def _softcapped_silu(cap: float, rounded: bool) -> Activation:
    """``c t s`` and ``s (1 - t^2) + c t s (1 - s)``, with ``t = tanh(x / c)`` and s the logistic function of x.

    The derivative is what lies between ``c t s`` and ``1 - t^2`` at s: nothing where t and s are 1. `rounded` is
    that of :func:`tanh_of_share`.
    """

    def value_(x: Tensor) -> Tensor:
        return scaled_product(tanh_of_share(x, cap, "gate_softcap", rounded), x.sigmoid_(), cap, out=x)

    def both(x: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        t, s = tanh_of_share(x, cap, "gate_softcap", rounded), torch.sigmoid(x, out=grad)
        scaled_product(t, s, cap, out=value)
        one = call_scratch(x.device).constant(1.0, x.dtype)
        torch.ops.aten.tanh_backward.grad_input(one, t, grad_input=t)
        return torch.lerp(value, t, s, out=s)

    return Activation(
        lambda x: (x / cap).tanh_().mul_(cap).mul_(torch.sigmoid(x)),
        lambda x: both(x, torch.empty_like(x), x),
        value_,
        both=both,
    )
