"""The elementwise part of the backward: gradients of gate and up, and the intermediate, of some rows.

Legend: R rows, I intermediate (a part of the axis is as good). Every tensor is fp32 and overwritten in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from hf_neuron_moe.backends.torch.activation_rows import scaled_product
from hf_neuron_moe.backends.torch.gating import Gating, mask_, mask_finite_


class SwiGLUGrad(NamedTuple):
    """How the values between the products are made; the module ``ffn_backward`` lists the rounding points."""

    gating: Gating
    """The activation and its clamp masks."""
    mx: bool
    """Round as ``mlp_bwd_mxfp8`` does."""
    round_: Callable[[Tensor], Tensor]
    """Rounds fp32 values to the compute dtype in place."""
    on_host: bool = False
    """Whether the host may read values, and has them at no cost."""

    def fill(
        self,
        results: Iterable[Tensor],
        d_int: Tensor,
        gate: Tensor,
        up: Tensor,
        act: Tensor,
        *,
        saved_act: Tensor | None = None,
        saved_product: Tensor | None = None,
        scale_R1: Tensor | None = None,
        d_scale_R: Tensor | None = None,
    ) -> None:
        """Write d_gate, d_up and the scaled intermediate into the `results`, three of ``[R, I]``, not rounded.

        `d_int`, the gradient of the intermediate ``[R, I]``, is overwritten; `act` is a buffer. `saved_act` and
        `saved_product` are the activation and ``act * up``, where they were saved (mxfp8). `d_scale_R` is added to.
        """
        d_gate, d_up, product = results
        gating = self.gating
        at_once = None if self.mx or gating.rounds_itself or gating.skip_gate else gating.act_and_slope
        slope, scale = None, 1.0
        if at_once is not None:
            up_value, scale = gating.up_share(up)
        else:
            up_value = up if gating.skip_gate else gating.up_value(up)
        if at_once is None:
            self._activate(gate, up_value, act, product, saved_act, saved_product)
        else:
            slope = at_once(gate, act, d_gate)
            gating.times(act, up_value, product, scale)
        looks = gating.has_limits and self.on_host and not is_fake(d_int)
        mask = mask_
        if d_scale_R is not None or looks:
            sums_R = torch.linalg.vecdot(d_int, product)
            if d_scale_R is not None:
                d_scale_R.add_(sums_R)
            if looks and _is_finite(sums_R, scale_R1):
                mask = mask_finite_
        if scale_R1 is not None:
            product.mul_(scale_R1)
            d_int.mul_(scale_R1)
        if gating.skip_gate:
            gating.slope(up, d_int, out=d_up)
            d_gate.zero_()
            return
        if slope is not None and gating.up_softcap is not None:
            slope(scaled_product(d_int, up_value, scale, out=d_up))
            torch.ops.aten.tanh_backward.grad_input(d_int, up_value, grad_input=d_int)
            gating.times(act, d_int, out=d_up)
        else:
            if slope is not None:
                gating.times(act, d_int, out=d_up)
                slope(d_int.mul_(up_value))
            else:
                torch.mul(act, d_int, out=d_up)
                self._gate_slope(gate, up_value, d_int, d_gate)
            gating.up_slope_(d_up, up_value)
        mask(d_up, up, gating.up_limits)
        mask(d_gate, gate, gating.gate_limits)

    def _gate_slope(self, gate: Tensor, up_value: Tensor, d_int: Tensor, d_gate: Tensor) -> None:
        """Write ``d_int * up_value`` times the activation's derivative into `d_gate`; `d_int` is overwritten."""
        if self.mx and not self.gating.rounds_itself:
            one = torch.ones((), dtype=torch.float32, device=gate.device).expand(gate.shape)
            slope_RI = self.round_(self.gating.slope(gate, one, out=d_gate))
            self.round_(slope_RI.mul_(up_value)).mul_(d_int)
        else:
            self.gating.slope(gate, d_int.mul_(up_value), out=d_gate)

    def _activate(
        self,
        gate: Tensor,
        up_value: Tensor,
        act: Tensor,
        product: Tensor,
        saved_act: Tensor | None,
        saved: Tensor | None,
    ) -> None:
        """Fill `act` and `product` from what was saved, or compute them as the precision rounds them."""
        if not self.mx or self.gating.rounds_itself or self.gating.skip_gate:
            self.gating.product(gate, up_value, out=product, act=act)
            return
        if saved_act is not None:
            act.copy_(saved_act)
        else:
            self.round_(self.gating.activation(gate, out=act))
        if saved is not None:
            product.copy_(saved)
        else:
            self.round_(torch.mul(act, up_value, out=product))


def _is_finite(*sums: Tensor | None) -> bool:
    """Whether sums of products and factors are finite; where their own sum overflows, the answer is no."""
    return all(math.isfinite(part.sum().item()) for part in sums if part is not None)
