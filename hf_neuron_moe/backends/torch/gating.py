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

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.backends.torch.cpu.matmul import tanh_is_fast
from hf_neuron_moe.errors import not_one_of

InPlace = Callable[[Tensor], Tensor]
"""Overwrites an fp32 tensor with a function of it and returns it."""

Slope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called with x, a factor and a buffer: writes the factor times the derivative at x into the buffer, returns it.

The buffer may be x, but not the factor."""

Limits = tuple[float | None, float | None]
"""Upper and lower clamp limit of the forward; None is absent."""

Mask = Callable[[Tensor, Tensor, Limits], Tensor]
""":func:`mask_`, or what is as good."""


@dataclass(frozen=True)
class Gating:
    """How gate and up become the intermediate; the default is SiLU without limits."""

    rounds_itself: ClassVar[bool] = False
    """Whether :meth:`product` and :meth:`slope` have rounding points of their own, which then replace mxfp8's."""

    act_: InPlace | None = None
    """The activation; None is SiLU."""
    act_slope: Slope | None = None
    """Its derivative; None is that of SiLU."""
    gate_limits: Limits = (None, None)
    """Limits on the gate pre-activation; values beyond count as the limit and get no gradient."""
    up_limits: Limits = (None, None)
    """Limits on the up pre-activation, which has its bias and offset by then."""
    skip_gate: bool = False
    """The intermediate is ``act(up)``; the gate is unused, its gradients are zero and up is not masked (nki-library
    2.33 ``skip_gate_proj``)."""
    up_softcap: float | None = None
    """The c of ``c tanh(up / c)``, which multiplies the activation instead of up; None is up itself."""
    up_offset: float = 0.0
    """What is added to up together with its bias, before it is rounded and saved."""
    act_and_slope: Callable[[Tensor, Tensor, Tensor], object] | None = None
    """Writes activation and derivative at its first argument into the others, where that is faster than apart."""
    rounded: bool = False
    """Whether :meth:`up_value` only has to be exact to less than a rounding to bf16."""

    @property
    def has_limits(self) -> bool:
        """Whether a gradient may have to be masked."""
        return self.gate_limits != (None, None) or self.up_limits != (None, None)

    @property
    def multiplies_by_up(self) -> bool:
        """Whether the intermediate is the activation times up, without limits and softcap on it."""
        return not self.skip_gate and self.up_limits == (None, None) and self.up_softcap is None

    def activate_(self, values: Tensor) -> Tensor:
        """Overwrite fp32 `values` with their activation and return them."""
        clip_(values, self.gate_limits)
        return F.silu(values, inplace=True) if self.act_ is None else self.act_(values)

    def activation(self, values: Tensor, out: Tensor) -> Tensor:
        """Write the activation of fp32 `values` into `out` and return it."""
        if self.act_ is None and self.gate_limits == (None, None):
            result: Tensor = torch.ops.aten.silu.out(values, out=out)
            return result
        if self.gate_limits == (None, None):
            out.copy_(values)
        else:
            torch.clamp(values, self.gate_limits[1], self.gate_limits[0], out=out)
        return F.silu(out, inplace=True) if self.act_ is None else self.act_(out)

    def up_value(self, up: Tensor) -> Tensor:
        """Return what multiplies the activation: `up` itself, or a tensor that is valid until the next call.

        Not differentiable with limits or a softcap, and not for tensors without storage: the buffer is the thread's.
        """
        if self.up_limits != (None, None):
            up = torch.clamp(up, self.up_limits[1], self.up_limits[0], out=_spare(up, "up_clamped"))
        if self.up_softcap is None:
            return up
        return softcap_for(self.rounded)(up, self.up_softcap, _spare(up, "up_softcap"))

    def intermediate_(self, gate: Tensor, up: Tensor) -> Tensor:
        """Overwrite `gate` with the intermediate and return it; without a gate `up` is read alone."""
        if self.skip_gate:
            return self.activate_(gate.copy_(up))
        return self.activate_(gate).mul_(self.up_value(up))

    def product(self, gate: Tensor, up_value: Tensor, out: Tensor, act: Tensor) -> Tensor:
        """Write the intermediate into `out` and the activation into `act`; return `out`.

        `up_value` is that of :meth:`up_value`, or up without a gate.
        """
        self.activation(up_value if self.skip_gate else gate, out=act)
        return out.copy_(act) if self.skip_gate else torch.mul(act, up_value, out=out)

    def up_slope_(self, gradient: Tensor, up: Tensor, up_value: Tensor, mask: Mask) -> Tensor:
        """Multiply `gradient` by the derivative of :meth:`up_value`, whose result is given and overwritten."""
        if self.up_softcap is not None:
            torch.ops.aten.tanh_backward.grad_input(gradient, up_value.div_(self.up_softcap), grad_input=gradient)
        return mask(gradient, up, self.up_limits)

    def slope(self, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Write ``factor * act'(values)`` into `out`."""
        return (silu_slope if self.act_slope is None else self.act_slope)(values, factor, out)


def mask_(gradient: Tensor, value: Tensor, limits: Limits) -> Tensor:
    """Multiply `gradient` by 1 where ``lower < value < upper`` and by 0 elsewhere, in place.

    Strict: what was clamped lies on the limit. As a product, 0 * NaN stays NaN (nki-library ``ClampLimits``).
    """
    for limit, within in zip(limits, (torch.lt, torch.gt), strict=True):
        if limit is not None:  # in the values' dtype: a mask of bools takes five times as long
            gradient.mul_(within(value, limit, out=_spare(value, "mask")))
    return gradient


def mask_finite_(gradient: Tensor, value: Tensor, limits: Limits) -> Tensor:
    """:func:`mask_` in one pass, for finite gradients; a NaN of an overflow, or of an infinite gate, becomes 0."""
    if limits != (None, None):
        upper, lower = (far if limit is None else limit for limit, far in zip(limits, (math.inf, -math.inf)))
        torch.ops.aten.hardtanh_backward.grad_input(gradient, value, lower, upper, grad_input=gradient)
    return gradient


def clip_(values: Tensor, limits: Limits) -> Tensor:
    """Clamp `values` in place and return them; NaN stays NaN."""
    upper, lower = limits
    return values if upper is None and lower is None else values.clamp_(min=lower, max=upper)


def _spare(values: Tensor, name: str) -> Tensor:
    """Return a buffer like `values`; fresh ones cost more than what is computed into them (page faults)."""
    return call_scratch(values.device).get(name, tuple(values.shape), values.dtype)


def softcap(values: Tensor, cap: float, out: Tensor) -> Tensor:
    """Write ``cap tanh(values / cap)`` into `out` and return it.

    ``tanh(x) = e / (e + 2)`` with ``e = exp(2x) - 1``, as accurate as torch's tanh and twice as fast.
    """
    e = torch.mul(values, 2 / cap, out=out).clamp_(max=_TANH_IS_ONE).expm1_()
    return e.div_(e + 2).mul_(cap)


def softcap_to_round(values: Tensor, cap: float, out: Tensor) -> Tensor:
    """:func:`softcap` in half of its time, each value within 2**-14 of itself; bf16 rounds to 2**-9.

    ``tanh(x) = 2 s(2x) - 1``, s the logistic function, which loses small values: these are returned as they are.
    """
    small = _TANH_IS_LINEAR * cap
    rest = torch.mul(values, 2 / cap, out=out).sigmoid_().sub_(0.5)
    torch.ops.aten.hardshrink_backward.grad_input(rest, values, small, grad_input=rest)  # 0 up to small
    below, near = math.nextafter(small, math.inf), _spare(values, "softcap")
    torch.ops.aten.hardtanh_backward.grad_input(values, values, -below, below, grad_input=near)  # 0 from below on
    return torch.add(near, rest, alpha=2 * cap, out=rest)


def softcap_by_tanh(values: Tensor, cap: float, out: Tensor) -> Tensor:
    """:func:`softcap` by torch's tanh."""
    return torch.mul(values, 1 / cap, out=out).tanh_().mul_(cap)


def softcap_for(rounded: bool) -> Callable[[Tensor, float, Tensor], Tensor]:
    """Return the fastest softcap of this processor, exact enough for fp32, or if `rounded` for bf16."""
    if tanh_is_fast():
        return softcap_by_tanh
    return softcap_to_round if rounded else softcap


def silu_slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """The :data:`Slope` of SiLU, in one pass."""
    result: Tensor = torch.ops.aten.silu_backward.grad_input(factor, values, grad_input=out)
    return result


SWISH_BETA = 1.702
_TANH_IS_ONE = 60.0  # from half of it on
_TANH_IS_LINEAR = 0.01  # up to it, within 2**-14
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715
_NO_LIMIT = 2.0**80  # a value that is not reached by here is never reached


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
    return x.mul_(_gelu_tanh_exponent(x, _spare(x, "gelu_tanh")).sigmoid_())


def _gelu_tanh_both(x: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """As :func:`_logistic_grad_`, in buffers; ``2 x q'`` is three times ``2q`` without ``4 sqrt(2/pi) x``."""
    exponent = _gelu_tanh_exponent(x, _spare(x, "gelu_tanh"))
    inner = torch.mul(exponent, 3, out=_spare(x, "gelu_tanh_inner")).add_(x, alpha=-4 * _TANH_SCALE)
    s = torch.sigmoid(exponent, out=_spare(x, "gelu_tanh_s"))
    inner.mul_(exponent.neg_().sigmoid_()).add_(1)
    torch.mul(x, s, out=value)
    return torch.mul(inner, s, out=grad)


def _gelu_tanh_slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    return _gelu_tanh_both(values, _spare(values, "gelu_tanh_value"), out).mul_(factor)


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
    """Overwrites its argument with the value, where there is a faster way than a copy of `value`."""
    fast_slope: Slope | None = None
    """The derivative times a factor, where there is a faster way than `grad_`."""

    both: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Writes value and derivative at its first argument into the others, where that is faster than apart."""

    def value_(self, x: Tensor) -> Tensor:
        """Replace `x` by its activation and return it."""
        if self.in_place is not None:
            return self.in_place(x)
        return F.silu(x, inplace=True) if self.value is F.silu else x.copy_(self.value(x))

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
        lambda x: _gelu_tanh_both(x, _spare(x, "gelu_tanh_value"), x),
        _gelu_tanh_,
        _gelu_tanh_slope,
        _gelu_tanh_both,
    ),
    "squared_relu": Activation(lambda x: x.clamp(min=0).square(), lambda x: x.clamp_(min=0).mul_(2)),
}
"""The activations that the documented kernels know."""


def _swish(alpha: float) -> Activation:
    if alpha == 1:
        return ACTIVATIONS["silu"]

    def slope(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        return silu_slope(torch.mul(values, alpha, out=out), factor, out)

    # silu(alpha x) / alpha, by torch's own passes over SiLU and its derivative.
    return Activation(
        lambda x: x * torch.sigmoid(x * alpha),
        lambda x: slope(x, torch.ones_like(x), x),
        lambda x: F.silu(x.mul_(alpha), inplace=True).div_(alpha),
        slope,
    )


def _softcapped_silu(cap: float, rounded: bool) -> Activation:
    """``v s`` and ``s (1 - v^2 / c^2) + v s (1 - s)`` with ``v = c tanh(x / c)``, s the logistic function of x.

    `rounded`, the derivative is ``s + v s (1 - s - v / c^2)``, within ``2**-14 max(c, 1)``: it cancels for large x.
    """
    capped = softcap_for(rounded)

    def value_(x: Tensor) -> Tensor:
        v = capped(x, cap, _spare(x, "gate_softcap"))
        return x.sigmoid_().mul_(v)

    def both(x: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        v, s = capped(x, cap, value), torch.sigmoid(x, out=grad)
        spare = _spare(x, "gate_softcap")
        if rounded:
            share, product = torch.add(s, v, alpha=cap**-2, out=spare), v.mul_(s)
            return s.addcmul_(product, share, value=-1).add_(product)
        second, t = torch.ops.aten.sigmoid_backward(v, s), torch.div(v, cap, out=spare)
        v.mul_(s)
        torch.ops.aten.tanh_backward.grad_input(s, t, grad_input=s)
        return s.add_(second)

    return Activation(
        lambda x: (x / cap).tanh_().mul_(cap).mul_(torch.sigmoid(x)),
        lambda x: both(x, torch.empty_like(x), x),
        value_,
        both=both,
    )


def argument_of(activation: Activation, value: float) -> float | None:
    """Return where above 0 the activation takes a `value` above 0, None if nowhere: all rows increase there.

    A limit on the activation's value is this limit on the gate: the same values, the same mask.
    """
    with unset_fake_temporarily():  # the values count, also in a forward that is run for its shapes
        low, high = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        while activation.value(high) < value:
            if high > _NO_LIMIT:
                return None
            low, high = high, high * 2
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if activation.value(middle) < value else (low, middle)
        return float(high.float())


@functools.cache
def gating_of(gate: Gate, rounded: bool = False) -> Gating:
    """Return how blocks with this gate compute; `rounded` where the intermediate is rounded to bf16 or less."""
    if gate.act not in ACTIVATIONS:
        raise not_one_of("act", gate.act, ACTIVATIONS)
    activation = ACTIVATIONS[gate.act]
    if gate.act == "swish":
        activation = _swish(gate.alpha)
    elif gate.gate_softcap is not None:
        activation = _softcapped_silu(gate.gate_softcap, rounded)
    plain = activation is ACTIVATIONS["silu"]
    gate_max, offset = gate.gate_max, gate.up_offset
    if gate.act_max is not None:
        found = (gate_max, argument_of(activation, gate.act_max))
        gate_max = min((limit for limit in found if limit is not None), default=None)
    high, low = (None if limit is None else limit + offset for limit in (gate.up_max, gate.up_min))
    return Gating(
        None if plain else activation.value_,
        None if plain else activation.slope,
        (gate_max, gate.gate_min),
        (high, low),
        not gate.gated,
        gate.up_softcap,
        offset,
        activation.both if (gate_max, gate.gate_min) == (None, None) else None,
        rounded,
    )


SILU = gating_of(SWIGLU)
