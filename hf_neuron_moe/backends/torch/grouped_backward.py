"""The backward of ``grouped_forward``: bf16 products over all groups, rounding points as in ``ffn_backward``.

Legend: as in ``grouped_forward``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import BlockBackward, GroupedWeights, sum_over_experts
from hf_neuron_moe.backends.torch.ffn_forward import added_to_sums
from hf_neuron_moe.backends.torch.grouped_forward import (
    CHUNK,
    Batch,
    PreActivations,
    has_ones,
    result_rows,
    tokens_operand,
)
from hf_neuron_moe.backends.torch.grouped_products import (
    each_run,
    each_whole_run,
    project,
    project_over_rows,
    project_sums,
)
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.backends.torch.tiles import row_tiles


class GroupedBackward(BlockBackward):
    """The backward of ``grouped_forward``."""

    def run(self) -> Tensor | None:
        """Write the gradients that are wanted; return that of the tokens ``[T, H]``."""
        inner, rows, recompute_loader = self.weights.inner, self.rows, self.recompute_loader or self.loader
        d_weights = None if self.grads is None else self.grads.grouped()
        if d_weights is not None:
            d_weights.zero_without(rows.runs)
        dx_RH = both_G2IH = x_op = None
        added = added_to_sums(self.weights.up_GIH, (self.weights.gate_bias_GI, self.weights.up_bias_GI), self.gating)
        if self.wants_input:
            dx_RH = result_rows(rows, self.x_TH, self.loader.compute.operand, self.loader)
            both_G2IH = None if self._rearranged else self.weights.both(self.loader.scratch)
        saved_up = 0 if self.saved.up is None else self.saved.up.shape[1]
        dout_op = tokens_operand(self.dout_TH, self.loader)
        if (self.saved.gate is None and not self.gating.skip_gate) or saved_up < inner:
            x_op = tokens_operand(self.x_TH, recompute_loader, with_ones=has_ones(added, self.loader))
        for batch in Batch.cut(rows, inner):
            pre = PreActivations(self.weights, batch, recompute_loader, self.saved, added)
            x_rH = None
            if x_op is not None:
                x_rH = batch.take(x_op, self.loader, "x_rows")
                pre.multiply(x_rH, missing_only=True)
            dout_rH = batch.take(dout_op, self.loader, "dout_rows")
            d_gate_up, inter = self._between(batch, pre, self._intermediate_grad(batch, dout_rH))
            # In MX the input's gradient quantizes the operands that the weights' gradients copy; else those zero rows.
            if dx_RH is not None and not self.loader.compute.mx:
                self._input_grad(batch, dx_RH, d_gate_up, both_G2IH)
            if d_weights is not None:
                self._weight_grads(d_weights, batch, d_gate_up, inter, dout_rH, x_rH)
            if dx_RH is not None and self.loader.compute.mx:
                self._input_grad(batch, dx_RH, d_gate_up, both_G2IH)
        return None if dx_RH is None else sum_over_experts(dx_RH, rows).to(self.x_TH.dtype)

    @property
    def _rearranged(self) -> bool:
        """Whether MX groups of gate's and up's joint axis are made of copies of both weights, one group at a time."""
        weights, inner = self.weights, self.weights.inner
        ready = weights.gate_up_G2IH is not None and not weights.interleaved and self.loader.width(inner) == inner
        return self.loader.compute.mx and not ready

    @property
    def _in_pairs(self) -> bool:
        """Whether gradients of gate and up lie interleaved."""
        return self.weights.interleaved and not self.gating.skip_gate and not self.loader.compute.mx

    def _halves(self, both_r2I: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gate's and up's part of ``[r, 2I]``; without a gate, of an empty one and the whole.

        They lie as the weights do, in MX one after the other.
        """
        if self.gating.skip_gate:
            return both_r2I[:, :0], both_r2I
        if self._in_pairs:
            return both_r2I[:, ::2], both_r2I[:, 1::2]
        width = both_r2I.shape[1] // 2
        return both_r2I[:, :width], both_r2I[:, width:]

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
        """Return d_gate and d_up in one (:meth:`_halves`), and the scaled intermediate of a batch, bf16.

        Adds to the factors' gradients.
        """
        loader, inner = self.loader, self.weights.inner
        scratch, width, operand = loader.scratch, loader.width(inner), loader.compute.operand
        columns = width if self.gating.skip_gate else 2 * width
        d_gate_up = scratch.get("d_gate_up", (batch.size, columns), operand)
        if batch.on_device is not None and operand == torch.float32 and width == inner:
            inter = parts[0]  # of a chunk it is written when the sums have been read
        else:
            inter = scratch.get("inter", (batch.size, width), operand)
        for chunk in batch.chunks(inner):
            d_int = parts[0][chunk]
            if batch.on_device is None:
                d_int = scratch.get("d_int_chunk", tuple(d_int.shape), torch.float32).copy_(d_int)
            for part_rI in parts[1:]:
                d_int.add_(part_rI[chunk])
            self._between_chunk(batch, chunk, pre, d_int, d_gate_up[chunk], inter[chunk])
        return d_gate_up, inter

    def _between_chunk(
        self, batch: Batch, chunk: slice, pre: PreActivations, d_int: Tensor, d_gate_up: Tensor, inter: Tensor
    ) -> None:
        """Fill a chunk's rows of both results; `d_int`, fp32, is overwritten."""
        loader, scratch, shape, part = self.loader, self.loader.scratch, tuple(d_int.shape), batch.global_part(chunk)
        gate, up = pre.values(chunk, rounded=True)
        halves = self._halves(d_gate_up)
        in_place = batch.on_device is not None and not self._in_pairs and d_gate_up.dtype == torch.float32
        in_place = in_place and all(half.shape == d_int.shape for half in halves)
        buffers = scratch.get("inner_grads", (1 if in_place else 3, *shape), torch.float32)
        results = (*(halves if in_place else ()), *buffers)
        on_host = batch.on_device is None and d_int.is_cpu
        SwiGLUGrad(self.gating, loader.compute.mx, loader.round_, on_host).fill(
            results,
            d_int,
            gate,
            up,
            scratch.get("act", shape, torch.float32),
            saved_act=None if self.saved.gate_act is None else self.saved.gate_act[part],
            saved_product=None if self.saved.intermediate is None else self.saved.intermediate[part],
            scale_R1=batch.scale(chunk),
            d_scale_R=None if self.d_scale_R is None else self.d_scale_R[part],
        )
        loader.fill(inter, results[2])
        if in_place:
            return
        if self._in_pairs:  # torch makes complex numbers of two parts three times as fast as it writes every other
            pairs = torch.complex(results[0], results[1], out=scratch.get("pairs", shape, torch.complex64))
            loader.fill(d_gate_up, torch.view_as_real(pairs).flatten(1))
            return
        for target, values in zip(halves, results[:2], strict=True):
            if target.shape[1]:
                loader.fill(target, values)

    def _weight_grads(
        self,
        grads: GroupedWeights,
        batch: Batch,
        d_gate_up: Tensor,
        inter: Tensor,
        dout_rH: Tensor,
        x_rH: Tensor | None,
    ) -> None:
        """Sum over each group's rows, biases' gradients included; in MX operands are quantized along them first.

        `dout_rH` and `x_rH`, the latter if it was needed before, are operands of the products along H.
        """
        inner, width, compute = self.weights.inner, inter.shape[1], self.loader.compute
        plain = not compute.mx and self.x_TH.dtype == self.dout_TH.dtype == compute.operand
        if not plain:
            dout_rH = batch.take(self.dout_TH, self.loader, "dout_rows")
        if x_rH is None or not plain:
            x_rH = batch.take(self.x_TH, self.loader, "x_rows")
        x_rH = x_rH[:, : self.x_TH.shape[1]]
        whole = grads.gate_up_G2IH is not None and width == inner and not (compute.mx and grads.interleaved)
        each = each_whole_run if plain else each_run
        for group, dout, x, both, product in each(batch.runs, dout_rH, x_rH, d_gate_up, inter[:, :inner]):
            if self.d_bias_G2I is not None:
                halves = self._halves(self._sum_of_rows(both))
                for bias_I, sums in zip(self.d_bias_G2I[group].chunk(2), halves, strict=True):
                    bias_I[: sums.shape[1]].copy_(sums[0, :inner])
            if not plain:
                dout, x, both, product = (
                    self._over_rows(name, part)
                    for name, part in (("dout", dout), ("x", x), ("d_gate_up", both), ("inter", product))
                )
            project_over_rows(dout, product, grads.down_GHI[group])
            if whole and grads.gate_up_G2IH is not None:
                project_over_rows(both, x, grads.gate_up_G2IH[group])
            else:
                for part, target_GIH in zip(self._halves(both), (grads.gate_GIH, grads.up_GIH), strict=True):
                    if part.shape[1]:
                        project_over_rows(part[:, :inner], x, target_GIH[group])

    def _sum_of_rows(self, values_rN: Tensor) -> Tensor:
        """Return the sum of a group's rows as ``[1, N]``: fp32, or on CPUs rounded to bf16 where all biases are bf16.

        Such a sum is a product with ones. Its rounding is the one that the gradient of a bf16 bias gets anyway.
        """
        biases = (self.weights.gate_bias_GI, self.weights.up_bias_GI)
        if values_rN.is_cpu and all(bias_GI is None or bias_GI.dtype == values_rN.dtype for bias_GI in biases):
            return values_rN.new_ones(1, len(values_rN)) @ values_rN
        step, sums_1N = max(CHUNK // values_rN.shape[1], 1), values_rN.new_zeros(1, values_rN.shape[1]).float()
        for part_rN in values_rN.split(step):
            part32 = self.loader.scratch.get("summed", tuple(part_rN.shape), torch.float32)
            sums_1N.add_(part32.copy_(part_rN).sum(0))
        return sums_1N

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

    def _input_grad(self, batch: Batch, out_RH: Tensor, d_gate_up: Tensor, both_G2IH: Tensor | None) -> None:
        """Multiply with the weights; in MX after quantizing gate's and up's gradients along one axis of 2I."""
        loader, columns = self.loader, d_gate_up.shape[1]
        if loader.compute.mx:
            for chunk in batch.chunks(columns):
                loader.quantize(d_gate_up[chunk], axis=1)
        if both_G2IH is not None:
            project(d_gate_up, both_G2IH.transpose(1, 2), batch.runs, loader, out_RH[batch.room])
            return
        for group, start, end in batch.runs:
            both_12IH = self._padded_weights(slice(group, group + 1), columns)
            project(d_gate_up, both_12IH.transpose(1, 2), [(0, start, end)], loader, out_RH[batch.room])

    def _padded_weights(self, groups: slice, columns: int) -> Tensor:
        """Return gate and up of `groups` as ``[G, columns, H]``, one after the other, each zero padded to MX groups."""
        weights = self.weights
        parts = (weights.up_GIH,) if self.gating.skip_gate else (weights.gate_GIH, weights.up_GIH)
        shape = (len(weights.up_GIH[groups]), len(parts), columns // len(parts), weights.up_GIH.shape[2])
        both = self.loader.scratch.get("gate_up", shape, weights.up_GIH.dtype)
        for target_GIH, part_GIH in zip(both.unbind(1), parts, strict=True):
            target_GIH[:, : weights.inner].copy_(part_GIH[groups])
            target_GIH[:, weights.inner :].zero_()
        return both.flatten(1, 2)
