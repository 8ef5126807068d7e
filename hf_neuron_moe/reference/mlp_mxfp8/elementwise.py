"""Phase 1 of the MXFP8 MLP backward behind its product: from d_int to d_gate and d_up, with the clamps' masks.

Legend: S tokens, I intermediate. Source: nki-library 2.31 ``mlp_bwd_mxfp8``; the rounding points are in
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.phases`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import Tile, row_tiles
from hf_neuron_moe.reference.moe_types import ClampLimits

_ELEMENTWISE_ROWS = 64
"""Rows of one elementwise step: its fp32 buffers stay in a core's second-level cache."""


class Phase1Elementwise:
    """Turns tiles of d_int into d_gate and d_up, in place."""

    def __init__(
        self,
        gate_pre: Tensor,
        gate_act: Tensor,
        up: Tensor,
        d_gate_up: Tensor,
        limits: ClampLimits,
        scratch: Scratch,
    ) -> None:
        self.gate_pre, self.gate_act, self.up, self.scratch = gate_pre, gate_act, up, scratch
        inner = up.shape[1]
        self.d_gate, self.d_up = d_gate_up[:, :inner], d_gate_up[:, inner:]
        self.gate_limits = (limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit)
        self.up_limits = (limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit)

    def run(self, tile: Tile) -> None:
        """Overwrite this tile of d_gate and d_up."""
        for rows in row_tiles(tile.rows, _ELEMENTWISE_ROWS):
            part = (rows, tile.columns)
            offset = rows.start - tile.rows.start
            self._rows(tile.values[offset : offset + rows.stop - rows.start], part)

    def _rows(self, d_int: Tensor, part: tuple[slice, slice]) -> None:
        shape = tuple(d_int.shape)
        factor = self.scratch.get("mx_factor", shape, torch.float32)
        one = torch.ones((), dtype=torch.float32, device=d_int.device).expand(shape)
        gate = self.scratch.get("mx_gate_fp32", shape, torch.float32).copy_(self.gate_pre[part])
        torch.ops.aten.silu_backward.grad_input(one, gate, grad_input=factor)
        slope = self.scratch.get("mx_slope", shape, torch.bfloat16).copy_(factor)
        # bf16 times bf16 is exact in fp32: these products are rounded once.
        d_act = slope.mul_(self.up[part])
        self.d_up[part].copy_(factor.copy_(self.gate_act[part]).mul_(d_int))
        self.d_gate[part].copy_(factor.copy_(d_act).mul_(d_int))
        _mask(self.d_gate[part], self.gate_pre[part], *self.gate_limits)
        _mask(self.d_up[part], self.up[part], *self.up_limits)


def _mask(grad: Tensor, values: Tensor, upper: float | None, lower: float | None) -> None:
    """Multiply by 1 strictly inside the limits and by 0 elsewhere; limits are compared in fp32, not rounded to bf16."""
    if upper is None and lower is None:
        return
    values32 = values.float()
    inside = torch.ones_like(values32, dtype=torch.bool)
    if upper is not None:
        inside &= values32 < upper
    if lower is not None:
        inside &= values32 > lower
    grad.mul_(inside)
