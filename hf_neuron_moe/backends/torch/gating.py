"""How gate and up become the intermediate: activations and their derivatives, clamp masks, no gate at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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


GATES: dict[str, Gating] = {"silu": Gating()}
"""The gates of patched blocks, by the name that a :class:`~hf_neuron_moe.backends.spec.BlockSpec` gives them.

``modules/structure.py`` says how each is recognized.
"""
SILU = GATES["silu"]
