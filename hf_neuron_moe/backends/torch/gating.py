"""How gate and up become the intermediate: activations, clamp masks, no gate at all."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.torch.activation_rows import (
    ACTIVATIONS,
    Activation,
    AtOnce,
    InPlace,
    Limits as Limits,
    Slope,
    activation_of,
    scaled_product,
    silu_slope,
    spare,
    tanh_of_share,
)


@dataclass(frozen=True)
class Gating:
    """How gate and up become the intermediate; the default is SiLU without limits."""

    rounds_itself: ClassVar[bool] = False
    """Whether :meth:`product` and :meth:`slope` have rounding points of their own, which then replace mxfp8's."""

    gained_act_: InPlace | None = None
    """`gain` times the activation; None is SiLU."""
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
    act_and_slope: AtOnce | None = None
    """`gain` times the activation, and its derivative, where that is faster than apart."""
    gain: float = 1.0
    """What some activations come times, which :meth:`times` divides by at no cost."""
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
        return self._act_(clip_(values, self.gate_limits))

    def _act_(self, values: Tensor) -> Tensor:
        act = self._gained_(values)
        return act if self.gain == 1 else act.div_(self.gain)

    def _gained_(self, values: Tensor) -> Tensor:
        return F.silu(values, inplace=True) if self.gained_act_ is None else self.gained_act_(values)

    def times(self, gained: Tensor, other: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """Write `scale` times the activation times `other` into `out`; `gained` is the activation times `gain`."""
        return scaled_product(gained, other, scale / self.gain, out)

    def activation(self, values: Tensor, out: Tensor) -> Tensor:
        """Write the activation of fp32 `values` into `out` and return it."""
        if self.gained_act_ is None and self.gate_limits == (None, None):
            result: Tensor = torch.ops.aten.silu.out(values, out=out)
            return result
        if self.gate_limits == (None, None):
            out.copy_(values)
        else:
            torch.clamp(values, self.gate_limits[1], self.gate_limits[0], out=out)
        return self._act_(out)

    def up_share(self, up: Tensor) -> tuple[Tensor, float]:
        """Return what multiplies the activation, and what it is to be multiplied by itself: the softcap, or 1.

        It is `up`, or a tensor that is valid until the next call. Not differentiable with limits or a softcap, and not
        for tensors without storage: the buffer is the thread's.
        """
        if self.up_limits != (None, None):
            up = torch.clamp(up, self.up_limits[1], self.up_limits[0], out=spare(up, "up_clamped"))
        if self.up_softcap is None:
            return up, 1.0
        return tanh_of_share(up, self.up_softcap, "up_softcap", self.rounded), self.up_softcap

    def up_value(self, up: Tensor) -> Tensor:
        """Return what multiplies the activation, as :meth:`up_share` does."""
        share, scale = self.up_share(up)
        return share if scale == 1 else share.mul_(scale)

    def intermediate_(self, gate: Tensor, up: Tensor) -> Tensor:
        """Overwrite `gate` with the intermediate and return it; without a gate `up` is read alone."""
        if self.skip_gate:
            return self.activate_(gate.copy_(up))
        share, scale = self.up_share(up)
        return self.times(self._gained_(clip_(gate, self.gate_limits)), share, gate, scale)

    def product(self, gate: Tensor, up_value: Tensor, out: Tensor, act: Tensor) -> Tensor:
        """Write the intermediate into `out` and the activation into `act`; return `out`.

        `up_value` is that of :meth:`up_value`, or up without a gate.
        """
        self.activation(up_value if self.skip_gate else gate, out=act)
        return out.copy_(act) if self.skip_gate else torch.mul(act, up_value, out=out)

    def up_slope_(self, gradient: Tensor, up_value: Tensor) -> None:
        """Multiply `gradient` by the derivative of the softcap, whose result `up_value` is overwritten."""
        if self.up_softcap is not None:
            torch.ops.aten.tanh_backward.grad_input(gradient, up_value.div_(self.up_softcap), grad_input=gradient)

    def slope(self, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Write ``factor * act'(values)`` into `out`."""
        return (silu_slope if self.act_slope is None else self.act_slope)(values, factor, out)


def mask_(gradient: Tensor, value: Tensor, limits: Limits) -> Tensor:
    """Multiply `gradient` by 1 where ``lower < value < upper`` and by 0 elsewhere, in place.

    Strict: what was clamped lies on the limit. As a product, 0 * NaN stays NaN (nki-library ``ClampLimits``).
    """
    for limit, within in zip(limits, (torch.lt, torch.gt), strict=True):
        if limit is not None:  # in the values' dtype: a mask of bools takes five times as long
            gradient.mul_(within(value, limit, out=spare(value, "mask")))
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


_NO_LIMIT = 2.0**80  # a value that is not reached by here is never reached


def argument_of(activation: Activation, value: float) -> float | None:
    """Return where above 0 the activation takes a `value` above 0, None if nowhere: all rows increase there.

    A limit on the activation's value is this limit on the gate: the same values, the same mask.
    """
    with unset_fake_temporarily():  # the values count, also in a forward that is run for its shapes
        low, high = (torch.tensor(end, dtype=torch.float64, device="cpu") for end in (0.0, 1.0))
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
    activation = activation_of(gate, rounded)
    plain = activation is ACTIVATIONS["silu"]
    gate_max, offset = gate.gate_max, gate.up_offset
    if gate.act_max is not None:
        found = (gate_max, argument_of(activation, gate.act_max))
        gate_max = min((limit for limit in found if limit is not None), default=None)
    high, low = (None if limit is None else limit + offset for limit in (gate.up_max, gate.up_min))
    return Gating(
        None if plain else activation.gained_,
        None if plain else activation.slope,
        (gate_max, gate.gate_min),
        (high, low),
        not gate.gated,
        gate.up_softcap,
        offset,
        activation.at_once((gate_max, gate.gate_min)),
        activation.gain,
        rounded,
    )


SILU = gating_of(SWIGLU)
