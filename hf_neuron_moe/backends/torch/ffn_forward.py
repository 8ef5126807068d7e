"""Forward of one gated feed-forward network ``y = (silu(x Wg^T) * x Wu^T) Wd^T`` over tiles.

Legend: R rows, H hidden, I intermediate; a trailing pair names the axes (``gate_IH`` is ``[I, H]``).

Where values are rounded (to bf16 unless the precision is fp32), after fp32 accumulation of every matmul:

* bf16: gate and up pre-activations are rounded, the activation reads the rounded ones (so a backward from the
  checkpoints sees what the forward saw); ``silu(gate) * up [* scale]`` is rounded once.
* mxfp8: the activation reads the fp32 accumulators, ``silu(gate) * up [* scale]`` is rounded once; both operands of
  every matmul are quantized along its contraction axis (nki-library 2.30 ``mlp_fwd_mxfp8``).

The checkpoints ``gate_act`` and ``intermediate`` (mxfp8) are made from the rounded gate and up, as
``recompute_gate_act`` and ``recompute_intermediate`` of ``mlp_bwd_mxfp8`` make them. ``mlp_fwd_mxfp8`` itself would
write those of its fp32 sums, which cannot be made again: gradients would then depend on what was saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import FFNWeights as FFNWeights
from hf_neuron_moe.backends.torch.cpu.matmul import matmul_into
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.saved import SavedRows, put_tile
from hf_neuron_moe.backends.torch.tiles import Loader, Projections, Span, column_spans, first_columns, row_spans


@dataclass(frozen=True)
class Checkpoints:
    """Activations saved for the backward, each ``[R, I]`` or None."""

    gate: SavedRows | None = None
    up: SavedRows | None = None  # pre-activation as `gate`, perhaps only its first columns
    gate_act: Tensor | None = None  # ``silu(gate)`` of the rounded gate, rounded itself (mxfp8 only)
    intermediate: Tensor | None = None  # ``gate_act * up``, likewise
    up_cut: int | None = field(default=None, kw_only=True)  # columns of up that are multiplied first; None for all

    def rows(self, start: int, end: int) -> Checkpoints:
        """Return views of the rows ``start..end``."""
        gate, up = (
            part[start:end] if isinstance(part, Tensor) else None if part is None else part.rows(start, end)
            for part in (self.gate, self.up)
        )
        others = (None if part is None else part[start:end] for part in (self.gate_act, self.intermediate))
        return Checkpoints(gate, up, *others, up_cut=self.up_cut)


@dataclass(frozen=True)
class RowSource:
    """Rows of a ``[T, H]`` tensor, optionally gathered through an index ``[R]``."""

    values: Tensor
    index: Tensor | None = None

    def rows(self, start: int, end: int) -> Self:
        """Return the source of the rows ``start..end``."""
        if self.index is None:
            return replace(self, values=self.values[start:end])
        return replace(self, index=self.index[start:end])

    def take(self, span: Span) -> Tensor:
        """Return the rows of `span`."""
        return self.values[span.part] if self.index is None else self.values.index_select(0, self.index[span.part])

    def __len__(self) -> int:
        return len(self.values) if self.index is None else len(self.index)


class Epilogue(Protocol):
    """What the fp32 sums of one tile become other than ``silu(gate) * up``: biases, clamps, activations and roundings.

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
    gating: Gating = SILU,
) -> None:
    """Write ``(silu(x Wg^T) * x Wu^T * scale) Wd^T`` of the rows `x` into `out_RH` (fp32).

    What `save` has buffers for is saved. `scale_R1` is a fp32 factor on the intermediate (the expert's affinity).
    `block_size` is the rows per MoE block, None for a dense MLP. An `epilogue` replaces ``silu(gate) * up * scale`` and
    its roundings; `scale_R1` is then not used.
    """
    compute = loader.compute
    hidden, inner = weights.down_HI.shape
    needs_gate = not gating.skip_gate if epilogue is None else epilogue.needs_gate
    gate_IH, added = weights.gate_IH if needs_gate else None, added_to_sums(weights.up_IH, weights[3:5], gating)
    for number, columns in enumerate(column_spans(inner, compute)):
        projections = Projections(gate_IH, weights.up_IH, loader, columns, save.up_cut, added=added)
        down_HI = loader.load("down", weights.down_HI[:, columns.part], (loader.width(hidden), columns.size), mx_axis=1)
        for rows in row_spans(len(x), loader, block_size, hidden, inner):
            x_RH = projections.operand(x.take(rows), rows)
            sums_RI = loader.scratch.get("gate_out", (rows.size, columns.length), compute.operand)
            if needs_gate:
                sums_RI = projections.gate(x_RH, sums_RI, rows.length)
            gate_RI = sums_RI[: rows.length]
            up_RI = loader.scratch.get("up_out", (rows.length, columns.length), compute.operand)
            projections.up_into(up_RI, x_RH)
            if epilogue is None:
                scale = None if scale_R1 is None else scale_R1[rows.part]
                inter_RI = _activate(sums_RI, up_RI, loader, save, rows, columns, scale, gating)
            else:
                epilogue.pre_activations_(gate_RI, up_RI, rows, columns)
                _keep(save, gate_RI, up_RI, rows, columns)
                inter_RI = epilogue.intermediate(gate_RI, up_RI, rows, columns)
                if len(inter_RI) < rows.size:
                    padded_RI = loader.scratch.get("inter_rows", (rows.size, inter_RI.shape[1]), inter_RI.dtype)
                    padded_RI[: rows.length].copy_(inter_RI)
                    inter_RI = padded_RI
            matmul_into(out_RH[rows.part], inter_RI, down_HI[:hidden, : inter_RI.shape[1]].t(), accumulate=number > 0)


Added = tuple[Tensor | None, Tensor | None]
"""What the sums of gate and up get before they are rounded, fp32 ``[I]`` or of groups ``[G, I]``."""


def added_to_sums(up: Tensor, biases: Added, gating: Gating) -> Added:
    """Return biases and up's offset; `up` is the projection ``[I, H]``, or of groups ``[G, I, H]``."""
    gate_I, up_I = (None if bias_I is None else bias_I.float() for bias_I in biases)
    if gating.up_offset:
        up_I = up.new_zeros(up.shape[:-1], dtype=torch.float32) if up_I is None else up_I
        up_I = up_I + gating.up_offset
    return gate_I, up_I


def project_gate_up(
    x: RowSource,
    weights: FFNWeights,
    loader: Loader,
    gate_RI: Tensor | None,
    up_RI: Tensor | None,
    gating: Gating = SILU,
) -> None:
    """Make gate and up pre-activations again as :func:`ffn_forward` made them for its checkpoints; None was saved."""
    (inner, hidden), added = weights.up_IH.shape, added_to_sums(weights.up_IH, weights[3:5], gating)
    for columns in column_spans(inner, loader.compute):
        gate_IH, wanted = None if gate_RI is None else weights.gate_IH, 0 if up_RI is not None else columns.length
        projections = Projections(gate_IH, weights.up_IH, loader, columns, up_from=wanted, added=added)
        for rows in row_spans(len(x), loader, None, hidden, inner):
            x_RH, part = projections.operand(x.take(rows), rows), (rows.part, columns.part)
            sums = loader.scratch.get("gate_out", (rows.size, columns.length), loader.compute.operand)
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
    gating: Gating,
) -> Tensor:
    """Save what is wanted and return the rounded intermediate as the down projection's operand.

    `sums_RI`, the gate, and what is returned have ``rows.size`` rows; those after the real ones are not used.
    """
    compute = loader.compute
    gate_RI = sums_RI[: rows.length]
    gate_saved, up_saved = _keep(save, gate_RI, up_RI, rows, columns)
    if not compute.mx and compute.rounded != torch.float32:
        stored = 0 if up_saved is None else up_saved.shape[1]
        for values, kept in ((gate_RI, gate_saved), (up_RI[:, :stored], up_saved), (up_RI[:, stored:], None)):
            # A checkpoint that already holds the rounded values saves a pass.
            loader.round_(values) if kept is None else values.copy_(kept)
    save_products(gate_RI, up_RI, loader, save, (rows.part, columns.part), gating)
    inter_RI = gating.intermediate_(gate_RI, up_RI)
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
    """Save this tile's pre-activations where they are wanted; return those parts of the checkpoints."""
    gate = up = None
    if save.gate is not None:
        gate = put_tile(save.gate, rows.part, columns.part, gate_RI)
    if save.up is not None:
        stored = first_columns(columns, save.up.shape[1])
        up = put_tile(save.up, rows.part, slice(columns.start, columns.start + stored), up_RI[:, :stored])
    return gate, up


def save_products(
    gate32: Tensor, up32: Tensor, loader: Loader, save: Checkpoints, part: slice | tuple[slice, slice], gating: Gating
) -> None:
    """Save ``act(gate)`` and ``act(gate) * up`` of the rounded gate and up in `part` of `save`, where wanted."""
    if save.gate_act is None and save.intermediate is None:
        return
    shape, scratch = tuple(gate32.shape), loader.scratch
    gate = loader.round_(scratch.get("saved_gate", shape, torch.float32).copy_(gate32))
    act = loader.round_(gating.activation(gate, out=scratch.get("saved_act", shape, torch.float32)))
    if save.gate_act is not None:
        save.gate_act[part].copy_(act)
    if save.intermediate is not None:
        save.intermediate[part].copy_(act.mul_(gating.up_value(loader.round_(gate.copy_(up32)))))
