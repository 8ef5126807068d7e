"""The backward of ``grouped_forward``: bf16 products over all groups, rounding points as in ``ffn_backward``.

Legend: as in ``grouped_forward``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import BlockBackward
from hf_neuron_moe.backends.torch.grouped_forward import (
    CHUNK,
    Batch,
    PreActivations,
    sum_over_experts,
    tokens_operand,
)
from hf_neuron_moe.backends.torch.grouped_products import each_run, project, project_over_rows, project_sums
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.backends.torch.tiles import row_tiles


class GroupedBackward(BlockBackward):
    """The backward of ``grouped_forward``."""

    def run(self) -> Tensor | None:
        """Write the gradients that are wanted; return that of the tokens ``[T, H]``."""
        inner, rows, recompute_loader = self.weights.inner, self.rows, self.recompute_loader or self.loader
        if self.d_weights is not None:
            self.d_weights.zero_without(rows.runs)
        dx_RH = both_G2IH = None
        if self.wants_input:
            dx_RH = self.x_TH.new_empty((rows.count, self.x_TH.shape[1]), dtype=self.loader.compute.operand)
            both_G2IH = self.weights.both(self.loader.scratch)
        kept_up = 0 if self.saved.up is None else self.saved.up.shape[1]
        dout_op, x_op = tokens_operand(self.dout_TH, self.loader), None
        if self.saved.gate is None or kept_up < inner:
            x_op = tokens_operand(self.x_TH, recompute_loader)
        for batch in Batch.cut(rows, inner):
            pre = PreActivations(self.weights, batch, recompute_loader, self.saved)
            x_rH = None
            if x_op is not None:
                x_rH = batch.take(x_op)
                pre.multiply(x_rH, missing_only=True)
            dout_rH = batch.take(dout_op)
            d_int = self._intermediate_grad(batch, dout_rH)
            d_gate_up, inter = self._between(batch, pre, d_int)
            if self.d_weights is not None:
                self._weight_grads(batch, d_gate_up, inter, dout_rH, x_rH)
            if dx_RH is not None and both_G2IH is not None:
                self._input_grad(batch, dx_RH, d_gate_up, both_G2IH)
        return None if dx_RH is None else sum_over_experts(dx_RH, rows).to(self.x_TH.dtype)

    def _intermediate_grad(self, batch: Batch, dout_rH: Tensor) -> list[Tensor]:
        """Return ``dY Wd`` of a batch as tensors ``[r, I]`` to be added: the fp32 sums, or bf16 parts of them."""
        loader, shape = self.loader, (batch.size, self.weights.inner)
        down_GIH = self.weights.down_GHI.transpose(1, 2)
        if loader.compute.mx:
            sums = loader.scratch.get("d_int", shape, torch.float32)
            project_sums(dout_rH, down_GIH, batch.runs, loader, sums)
            return [sums]
        high, low = (loader.scratch.get(name, shape, loader.compute.operand) for name in ("d_int", "d_int_low"))
        project(dout_rH, down_GIH, batch.runs, loader, high, low)
        return [high, low]

    def _between(self, batch: Batch, pre: PreActivations, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return ``[d_gate | d_up]`` and the scaled intermediate of a batch, bf16; add to the factors' gradients."""
        loader, inner = self.loader, self.weights.inner
        scratch, width, operand = loader.scratch, loader.width(inner), loader.compute.operand
        d_gate_up = scratch.get("d_gate_up", (batch.size, 2 * width), operand)
        inter = scratch.get("inter", (batch.size, width), operand)
        math = SwiGLUGrad(self.gating, loader.compute.mx, loader.round_)
        for chunk in batch.chunks(inner):
            shape, part = (chunk.stop - chunk.start, inner), batch.global_part(chunk)
            gate, up = pre.values(chunk, rounded=True)
            d_int = scratch.get("d_int_chunk", shape, torch.float32).copy_(parts[0][chunk])
            for part_rI in parts[1:]:
                d_int.add_(part_rI[chunk])
            results = scratch.get("inner_grads", (3, *shape), torch.float32)
            math.fill(
                results,
                d_int,
                gate,
                up,
                scratch.get("act", shape, torch.float32),
                kept_act=None if self.saved.gate_act is None else self.saved.gate_act[part],
                kept_product=None if self.saved.intermediate is None else self.saved.intermediate[part],
                scale_R1=batch.scale(chunk),
                d_scale_R=None if self.d_scale_R is None else self.d_scale_R[part],
            )
            for target, values in zip((d_gate_up[:, :width], d_gate_up[:, width:], inter), results, strict=True):
                loader.fill(target[chunk], values)
        return d_gate_up, inter

    def _weight_grads(
        self, batch: Batch, d_gate_up: Tensor, inter: Tensor, dout_rH: Tensor, x_rH: Tensor | None
    ) -> None:
        """Sum over each group's rows; in MX every operand is quantized along them first.

        `dout_rH` and `x_rH`, the latter if it was needed before, are operands of the products along H.
        """
        grads, inner, width, compute = self.d_weights, self.weights.inner, inter.shape[1], self.loader.compute
        assert grads is not None
        plain = not compute.mx and self.x_TH.dtype == self.dout_TH.dtype == compute.operand
        if not plain:
            dout_rH = batch.take(self.dout_TH)
        if x_rH is None or not plain:
            x_rH = batch.take(self.x_TH)
        whole = grads.gate_up_G2IH is not None and width == inner
        for group, dout, x, both, product in each_run(batch.runs, dout_rH, x_rH, d_gate_up, inter[:, :inner]):
            if not plain:
                dout, x, both, product = (
                    self._over_rows(name, part)
                    for name, part in (("dout", dout), ("x", x), ("d_gate_up", both), ("inter", product))
                )
            project_over_rows(dout, product, grads.down_GHI[group])
            if whole and grads.gate_up_G2IH is not None:
                project_over_rows(both, x, grads.gate_up_G2IH[group])
            else:
                project_over_rows(both[:, :inner], x, grads.gate_GIH[group])
                project_over_rows(both[:, width : width + inner], x, grads.up_GIH[group])

    def _over_rows(self, name: str, values: Tensor) -> Tensor:
        """Return one group's rows as operands of a sum over them: zero padded to whole lanes and quantized in MX."""
        loader, columns = self.loader, values.shape[1]
        tiles = row_tiles(len(values), self.rows.block_size) if loader.compute.mx else []
        size = tiles[-1].start + tiles[-1].size if tiles else len(values)
        operand = loader.scratch.get(f"rows_of_{name}", (size, columns), loader.compute.operand)
        loader.fill(operand, values)
        for tile in tiles:
            step = max(CHUNK // tile.size, 1)
            for first in range(0, columns, step):
                loader.quantize_rows(operand[tile.start : tile.start + tile.size, first : first + step], tile.lane)
        return operand

    def _input_grad(self, batch: Batch, out_RH: Tensor, d_gate_up: Tensor, both_G2IH: Tensor) -> None:
        """Multiply with the weights; in MX after quantizing gate's and up's gradients along one axis of 2I."""
        loader, inner = self.loader, self.weights.inner
        width = d_gate_up.shape[1] // 2
        if loader.compute.mx:
            for chunk in batch.chunks(2 * width):
                loader.quantize(d_gate_up[chunk], axis=1)
            if width > inner:
                halves = both_G2IH.unflatten(1, (2, inner))
                both_G2IH = F.pad(halves, (0, 0, 0, width - inner)).flatten(1, 2)
        project(d_gate_up, both_G2IH.transpose(1, 2), batch.runs, loader, out_RH[batch.part])
