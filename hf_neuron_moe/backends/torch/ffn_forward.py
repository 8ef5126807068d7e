"""Forward of one gated feed-forward network ``y = (silu(x Wg^T) * x Wu^T) Wd^T`` over tiles.

Legend: R rows, H hidden, I intermediate; a trailing pair names the axes (``gate_IH`` is ``[I, H]``).

Where values are rounded (to bf16 unless the precision is fp32), after fp32 accumulation of every matmul:

* bf16: gate and up pre-activations are rounded, the activation reads the rounded ones (so a backward from the
  checkpoints sees what the forward saw); ``silu(gate) * up [* scale]`` is rounded once.
* mxfp8: the activation reads the fp32 accumulators, ``silu(gate) * up [* scale]`` is rounded once; both operands of
  every matmul are quantized along its contraction axis (nki-library 2.30 ``mlp_fwd_mxfp8``).

The checkpoints ``gate_act`` and ``intermediate`` (mxfp8) are made from the rounded gate and up, as
``recompute_gate_act`` and ``recompute_intermediate`` of ``mlp_bwd_mxfp8`` make them. ``mlp_fwd_mxfp8`` itself would
write those of its fp32 sums, which nothing but the sums can bring back: gradients would then depend on what was kept.

Biases, clamps, other activations and their roundings come with an :class:`Epilogue`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.spec import FFNWeights as FFNWeights
from hf_neuron_moe.backends.torch.cpu.matmul import matmul_into
from hf_neuron_moe.backends.torch.saved import Kept, put_tile, take_rows
from hf_neuron_moe.backends.torch.tiles import Loader, Projections, Span, column_spans, first_columns, row_spans
from hf_neuron_moe.formats.padding import padded_size


@dataclass(frozen=True)
class Checkpoints:
    """Activations kept for the backward, each ``[R, I]`` or None; `up` may hold only its first columns.

    ``gate`` and ``up`` are pre-activations; ``gate_act = silu(gate)`` and ``intermediate = gate_act * up`` of the
    rounded ones, each rounded itself, are kept by mxfp8 only.
    """

    gate: Kept | None = None
    up: Kept | None = None
    gate_act: Tensor | None = None
    intermediate: Tensor | None = None

    def rows(self, start: int, end: int) -> Checkpoints:
        """Return views of the rows ``start..end``."""
        gate, up = (None if part is None else take_rows(part, start, end) for part in (self.gate, self.up))
        others = (self.gate_act, self.intermediate)
        return Checkpoints(gate, up, *(None if part is None else part[start:end] for part in others))


@dataclass(frozen=True)
class RowSource:
    """Rows of a ``[T, H]`` tensor, optionally gathered through an index ``[R]``."""

    values: Tensor
    index: Tensor | None = None

    def rows(self, start: int, end: int) -> RowSource:
        """Return the source of the rows ``start..end``."""
        if self.index is None:
            return RowSource(self.values[start:end])
        return RowSource(self.values, self.index[start:end])

    def take(self, span: Span) -> Tensor:
        if self.index is None:
            return self.values[span.start : span.stop]
        return self.values.index_select(0, self.index[span.start : span.stop])

    def __len__(self) -> int:
        return len(self.values) if self.index is None else len(self.index)


class Epilogue(Protocol):
    """What becomes of the fp32 sums of one tile, where that is not ``silu(gate) * up``; rounding is its business.

    With one, the loader's matmul operands are fp32 and not MX-quantized.
    """

    @property
    def needs_gate(self) -> bool:
        """Whether the gate has to be multiplied at all."""

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        """Turn the sums into the pre-activations in place; these are what the checkpoints keep."""

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the down projection's operand, fp32 ``[R, I]``; both arguments may be overwritten."""


def ffn_forward(
    x: RowSource,
    weights: FFNWeights,
    loader: Loader,
    out_RH: Tensor,
    *,
    save: Checkpoints,
    scale_R1: Tensor | None = None,
    block_size: int | None = None,
    epilogue: Epilogue | None = None,
    up_cut: int | None = None,
) -> None:
    """Write ``(silu(x Wg^T) * x Wu^T * scale) Wd^T`` into `out_RH` (fp32) and the checkpoints into `save`.

    Args:
        x: the R input rows.
        weights: the projections.
        loader: carries the :class:`Compute` and the scratch buffers.
        out_RH: fp32 result, overwritten.
        save: buffers to fill; those that are None are not kept.
        scale_R1: fp32 ``[R, 1]`` factor on the intermediate (the expert's affinity), or None.
        block_size: rows per MoE block, or None for a dense MLP.
        epilogue: replaces ``silu(gate) * up * scale`` and its roundings; `scale_R1` is then not used.
        up_cut: see :class:`~hf_neuron_moe.backends.torch.tiles.Projections`.
    """
    compute = loader.compute
    hidden, inner = weights.down_HI.shape
    padded_hidden = padded_size(hidden) if compute.mx else hidden
    needs_gate = epilogue is None or epilogue.needs_gate
    for number, columns in enumerate(column_spans(inner, compute)):
        part = slice(columns.start, columns.stop)
        gate_IH = weights.gate_IH if needs_gate else None
        projections = Projections(gate_IH, weights.up_IH, loader, columns, up_cut)
        down_HI = loader.load("down", weights.down_HI[:, part], (padded_hidden, columns.size), mx_axis=1)
        for rows in row_spans(len(x), loader, block_size, hidden, inner):
            x_RH = projections.operand(x.take(rows), rows, loader)
            sums_RI = loader.scratch.get("gate_out", (rows.size, columns.length), compute.operand)
            if needs_gate:
                sums_RI = projections.gate(x_RH, sums_RI, rows.length)
            gate_RI = sums_RI[: rows.length]
            up_RI = loader.scratch.get("up_out", (rows.length, columns.length), compute.operand)
            projections.up_into(up_RI, x_RH)
            if epilogue is None:
                scale = None if scale_R1 is None else scale_R1[rows.start : rows.stop]
                inter_RI = _activate(sums_RI, up_RI, loader, save, rows, columns, scale)
            else:
                epilogue.pre_activations_(gate_RI, up_RI, rows, columns)
                _keep(save, gate_RI, up_RI, rows, columns)
                inter_RI = epilogue.intermediate(gate_RI, up_RI, rows, columns)
                if len(inter_RI) < rows.size:
                    padded_RI = loader.scratch.get("inter_rows", (rows.size, inter_RI.shape[1]), inter_RI.dtype)
                    padded_RI[: rows.length].copy_(inter_RI)
                    inter_RI = padded_RI
            out = out_RH[rows.start : rows.stop]
            matmul_into(out, inter_RI, down_HI[:hidden, : inter_RI.shape[1]].t(), accumulate=number > 0)


def project_gate_up(
    x: RowSource, weights: FFNWeights, loader: Loader, gate_RI: Tensor | None, up_RI: Tensor | None
) -> None:
    """Make gate and up pre-activations again as :func:`ffn_forward` made them for its checkpoints.

    `gate_RI` and `up_RI` are filled in the dtype that the checkpoint would have; None if it was saved.
    """
    inner, hidden = weights.up_IH.shape
    compute = loader.compute
    for columns in column_spans(inner, compute):
        gate_IH, wanted = None if gate_RI is None else weights.gate_IH, 0 if up_RI is not None else columns.length
        projections = Projections(gate_IH, weights.up_IH, loader, columns, up_from=wanted)
        for rows in row_spans(len(x), loader, None, hidden, inner):
            x_RH = projections.operand(x.take(rows), rows, loader)
            part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
            sums = loader.scratch.get("gate_out", (rows.size, columns.length), compute.operand)
            if gate_RI is not None:
                gate_RI[part].copy_(projections.gate(x_RH, sums, rows.length)[: rows.length])
            if up_RI is not None:
                projections.up_into(sums[: rows.length], x_RH)
                up_RI[part].copy_(sums[: rows.length])


def _activate(
    sums_RI: Tensor,
    up_RI: Tensor,
    loader: Loader,
    save: Checkpoints,
    rows: Span,
    columns: Span,
    scale_R1: Tensor | None,
) -> Tensor:
    """Keep the checkpoints and return the rounded intermediate as the down projection's operand.

    `sums_RI`, the gate, and what is returned have ``rows.size`` rows; those after the real ones are not used.
    """
    compute = loader.compute
    gate_RI = sums_RI[: rows.length]
    gate_kept, up_kept = _keep(save, gate_RI, up_RI, rows, columns)
    if not compute.mx and compute.rounded != torch.float32:
        stored = 0 if up_kept is None else up_kept.shape[1]
        _round_like(loader, gate_RI, gate_kept)
        _round_like(loader, up_RI[:, :stored], up_kept)
        _round_like(loader, up_RI[:, stored:], None)
    if save.gate_act is not None or save.intermediate is not None:
        _keep_products(gate_RI, up_RI, loader, save, rows, columns)
    inter_RI = F.silu(gate_RI, inplace=True).mul_(up_RI)
    if scale_R1 is not None:
        inter_RI.mul_(scale_R1)
    if not compute.mx:
        loader.round_(inter_RI)
        return sums_RI  # the same memory
    buffer = loader.scratch.get("inter", (rows.size, columns.size), torch.float32)
    loader.fill(buffer, inter_RI)
    loader.quantize(buffer[: rows.length], axis=1)
    return buffer


def _keep(
    save: Checkpoints, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span
) -> tuple[Tensor | None, Tensor | None]:
    """Copy this tile's pre-activations into the checkpoints that are wanted; return those parts of them."""
    part = slice(rows.start, rows.stop)
    gate = up = None
    if save.gate is not None:
        gate = put_tile(save.gate, part, slice(columns.start, columns.stop), gate_RI)
    if save.up is not None:
        stored = first_columns(columns, save.up.shape[1])
        up = put_tile(save.up, part, slice(columns.start, columns.start + stored), up_RI[:, :stored])
    return gate, up


def _keep_products(gate32: Tensor, up32: Tensor, loader: Loader, save: Checkpoints, rows: Span, columns: Span) -> None:
    """Keep ``silu(gate)`` and ``silu(gate) * up`` of the rounded gate and up, as a backward would make them again."""
    part, scratch = (slice(rows.start, rows.stop), slice(columns.start, columns.stop)), loader.scratch
    shape = tuple(gate32.shape)
    gate = loader.round_(scratch.get("kept_gate", shape, torch.float32).copy_(gate32))
    act = loader.round_(torch.ops.aten.silu.out(gate, out=scratch.get("kept_act", shape, torch.float32)))
    if save.gate_act is not None:
        save.gate_act[part].copy_(act)
    if save.intermediate is not None:
        save.intermediate[part].copy_(act.mul_(loader.round_(gate.copy_(up32))))


def _round_like(loader: Loader, values: Tensor, kept: Tensor | None) -> None:
    """Round fp32 `values` in place; a checkpoint that already holds the rounded ones saves a pass."""
    if kept is None:
        loader.round_(values)
    else:
        values.copy_(kept)
