"""Backward of one gated feed-forward network over tiles.

Legend: R rows, H hidden, I intermediate. With ``d_int = dY Wd`` (fp32, never rounded by itself), scale ``a`` per row,
``h = silu(g) * u``:

    d_scale = sum_I d_int * h            d_int <- d_int * a
    d_gate  = d_int * u * silu'(g)       d_up  = d_int * silu(g)
    dX      = d_gate Wg + d_up Wu        dWg = d_gate^T X    dWu = d_up^T X    dWd = dY^T (h * a)

bf16 rounds ``h * a``, ``d_gate`` and ``d_up`` once before they enter a matmul (nki-library ``blockwise_mm_bwd``,
AFFINITY_ON_I). mxfp8 rounds as ``mlp_bwd_mxfp8`` does: ``silu'(g)``, ``silu'(g) * u``, ``d_gate``, ``d_up``, a
recomputed ``silu(g)`` and a recomputed ``h``, each to bf16; operands are quantized along each matmul's own contraction
axis: H for ``d_int``, 2I (gate and up as one axis, as releases from 2.31 on; I without a gate) for dX, rows for
weights.

Other activations and clamp masks come with a :class:`Gating`; a mask multiplies d_gate or d_up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.cpu.matmul import matmul, matmul_into, matmul_over_rows_into
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, added_to_sums
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.saved import take_tile
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.backends.torch.tiles import (
    Loader,
    Projections,
    Span,
    column_spans,
    first_columns,
    lies_by_column,
    row_spans,
)


@dataclass(frozen=True)
class FFNGrads:
    """Where results go; None means not wanted and not computed."""

    weights: FFNWeights | None  # views with any strides; the other results are fp32
    x_RH: Tensor | None
    scale_R: Tensor | None = None
    rounded: torch.dtype = torch.float32  # what the fp32 sums of weight gradients are rounded to before they are stored
    add: bool = False  # add to the weight gradients instead of overwriting them
    bias_2I: Tensor | None = None  # row sums of d_gate, then of d_up


@dataclass(frozen=True)
class FFNBackward:
    """The backward of :func:`~hf_neuron_moe.backends.torch.ffn_forward.ffn_forward`; :meth:`run` fills `grads`."""

    dout: RowSource  # the R rows of dL/dY
    x: RowSource  # the R input rows of the forward
    weights: FFNWeights
    loader: Loader
    grads: FFNGrads
    saved: Checkpoints  # gate and up, or the last columns of up, are multiplied again where they are missing
    scale_R1: Tensor | None = None  # the factor the forward applied to the intermediate
    block_size: int | None = None  # rows per MoE block, or None for a dense MLP
    recompute_loader: Loader | None = None  # multiplies what was not saved, in the forward's MX groups if they differ
    gating: Gating = SILU
    """Activation and clamp masks; mxfp8 has no masks."""

    def run(self) -> None:
        """Write all gradients that are wanted."""
        hidden, inner = self.weights.down_HI.shape
        spans = row_spans(len(self.x), self.loader, self.block_size, hidden, inner)
        if self.grads.scale_R is not None:
            self.grads.scale_R.zero_()
        for number, columns in enumerate(column_spans(inner, self.loader.compute)):
            tile = _Tile(self, columns, first=number == 0)
            for index, rows in enumerate(spans):
                tile.backward(rows, first=index == 0)
            tile.store_weight_grads()


@dataclass(frozen=True)
class _InnerGrads:
    """Gradients of gate and up and the scaled intermediate of some rows, operands of the last products: ``[R, I]``.

    They have as many rows as the tile; those after the real ones are zero.
    """

    gate: Tensor
    up: Tensor
    inter: Tensor
    joined: Tensor | None = None  # the axis of dX's sum, in MX only: ``[R, 2I]``, gate then up; or up alone


class _Tile:
    """One span of the intermediate axis: its weights as operands, its weight-gradient sums in fp32."""

    def __init__(self, task: FFNBackward, columns: Span, *, first: bool) -> None:
        loader, weights, saved = task.loader, task.weights, task.saved
        self.task, self.columns, self.first = task, columns, first
        self.mx = loader.compute.mx
        self.gating = task.gating
        self.hidden = weights.down_HI.shape[0]
        self.padded_hidden = loader.width(self.hidden)
        self.part, shape = columns.part, (columns.size, self.padded_hidden)
        self.stored = 0 if saved.up is None else first_columns(columns, saved.up.shape[1])
        self.recompute = task.recompute_loader or loader
        self.again: Projections | None = None
        if (saved.gate is None and not self.gating.skip_gate) or self.stored < columns.length:
            gate_IH = weights.gate_IH if saved.gate is None and not self.gating.skip_gate else None
            added = added_to_sums(weights.up_IH, weights[3:5], task.gating)
            self.again = Projections(gate_IH, weights.up_IH, self.recompute, columns, saved.up_cut, self.stored, added)
        self.down_HI = loader.load("down", weights.down_HI[:, self.part], shape[::-1], mx_axis=0)
        if task.grads.x_RH is not None:
            self.gate_IH, self.up_IH = self._input_grad_operands(shape)
        self.direct = False
        self.sums = None if task.grads.weights is None else self._weight_sums(task.grads.weights)

    def _input_grad_operands(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Gate and up as right operands of dX; in MX halves of one buffer, quantized along 2I."""
        loader, size = self.task.loader, shape[0]
        gate_IH, up_IH = self.task.weights.gate_IH[self.part], self.task.weights.up_IH[self.part]
        if self.gating.skip_gate:
            up_operand = loader.load("up_dx", up_IH, shape, mx_axis=0)
            return up_operand, up_operand
        if not self.mx:
            return loader.load("gate_dx", gate_IH, shape), loader.load("up_dx", up_IH, shape)
        both = loader.scratch.get("gate_up", (2 * size, shape[1]), loader.compute.operand)
        loader.fill(both[:size], gate_IH)
        loader.fill(both[size:], up_IH)
        loader.quantize(both, axis=0)
        return both[:size], both[size:]

    def _weight_sums(self, wanted: FFNWeights) -> FFNWeights:
        """Where the fp32 sums of the weight gradients are made.

        In their own memory (`direct`) if that is fp32 and dense and nothing is added or rounded, else in some that runs
        as theirs.
        """
        grads = self.task.grads
        if not self.mx and not grads.add and grads.rounded == torch.float32:
            self.direct = all(part.dtype == torch.float32 and 1 in part.stride() for part in wanted[:3])
        if self.direct:
            return FFNWeights(wanted.gate_IH[self.part], wanted.up_IH[self.part], wanted.down_HI[:, self.part])

        def scratch(name: str, target: Tensor, *shape: int) -> Tensor:
            by_column = lies_by_column(target)
            buffer = self.task.loader.scratch.get(name, shape[::-1] if by_column else shape, torch.float32)
            return buffer.t() if by_column else buffer

        return FFNWeights(
            scratch("gate_sum", wanted.up_IH, self.columns.size, self.hidden),
            scratch("up_sum", wanted.up_IH, self.columns.size, self.hidden),
            scratch("down_sum", wanted.down_HI, self.hidden, self.columns.length),
        )

    def backward(self, rows: Span, *, first: bool) -> None:
        """Add the rows' part to the sums and to dX; `first` rows overwrite the sums instead."""
        task, loader = self.task, self.task.loader
        dout, x, shape_RH = task.dout.take(rows), task.x.take(rows), (rows.size, self.padded_hidden)
        dout_RH = loader.load("dout", dout, shape_RH, mx_axis=1)
        d_int = loader.scratch.get("d_int", (rows.size, self.columns.length), loader.compute.operand)
        d_int = matmul(dout_RH, self.down_HI[:, : self.columns.length], d_int, rows.length)[: rows.length]
        x_RH = None if self.again is None else self.again.operand(x, rows)
        gate, up = self._pre_activations(rows, x_RH)
        inner = self._elementwise(rows, d_int, gate, up)
        if task.grads.bias_2I is not None:
            for bias_I, part in zip(task.grads.bias_2I.chunk(2), (inner.gate, inner.up), strict=True):
                sums = part[: rows.length, : self.columns.length].sum(0, dtype=torch.float32)
                bias_I[self.part].copy_(sums) if first else bias_I[self.part].add_(sums)
        if self.sums is not None:
            x_op = x_RH if self.recompute is loader and not self.mx else None
            if x_op is None:
                x_op = loader.load("x", x, shape_RH, lane=rows.lane)[:, : self.hidden]
            dout_op, lefts = dout_RH, [inner.gate, inner.up]
            if self.mx:
                dout_op = loader.load("dout", dout, shape_RH, lane=rows.lane)[:, : self.hidden]
                lefts = [
                    loader.quantize_rows(loader.scratch.get(name, tuple(part.shape), part.dtype).copy_(part), rows.lane)
                    for name, part in (("d_gate_rows", inner.gate), ("d_up_rows", inner.up))
                ]
                loader.quantize_rows(inner.inter, rows.lane)
            products = [(sums, left[:, : len(sums)], x_op) for sums, left in zip(self.sums[:2], lefts, strict=True)]
            products.append((self.sums.down_HI, dout_op, inner.inter[:, : self.columns.length]))
            for sums, left, right in products[1:] if self.gating.skip_gate else products:
                matmul_over_rows_into(sums, left, right, rows.length, accumulate=not first)
        if task.grads.x_RH is not None:
            self._add_input_grad(task.grads.x_RH[rows.part], inner)

    def _add_input_grad(self, out_RH: Tensor, inner: _InnerGrads) -> None:
        """Multiply with the weights, in MX after quantizing along 2I; the first tile overwrites `out_RH`."""
        if inner.joined is not None:
            self.task.loader.quantize(inner.joined, axis=1)
        accumulate = not self.first
        if not self.gating.skip_gate:
            matmul_into(out_RH, inner.gate, self.gate_IH[:, : self.hidden], accumulate=accumulate)
            accumulate = True
        matmul_into(out_RH, inner.up, self.up_IH[:, : self.hidden], accumulate=accumulate)

    def _pre_activations(self, rows: Span, x_RH: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return gate and up of these rows in fp32, multiplying `x_RH` again for what was not saved.

        The gate is contiguous, however it was come by: where a vectorized loop ends decides about the last bit of an
        exponential.
        """
        saved, columns, scratch, stored = self.task.saved, self.columns, self.task.loader.scratch, self.stored
        shape = (rows.length, columns.length)
        if self.gating.skip_gate:
            gate = scratch.get("gate_fp32", shape, torch.float32)  # never read
        elif saved.gate is None:
            assert self.again is not None and x_RH is not None
            buffer = scratch.get("gate_fp32", (rows.size, columns.length), torch.float32)
            gate = self.recompute.round_(self.again.gate(x_RH, buffer, rows.length)[: rows.length])
        else:
            gate = take_tile(saved.gate, rows.part, self.part)
            if gate.dtype != torch.float32 or not gate.is_contiguous():
                gate = scratch.get("gate_fp32", shape, torch.float32).copy_(gate)
        saved_up = None
        if saved.up is not None:
            saved_up = take_tile(saved.up, rows.part, slice(columns.start, columns.start + stored))
            if saved_up.dtype == torch.float32 and stored == columns.length:
                return gate, saved_up
        up = scratch.get("up_fp32", shape, torch.float32)
        if saved_up is not None:
            up[:, :stored].copy_(saved_up)
        if stored < columns.length:
            assert self.again is not None and x_RH is not None
            self.again.up_into(up, x_RH)
            self.recompute.round_(up[:, stored:])
        return gate, up

    def _elementwise(self, rows: Span, d_int: Tensor, gate: Tensor, up: Tensor) -> _InnerGrads:
        """Return the gradients of gate and up and the intermediate as operands; add to the scale's gradient."""
        task, loader, size = self.task, self.task.loader, self.columns.size
        scratch, shape = loader.scratch, tuple(gate.shape)
        act = scratch.get("act", shape, torch.float32)
        # One buffer: one pass rounds all three.
        results = scratch.get("d_gate_up_inter", (3, rows.size, shape[1]), torch.float32)
        results[:, rows.length :].zero_()
        part, saved = (rows.part, self.part), task.saved
        SwiGLUGrad(self.gating, self.mx, loader.round_, on_host=d_int.is_cpu).fill(
            results[:, : rows.length],
            d_int,
            gate,
            up,
            act,
            saved_act=None if saved.gate_act is None else saved.gate_act[part],
            saved_product=None if saved.intermediate is None else saved.intermediate[part],
            scale_R1=None if task.scale_R1 is None else task.scale_R1[rows.part],
            d_scale_R=None if task.grads.scale_R is None else task.grads.scale_R[rows.part],
        )
        if not self.mx:
            return _InnerGrads(*loader.round_(results))
        d_gate, d_up, product = results[:, : rows.length]
        d_gate_up = scratch.get("d_gate_up", (rows.size, 2 * size), torch.float32)
        inter = scratch.get("inter", (rows.size, size), torch.float32)
        joined = d_gate_up[:, size:] if self.gating.skip_gate else d_gate_up
        operands = _InnerGrads(d_gate_up[:, :size], d_gate_up[:, size:], inter, joined)
        for target, values in ((inter, product), (operands.up, d_up), (operands.gate, d_gate)):
            loader.fill(target, values)
        return operands

    def store_weight_grads(self) -> None:
        """Round the finished fp32 sums and copy them to where the caller wants them."""
        grads, sums = self.task.grads, self.sums
        if grads.weights is None or sums is None:
            return
        if self.gating.skip_gate:
            sums.gate_IH.zero_()
        if self.direct:
            return
        gate_IH, up_IH, down_HI, length = *grads.weights[:3], self.columns.length
        pairs = (
            (gate_IH[self.part], sums.gate_IH[:length]),
            (up_IH[self.part], sums.up_IH[:length]),
            (down_HI[:, self.part], sums.down_HI),
        )
        for target, total in pairs if len(gate_IH) else pairs[1:]:
            if grads.add:
                target.add_(total.to(grads.rounded))
            else:  # the copy itself rounds where it can
                target.copy_(total if target.dtype == grads.rounded else total.to(grads.rounded))
