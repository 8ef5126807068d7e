"""Backward of one gated feed-forward network over tiles.

Legend: R rows, H hidden, I intermediate. With ``d_int = dY Wd`` (fp32, never rounded by itself), scale ``a`` per row,
``h = silu(g) * u``:

    d_scale = sum_I d_int * h            d_int <- d_int * a
    d_gate  = d_int * u * silu'(g)       d_up  = d_int * silu(g)
    dX      = d_gate Wg + d_up Wu        dWg = d_gate^T X    dWu = d_up^T X    dWd = dY^T (h * a)

bf16 rounds ``h * a``, ``d_gate`` and ``d_up`` once before they enter a matmul (nki-library ``blockwise_mm_bwd``,
AFFINITY_ON_I). mxfp8 rounds as ``mlp_bwd_mxfp8`` does: ``silu'(g)``, ``silu'(g) * u``, ``d_gate``, ``d_up``, a
recomputed ``silu(g)`` and a recomputed ``h``, each to bf16; operands are quantized along each matmul's own contraction
axis: H for ``d_int``, 2I (gate and up as one axis, releases 2.31 and later) or I (2.30) for dX, rows for weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, up_split
from hf_neuron_moe.backends.torch.tiling import Loader, Span, column_spans, matmul_into, padded, row_spans


@dataclass(frozen=True)
class FFNGrads:
    """Where results go; None means not wanted and not computed.

    ``gate_IH``, ``up_IH``, ``down_HI``: weight gradients, views with any strides. ``x_RH``: fp32. ``scale_R``: fp32.
    ``rounded``: dtype the fp32 weight-gradient sums are rounded to before they are stored.
    """

    gate_IH: Tensor | None
    up_IH: Tensor | None
    down_HI: Tensor | None
    x_RH: Tensor | None
    scale_R: Tensor | None = None
    rounded: torch.dtype = torch.float32

    @property
    def wants_weights(self) -> bool:
        return self.gate_IH is not None


@dataclass
class _Tile:
    """One span of the intermediate axis with its operands: weights in, fp32 weight-gradient sums out."""

    hidden: int
    columns: Span
    kept: int
    down_HI: Tensor
    gate_up_2IH: Tensor | None
    up_tail_IH: Tensor | None
    gate_up_sum_2IH: Tensor | None
    down_sum_HI: Tensor | None


def ffn_backward(
    dout: RowSource,
    x: RowSource,
    weights: FFNWeights,
    loader: Loader,
    grads: FFNGrads,
    *,
    saved: Checkpoints,
    scale_R1: Tensor | None = None,
    block_size: int | None = None,
    fused_phase2: bool = True,
) -> None:
    """Write the gradients of :func:`~hf_neuron_moe.backends.torch.ffn_forward.ffn_forward` into `grads`.

    Args:
        dout: the R rows of dL/dY.
        x: the R input rows of the forward.
        weights: the projections.
        loader: carries the compute choice and the scratch buffers.
        grads: outputs.
        saved: gate pre-activations and (all or the first columns of) up pre-activations; optionally the others.
        scale_R1: the factor the forward applied to the intermediate.
        block_size: rows per MoE block, or None for a dense MLP.
        fused_phase2: quantize ``[d_gate, d_up]`` along one axis of 2I (True) or each along I (mxfp8 only).
    """
    compute = loader.compute
    spans = row_spans(len(x), compute, block_size)
    if grads.scale_R is not None:
        grads.scale_R.zero_()
    for number, columns in enumerate(column_spans(weights.down_HI.shape[1], compute)):
        tile = _load_tile(weights, loader, grads, columns, saved, fused_phase2)
        for index, rows in enumerate(spans):
            _backward_rows(dout, x, loader, grads, tile, rows, saved, scale_R1, fused_phase2, index > 0, number > 0)
        if grads.wants_weights:
            _store_weight_grads(grads, tile)


def _load_tile(
    weights: FFNWeights, loader: Loader, grads: FFNGrads, columns: Span, saved: Checkpoints, fused_phase2: bool
) -> _Tile:
    compute, scratch = loader.compute, loader.scratch
    hidden = weights.down_HI.shape[0]
    padded_hidden = padded(hidden) if compute.mx else hidden
    part, size, length = slice(columns.start, columns.stop), columns.size, columns.length
    kept = up_split(columns, saved, recompute_up=True)
    gate_up = None
    if grads.x_RH is not None:
        gate_up = scratch.get("gate_up", (2 * size, padded_hidden), compute.operand)
        loader.fill(gate_up[:size], weights.gate_IH[part])
        loader.fill(gate_up[size:], weights.up_IH[part])
        if compute.mx:
            for half in (gate_up,) if fused_phase2 else (gate_up[:size], gate_up[size:]):
                loader.quantize(half, axis=0)
    tail = None
    if kept < length:
        source = weights.up_IH[columns.start + kept : columns.stop]
        tail = loader.load("up_tail", source, (padded(length - kept), padded_hidden), mx_axes=(1,))
    return _Tile(
        hidden=hidden,
        columns=columns,
        kept=kept,
        down_HI=loader.load("down", weights.down_HI[:, part], (padded_hidden, size), mx_axes=(0,)),
        gate_up_2IH=gate_up,
        up_tail_IH=tail,
        gate_up_sum_2IH=scratch.get("gate_up_sum", (2 * size, hidden), torch.float32) if grads.wants_weights else None,
        down_sum_HI=scratch.get("down_sum", (hidden, length), torch.float32) if grads.wants_weights else None,
    )


def _backward_rows(
    dout: RowSource,
    x: RowSource,
    loader: Loader,
    grads: FFNGrads,
    tile: _Tile,
    rows: Span,
    saved: Checkpoints,
    scale_R1: Tensor | None,
    fused_phase2: bool,
    not_first_rows: bool,
    not_first_columns: bool,
) -> None:
    compute, scratch, columns = loader.compute, loader.scratch, tile.columns
    hidden, shape_RH = tile.hidden, (rows.size, tile.down_HI.shape[0])
    dout_rows, x_rows = dout.take(rows), x.take(rows)
    dout_RH = loader.load("dout", dout_rows, shape_RH, mx_axes=(1,))[: rows.length]
    d_int = scratch.get("d_int", (rows.length, columns.length), compute.operand)
    matmul_into(d_int, dout_RH, tile.down_HI[: dout_RH.shape[1], : columns.length], accumulate=False)
    gate, up = _pre_activations(loader, tile, rows, saved, x_rows, shape_RH)
    scale = None if scale_R1 is None else scale_R1[rows.start : rows.stop]
    d_scale = None if grads.scale_R is None else grads.scale_R[rows.start : rows.stop]
    d_gate_up = scratch.get("d_gate_up", (rows.size, 2 * columns.size), compute.operand)
    inter = scratch.get("inter", (rows.size, columns.size), compute.operand)
    stage = _elementwise_mx if compute.mx else _elementwise
    stage(loader, d_int, gate, up, scale, d_scale, saved, rows, columns, d_gate_up, inter)
    if tile.gate_up_sum_2IH is not None and tile.down_sum_HI is not None:
        x_op = loader.load("x", x_rows, shape_RH, mx_axes=(0,))[: rows.length, :hidden]
        dout_op = loader.load("dout", dout_rows, shape_RH, mx_axes=(0,))[: rows.length, :hidden]
        d_left = d_gate_up
        if compute.mx:
            d_left = loader.quantize(scratch.get("d_gate_up_T", tuple(d_gate_up.shape), torch.float32).copy_(d_gate_up), 0)
            loader.quantize(inter, axis=0)
        matmul_into(tile.gate_up_sum_2IH, d_left[: rows.length].t(), x_op, accumulate=not_first_rows)
        matmul_into(
            tile.down_sum_HI, dout_op.t(), inter[: rows.length, : columns.length], accumulate=not_first_rows
        )
    if grads.x_RH is not None and tile.gate_up_2IH is not None:
        if compute.mx:
            size = columns.size
            for half in (d_gate_up,) if fused_phase2 else (d_gate_up[:, :size], d_gate_up[:, size:]):
                loader.quantize(half, axis=1)
        out = grads.x_RH[rows.start : rows.stop]
        matmul_into(out, d_gate_up[: rows.length], tile.gate_up_2IH[:, :hidden], accumulate=not_first_columns)


def _pre_activations(
    loader: Loader, tile: _Tile, rows: Span, saved: Checkpoints, x_rows: Tensor, shape_RH: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return gate and up of this tile in fp32, recomputing the columns of up that were not kept."""
    columns, scratch = tile.columns, loader.scratch
    row_part = slice(rows.start, rows.stop)
    assert saved.gate is not None and saved.up is not None
    gate = scratch.get("gate_fp32", (rows.length, columns.length), torch.float32)
    gate.copy_(saved.gate[row_part, columns.start : columns.stop])
    up = scratch.get("up_fp32", (rows.length, columns.length), torch.float32)
    if tile.kept:
        up[:, : tile.kept].copy_(saved.up[row_part, columns.start : columns.start + tile.kept])
    if tile.up_tail_IH is not None:
        missing = columns.length - tile.kept
        x_RH = loader.load("x", x_rows, shape_RH, mx_axes=(1,))[: rows.length]
        tail = scratch.get("up_tail_out", (rows.length, missing), loader.compute.operand)
        matmul_into(tail, x_RH, tile.up_tail_IH[:missing].t(), accumulate=False)
        if tail.dtype == torch.float32:
            loader.round_(tail)
        up[:, tile.kept :].copy_(tail)
    return gate, up


def _elementwise(
    loader: Loader,
    d_int: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    d_scale: Tensor | None,
    saved: Checkpoints,
    rows: Span,
    columns: Span,
    d_gate_up: Tensor,
    inter: Tensor,
) -> None:
    """fp32 and bf16: fill the operands ``inter`` and ``d_gate_up``, adding this tile's part of `d_scale`."""
    scratch, shape = loader.scratch, tuple(gate.shape)
    d_int32 = d_int if d_int.dtype == torch.float32 else scratch.get("d_int_fp32", shape, torch.float32).copy_(d_int)
    act = torch.ops.aten.silu.out(gate, out=scratch.get("act", shape, torch.float32))
    product = torch.mul(act, up, out=scratch.get("product", shape, torch.float32))
    if d_scale is not None:
        d_scale.add_(torch.linalg.vecdot(d_int32, product))
    if scale is not None:
        product.mul_(scale)
        d_int32.mul_(scale)
    loader.fill(inter, product)
    d_up = act.mul_(d_int32)
    d_gate = torch.ops.aten.silu_backward.grad_input(d_int32.mul_(up), gate, grad_input=product)
    loader.fill(d_gate_up[:, : columns.size], d_gate)
    loader.fill(d_gate_up[:, columns.size :], d_up)


def _elementwise_mx(
    loader: Loader,
    d_int: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    d_scale: Tensor | None,
    saved: Checkpoints,
    rows: Span,
    columns: Span,
    d_gate_up: Tensor,
    inter: Tensor,
) -> None:
    """mxfp8: the same with the rounding points of ``mlp_bwd_mxfp8``; operands are not quantized yet."""
    scratch, shape = loader.scratch, tuple(gate.shape)
    part = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
    act = scratch.get("act", shape, torch.float32)
    if saved.gate_act is not None:
        act.copy_(saved.gate_act[part])
    else:
        loader.round_(torch.ops.aten.silu.out(gate, out=act))
    product = scratch.get("product", shape, torch.float32)
    if saved.intermediate is not None:
        product.copy_(saved.intermediate[part])
    else:
        loader.round_(torch.mul(act, up, out=product))
    if d_scale is not None:
        d_scale.add_(torch.linalg.vecdot(d_int, product))
    if scale is not None:
        product.mul_(scale)
        d_int.mul_(scale)
    loader.fill(inter, product)
    loader.fill(d_gate_up[:, columns.size :], act.mul_(d_int))
    one = torch.ones((), dtype=torch.float32, device=gate.device).expand(shape)
    slope = loader.round_(torch.ops.aten.silu_backward.grad_input(one, gate, grad_input=act))
    d_gate = loader.round_(slope.mul_(up)).mul_(d_int)
    loader.fill(d_gate_up[:, : columns.size], d_gate)


def _store_weight_grads(grads: FFNGrads, tile: _Tile) -> None:
    """Round the finished fp32 sums and copy them to where the caller wants them."""
    columns, sums, down = tile.columns, tile.gate_up_sum_2IH, tile.down_sum_HI
    assert sums is not None and down is not None
    assert grads.gate_IH is not None and grads.up_IH is not None and grads.down_HI is not None
    part = slice(columns.start, columns.stop)
    grads.gate_IH[part].copy_(sums[: columns.length].to(grads.rounded))
    grads.up_IH[part].copy_(sums[columns.size : columns.size + columns.length].to(grads.rounded))
    grads.down_HI[:, part].copy_(down.to(grads.rounded))
