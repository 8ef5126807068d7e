"""The backward of ``grouped_forward`` where only the device knows which rows are whose: all groups at once.

Rounding points and legend are those of ``grouped_backward.py``. Results are made in an order that keeps few of them and
of their operands alive together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.device_products import grouped_over_rows, project_on_device
from hf_neuron_moe.backends.torch.device_quantize import quantize_rows_
from hf_neuron_moe.backends.torch.device_runs import DeviceRuns, MXRowBlocks
from hf_neuron_moe.backends.torch.experts import ExpertStack, sum_over_experts
from hf_neuron_moe.backends.torch.ffn_forward import added_to_sums
from hf_neuron_moe.backends.torch.grouped_backward import GroupedBackward
from hf_neuron_moe.backends.torch.grouped_forward import (
    Batch,
    PreActivations,
    has_ones,
    tokens_operand,
)
from hf_neuron_moe.backends.torch.grouped_products import ADDED

RowsOf = tuple[Tensor, Tensor | None]  # rows in expert order, or tokens and whose each of these rows is


def of_a_product(wanted: torch.dtype) -> torch.dtype:
    """Return the dtype in which a product gives a weight's gradient: fp32 for fp16, which no accelerator's gives."""
    return torch.float32 if wanted == torch.float16 else wanted


class DeviceBackward(GroupedBackward):
    """The backward of a layer of experts; `rows` has its runs on the device."""

    def run(self) -> Tensor | None:
        """Write the gradients that are wanted; return that of the tokens ``[T, H]``."""
        (batch,) = Batch.cut(self.rows, self.weights.inner)
        d_gate_up, inter = self._between(batch, self._pre_activations(batch), [self._sums(batch)])
        blocks, apart = None, d_gate_up
        if self.loader.compute.mx and self.grads is not None:
            assert self.rows.block_size is not None, "rows of experts lie in blocks"
            # The products quantize the same values along different axes.
            blocks, apart = self._runs.mx_blocks(self.rows.block_size), d_gate_up.clone()
        dx_TH = self._dx(apart) if self.wants_input else None
        del apart
        if self.grads is not None:
            self._bias_grad(d_gate_up)
            self._down_grad(inter[:, : self.weights.inner], blocks)
            del inter
            self._gate_up_grad(d_gate_up, blocks)
        return dx_TH

    @property
    def _runs(self) -> DeviceRuns:
        assert self.rows.on_device is not None
        return self.rows.on_device

    @property
    def _stack(self) -> ExpertStack:
        assert isinstance(self.weights, ExpertStack)
        return self.weights

    def _pre_activations(self, batch: Batch) -> PreActivations:
        """Return gate and up; what was not saved is multiplied again."""
        weights, saved, loader = self.weights, self.saved, self.loader
        added = added_to_sums(weights.up_GIH, (weights.gate_bias_GI, weights.up_bias_GI), self.gating)
        pre = PreActivations(weights, batch, loader, saved, added, plain_up=self.gating.multiplies_by_up)
        saved_up = 0 if saved.up is None else saved.up.shape[1]
        if (saved.gate is None and not self.gating.skip_gate) or saved_up < weights.inner:
            x_op = tokens_operand(self.x_TH, loader, with_ones=has_ones(added, loader))
            pre.multiply(batch.take(x_op, loader, "x_rows"), missing_only=True)
        return pre

    def _sums(self, batch: Batch) -> Tensor:
        """Return ``dY Wd``, fp32 ``[R, I]``."""
        dout_RH = batch.take(tokens_operand(self.dout_TH, self.loader), self.loader, "dout_rows")
        return project_on_device(dout_RH, self.weights.down_GHI.transpose(1, 2), self._runs, self.loader, sums=True)

    def _rows_of(self, values_TH: Tensor) -> RowsOf:
        """Return tokens as operands of sums over rows: a fresh tensor, but in fp32, where the product gathers them."""
        assert self.rows.token_R is not None
        values_TH = values_TH.to(self.loader.compute.operand)
        if values_TH.dtype == torch.float32:
            return values_TH, self.rows.token_R
        return values_TH.index_select(0, self.rows.token_R), None

    def _sum_over_rows(self, left: RowsOf, right: RowsOf, blocks: MXRowBlocks | None, dtype: torch.dtype) -> Tensor:
        """Return ``left^T right`` as the weights lie, of `dtype`; in MX both are quantized in place before."""
        if blocks is not None:
            for values, _ in (left, right):
                quantize_rows_(values, blocks)
            dtype = self.loader.compute.operand
        if self._stack.spec.transposed:
            left, right = right, left
        return grouped_over_rows(left[0], right[0], self._runs.ends_G, dtype, left[1], right[1])

    def _bias_grad(self, d_gate_up: Tensor) -> None:
        """Sum the gradients of gate and up over each group's rows."""
        if self.d_bias_G2I is None:
            return
        ones = d_gate_up.new_ones((len(d_gate_up), ADDED))
        sums_G2I = grouped_over_rows(ones, d_gate_up, self._runs.ends_G, torch.float32)[:, 0]
        for bias_GI, part in zip(self.d_bias_G2I.chunk(2, dim=1), self._halves(sums_G2I), strict=True):
            bias_GI[:, : part.shape[1]].copy_(part[:, : self.weights.inner])

    def _down_grad(self, inter: Tensor, blocks: MXRowBlocks | None) -> None:
        assert self.grads is not None
        dtype = of_a_product(self._stack.stacked.down.dtype)
        self.grads.put(1, self._sum_over_rows(self._rows_of(self.dout_TH), (inter, None), blocks, dtype))

    def _gate_up_grad(self, d_gate_up: Tensor, blocks: MXRowBlocks | None) -> None:
        assert self.grads is not None
        stack, inner, (x, token_R) = self._stack, self.weights.inner, self._rows_of(self.x_TH)
        dtype = of_a_product(stack.stacked.gate_up.dtype)
        padded = d_gate_up.shape[1] != inner * (1 if self.gating.skip_gate else 2)
        if not padded and (self._in_pairs or not stack.interleaved):
            self.grads.put(0, self._sum_over_rows((d_gate_up, None), (x, token_R), blocks, dtype))
            return
        if blocks is not None:
            d_gate_up, x = (quantize_rows_(part, blocks) for part in (d_gate_up, x))
        made = self.grads.grouped()
        for part, target_GIH in zip(self._halves(d_gate_up), (made.gate_GIH, made.up_GIH), strict=True):
            if part.shape[1]:
                rounded = self.loader.compute.operand if blocks is not None else dtype
                made_GIH = grouped_over_rows(part[:, :inner], x, self._runs.ends_G, rounded, None, token_R)
                target_GIH.copy_(made_GIH)

    def _dx(self, d_gate_up: Tensor) -> Tensor:
        """Return the gradient of the tokens ``[T, H]``.

        In MX gate's and up's gradients are quantized along one axis of 2I before they are multiplied.
        """
        if self.loader.compute.mx:
            self.loader.quantize(d_gate_up, axis=1)
        if self._rearranged:
            both_G2IH = self._padded_weights(slice(None), d_gate_up.shape[1])
        else:
            both_G2IH = self.weights.both(self.loader.scratch)
        dx_RH = project_on_device(d_gate_up, both_G2IH.transpose(1, 2), self._runs, self.loader)
        return sum_over_experts(dx_RH, self.rows).to(self.x_TH.dtype)
