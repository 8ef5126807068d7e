"""A gated network whose weights are MX codes: forward with exactly these codes, backward exact for their values.

Legend: R rows, H hidden, I intermediate, T tokens.

Forward: rows are rounded to MXFP8 in the groups that the weights' codes were made in, the weights are taken as they
are, and everything else is as in the mxfp8 path of
:func:`~hf_neuron_moe.backends.torch.ffn_forward.ffn_forward`: fp32 sums, the activation reads them, the product is
rounded to bf16 once and then to MXFP8. An expert's affinity multiplies that product, as in the MXFP8 training pair;
with experts stored as words it multiplies the down projection's sums, as in ``moe_cte``'s MX implementations.

Backward: there is one orientation of the codes, so nothing could be quantised along the other axis without changing the
weights. The gradient with respect to the input is that of the bf16 kernels with the codes' values as weights: rounding
activations counts as the identity, and no weight gradient exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.backends.mx_weights import WORDS, MXExpertStack, column_tiles
from hf_neuron_moe.backends.torch.compute import Compute, call_scratch
from hf_neuron_moe.backends.torch.experts import Emit
from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_
from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward, project_gate_up
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.saved import FP8Rows, Kept
from hf_neuron_moe.backends.torch.tiles import Loader, Span

_FORWARD = Compute(torch.float32, torch.float32, mx=False, row_chunk=512)
"""Operands arrive rounded and quantised, so the matmuls are plain fp32."""

_BACKWARD = Compute(torch.float32, torch.bfloat16, mx=False, row_chunk=1024)

Runs = Sequence[tuple[int | None, int, int]]
"""``(expert, first row, end row)``; one run without an expert for a dense MLP."""


@dataclass(frozen=True)
class _QuantizedRows(RowSource):
    """Rows rounded to MXFP8 along H when they are taken."""

    loader: Loader | None = None
    scheme: str = ""

    def take(self, span: Span) -> Tensor:
        """Return the rows of `span` in fp32."""
        assert self.loader is not None
        rows_RH = super().take(span)
        scratch = self.loader.scratch
        values = scratch.get("frozen_x", tuple(rows_RH.shape), torch.float32).copy_(rows_RH)
        return fake_quantize_(values, 1, scratch.get("exponents", (values.numel(),), torch.int32), scheme=self.scheme)


@dataclass(frozen=True)
class _Epilogue:
    """``silu(gate) * up [* scale]``, rounded to bf16 and quantised along I, which zeros extend to `width`."""

    loader: Loader
    scheme: str
    width: int
    scale_R1: Tensor | None
    needs_gate: bool = True

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        """Leave the sums as they are: the activation reads them before they are rounded."""

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the down projection's operand."""
        product = F.silu(gate_RI, inplace=True).mul_(up_RI)
        if self.scale_R1 is not None:
            product.mul_(self.scale_R1[rows.start : rows.stop])
        scratch, real = self.loader.scratch, columns.length
        rounded = scratch.get("rounding", tuple(product.shape), torch.bfloat16).copy_(product)
        whole = scratch.get("frozen_inter", (len(product), self.width), torch.float32)
        whole[:, :real].copy_(rounded)
        whole[:, real:].zero_()
        exponents = scratch.get("exponents", (whole.numel(),), torch.int32)
        return fake_quantize_(whole, 1, exponents, scheme=self.scheme)[:, :real]


def quantized_forward(
    x: RowSource, runs: Runs, stack: MXExpertStack, emit: Emit, *, save: Checkpoints, scale_R: Tensor | None
) -> None:
    """Compute every run and hand its fp32 output rows to `emit`.

    Args:
        x: input rows, bf16 (or fp32 holding such values).
        runs: which rows belong to which expert.
        stack: the weights.
        emit: takes ``(first row, end row, values [R, H])``.
        save: buffers for the gate and up pre-activations ``[R, I]``, either or none.
        scale_R: fp32 factor on every row's intermediate, or with words on its output; None is no factor.
    """
    loader = Loader(_FORWARD, call_scratch(x.values.device))
    for expert, start, end in runs:
        weights, shape = stack.expert(expert), (end - start, stack.hidden)
        out_RH = loader.scratch.get("expert_out", shape, torch.float32)
        scale_R1 = None if scale_R is None else scale_R[start:end, None]
        rows = x.rows(start, end)
        rows = _QuantizedRows(rows.values, rows.index, loader, weights.gate_up.layout.scheme)
        afterwards = weights.down.layout.arrangement == WORDS
        for columns in column_tiles(weights.down):
            first = columns.start == 0
            part_RH = out_RH if first else loader.scratch.get("frozen_out", shape, torch.float32)
            inside_R1 = None if afterwards else scale_R1
            epilogue = _Epilogue(loader, weights.down.layout.scheme, columns.stop - columns.start, inside_R1)
            tile, kept = _tile(weights, columns, loader), _part(save, start, end, columns)
            ffn_forward(rows, tile, loader, part_RH, save=kept, epilogue=epilogue)
            if not first:
                out_RH.add_(part_RH)
        if afterwards and scale_R1 is not None:
            out_RH.mul_(scale_R1)
        emit(start, end, out_RH)


def quantized_backward(
    dout: RowSource,
    x: RowSource | None,
    runs: Runs,
    stack: MXExpertStack,
    *,
    saved: Checkpoints,
    scale_R: Tensor | None,
    d_x: Emit | None,
    d_scale_R: Tensor | None,
    gating: Gating | None = None,
) -> None:
    """Compute the gradients of input rows and row factors; there are no others.

    `x` is None where gate and up were saved; a missing one is made again. `d_x` takes each run's fp32 rows of dX,
    `d_scale_R` is fp32 ``[R]`` to fill; both are None where not wanted. Other arguments are the forward's.
    """
    scratch = call_scratch(dout.values.device)
    loader, forward = Loader(_BACKWARD, scratch, rounded_sources=True), Loader(_FORWARD, scratch)
    for expert, start, end in runs:
        weights, shape = stack.expert(expert), (end - start, stack.hidden)
        total_RH = None if d_x is None else loader.scratch.get("expert_out", shape, torch.float32)
        if d_scale_R is not None:
            d_scale_R[start:end].zero_()
        for columns in column_tiles(weights.down):
            first = columns.start == 0
            part_RH = total_RH if first or total_RH is None else loader.scratch.get("frozen_out", shape, torch.float32)
            part_R = None if d_scale_R is None else loader.scratch.get("frozen_scale", (end - start,), torch.float32)
            tile, kept = _tile(weights, columns, loader), _part(saved, start, end, columns)
            if x is not None:
                rows = x.rows(start, end)
                scheme = weights.gate_up.layout.scheme
                kept = _completed(kept, _QuantizedRows(rows.values, rows.index, forward, scheme), tile, forward)
            FFNBackward(
                dout.rows(start, end),
                dout.rows(start, end),  # of the forward's input only the number of rows is read
                tile,
                loader,
                FFNGrads(None, None, None, part_RH, part_R),
                kept,
                scale_R1=None if scale_R is None else scale_R[start:end, None],
                gating=gating,
            ).run()
            if total_RH is not None and part_RH is not None and not first:
                total_RH.add_(part_RH)
            if d_scale_R is not None and part_R is not None:
                d_scale_R[start:end].add_(part_R)
        if d_x is not None and total_RH is not None:
            d_x(start, end, total_RH)


def _tile(weights: MXExpertStack, columns: slice, loader: Loader) -> FFNWeights:
    """The values of one part of the intermediate axis, fp32, without zeros that the arrangement added."""
    hidden, inner = weights.hidden, weights.inner
    width, size = columns.stop - columns.start, min(columns.stop, inner) - columns.start

    def buffer(name: str, *shape: int) -> Tensor:
        return loader.scratch.get(name, shape, torch.float32)

    every, gate = slice(0, hidden), slice(columns.start, columns.start + size)
    up = slice(inner + gate.start, inner + gate.stop)
    return FFNWeights(
        weights.gate_up.values(gate, every, buffer("frozen_gate", size, hidden)),
        weights.gate_up.values(up, every, buffer("frozen_up", size, hidden)),
        weights.down.values(every, columns, buffer("frozen_down", hidden, width))[:, :size],
    )


def _part(checkpoints: Checkpoints, start: int, end: int, columns: slice) -> Checkpoints:
    def part(kept: Kept | None) -> Kept | None:
        if isinstance(kept, FP8Rows):
            return kept.rows(start, end).columns(columns)
        return kept[start:end, columns] if isinstance(kept, Tensor) else None

    return Checkpoints(part(checkpoints.gate), part(checkpoints.up))


def _completed(kept: Checkpoints, x: RowSource, tile: FFNWeights, forward: Loader) -> Checkpoints:
    """Make the missing pre-activations of a part of the intermediate axis again, rounded to bf16 as kept ones are."""
    missing = [
        x.values.new_empty((len(x), len(tile.up_IH)), dtype=torch.bfloat16) if part is None else None
        for part in (kept.gate, kept.up)
    ]
    project_gate_up(x, tile, forward, *missing)
    gate, up = (part if again is None else again for part, again in zip((kept.gate, kept.up), missing, strict=True))
    return Checkpoints(gate, up)
