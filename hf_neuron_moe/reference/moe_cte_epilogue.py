"""What the blockwise MoE forward does between its matmuls, where that is more than ``silu(gate) * up``.

Legend: R rows of one expert, I intermediate, E experts.

The order is upstream's: dequantization scale, activation scale, bias, clamp, then the pre-activations are rounded and
kept; affinity of PRE_SCALE, activation, product, affinity of multiply-on-I, rounding, MX quantization.

Source: nki-library 2.29 ``moe_cte`` torch reference and the shard_on_i kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.tiles import Span
from hf_neuron_moe.reference.activations import act_
from hf_neuron_moe.reference.moe_types import ActFnType


class Limits(NamedTuple):
    """Clamp limits of gate and up; None is absent. The upper one is applied first, so the lower one wins."""

    gate_upper: float | None = None
    gate_lower: float | None = None
    up_upper: float | None = None
    up_lower: float | None = None

    def half(self, number: int) -> tuple[float | None, float | None]:
        """Return upper and lower limit of the gate (0) or of up (1)."""
        return (self.gate_upper, self.gate_lower) if number == 0 else (self.up_upper, self.up_lower)


@dataclass(frozen=True)
class ExpertEpilogue:
    """One expert's :class:`hf_neuron_moe.backends.torch.ffn_forward.Epilogue`."""

    activation: ActFnType  # of the gate, or of up with `skip_gate`
    limits: Limits
    rounded: torch.dtype  # of the pre-activations, fp32 for not rounded at all
    rounded_product: torch.dtype  # of the intermediate
    needs_gate: bool  # False if the gate is neither used nor kept
    skip_gate: bool  # the intermediate is ``act(up)``
    scale_2X: Tensor | None  # fp32 dequantization scales of gate and up, [2, I] or [2, 1]
    scale_R1: Tensor | None  # fp32 activation scale of every row
    bias_2I: Tensor | None  # fp32
    pre_R1: Tensor | None  # factor on the clamped pre-activations
    post_R1: Tensor | None  # factor on the intermediate
    width: int  # the intermediate's columns from here on are padding and set to zero
    quantize: Callable[[Tensor], Tensor] | None  # rounds the intermediate's rows for an MX matmul, in place
    scratch: Scratch  # buffers for the roundings

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        """Scale, bias, clamp and round the sums in place."""
        part = slice(columns.start, columns.stop)
        for half, values in enumerate((gate_RI, up_RI)):
            if half == 0 and not self.needs_gate:
                continue
            if self.scale_2X is not None:
                values.mul_(self.scale_2X[half, part] if self.scale_2X.shape[1] > 1 else self.scale_2X[half])
            if self.scale_R1 is not None:
                values.mul_(self.scale_R1[rows.start : rows.stop])
            if self.bias_2I is not None:
                values.add_(self.bias_2I[half, part])
            clamp_(values, *self.limits.half(half))
            self._round_(values, self.rounded)

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the rounded, for MX quantized, product of activation and up."""
        part = slice(rows.start, rows.stop)
        if self.pre_R1 is not None:
            up_RI.mul_(self.pre_R1[part])
            if not self.skip_gate:
                gate_RI.mul_(self.pre_R1[part])
        product = act_(up_RI, self.activation) if self.skip_gate else act_(gate_RI, self.activation).mul_(up_RI)
        if self.post_R1 is not None:
            product.mul_(self.post_R1[part])
        self._round_(product, self.rounded_product)
        if self.width < columns.stop:
            product[:, max(self.width - columns.start, 0) :].zero_()
        return product if self.quantize is None else self.quantize(product)

    def _round_(self, values: Tensor, dtype: torch.dtype) -> None:
        if dtype != values.dtype:
            values.copy_(self.scratch.get("rounding", tuple(values.shape), dtype).copy_(values))


def clamp_(values: Tensor, upper: float | None, lower: float | None) -> Tensor:
    """Clamp in place: minimum with `upper`, then maximum with `lower`; None is no limit."""
    if upper is not None:
        values.clamp_(max=upper)
    if lower is not None:
        values.clamp_(min=lower)
    return values
