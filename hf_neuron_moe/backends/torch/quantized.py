"""A gated network whose weights are MX codes: forward with exactly these codes, backward exact for their values.

Legend: R rows, H hidden, I intermediate, T tokens.

Forward: rows are rounded to MXFP8 in the groups that the weights' codes were made in. The rest is the mxfp8 path of
``ffn_forward``: the activation reads fp32 sums, and the product is rounded to bf16 once and then to MXFP8. An expert's
affinity multiplies that product, as in the MXFP8 training pair; with experts stored as words it multiplies the down
projection's sums, as in ``moe_cte``'s MX implementations.

Backward: the codes have one orientation, so nothing could be quantized along the other axis without changing the
weights. The input's gradient is that of the bf16 kernels with the codes' values as weights: rounding activations counts
as the identity, and no weight gradient exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import WORDS, MXExpertStack, column_tiles
from hf_neuron_moe.backends.spec import Wants
from hf_neuron_moe.backends.torch.compute import Compute, call_scratch
from hf_neuron_moe.backends.torch.experts import Rows
from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward, project_gate_up
from hf_neuron_moe.backends.torch.gating import Gating, gating_of
from hf_neuron_moe.backends.torch.saved import FP8Rows, SavedRows
from hf_neuron_moe.backends.torch.tiles import Loader, Span

_FORWARD = Compute(torch.float32, torch.float32, mx=False, row_chunk=512)
"""Operands arrive rounded and quantized, so the matmuls are plain fp32."""

_BACKWARD = Compute(torch.float32, torch.bfloat16, mx=False, row_chunk=1024)


@dataclass(frozen=True)
class _QuantizedRows(RowSource):
    """Rows rounded to MXFP8 along H when they are taken."""

    loader: Loader = field(kw_only=True)
    scheme: str = field(kw_only=True)

    def take(self, span: Span) -> Tensor:
        """Return the rows of `span` in fp32."""
        rows_RH = super().take(span)
        values = self.loader.scratch.get("quantized_x", tuple(rows_RH.shape), torch.float32).copy_(rows_RH)
        return self.loader.quantize(values, 1, self.scheme)


@dataclass(frozen=True)
class _Epilogue:
    """``act(gate) * up [* scale]``, rounded to bf16 and quantized along I, which zeros extend to `width`."""

    loader: Loader
    scheme: str
    width: int
    scale_R1: Tensor | None
    gating: Gating

    @property
    def needs_gate(self) -> bool:
        """Whether the network has a gate projection."""
        return not self.gating.skip_gate

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        """Leave the sums as they are: the activation reads them before they are rounded."""

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the down projection's operand."""
        product = self.gating.intermediate_(gate_RI, up_RI)
        if self.scale_R1 is not None:
            product.mul_(self.scale_R1[rows.part])
        scratch, real = self.loader.scratch, columns.length
        rounded = scratch.get("rounding", tuple(product.shape), torch.bfloat16).copy_(product)
        whole = scratch.get("quantized_inter", (len(product), self.width), torch.float32)
        whole[:, :real].copy_(rounded)
        whole[:, real:].zero_()
        return self.loader.quantize(whole, 1, self.scheme)[:, :real]


def quantized_forward(x_TH: Tensor, rows: Rows, stack: MXExpertStack, save: Checkpoints) -> Tensor:
    """Return the sum of each token's rows without down biases, fp32 ``[T, H]``, and save gate and up, either or none.

    `x_TH` is bf16, or fp32 holding such values. With words the rows' factors multiply the output.
    """
    loader, sums, gating = Loader(_FORWARD, call_scratch(x_TH.device)), rows.sums(x_TH), gating_of(stack.gate, True)
    x = _QuantizedRows(x_TH, rows.token_R, loader=loader, scheme=stack.gate_up_layout.scheme)
    for expert, start, end in rows.runs:
        weights = stack.expert(None if rows.token_R is None else expert)
        out_RH, scale_R1 = sums.buffer(start, end, loader.scratch), rows.scale(start, end)
        afterwards = weights.down.layout.arrangement == WORDS
        for columns in column_tiles(weights.down):
            first = columns.start == 0
            part_RH = out_RH if first else loader.scratch.get("quantized_out", tuple(out_RH.shape), torch.float32)
            inside_R1 = None if afterwards else scale_R1
            epilogue = _Epilogue(loader, weights.down.layout.scheme, columns.stop - columns.start, inside_R1, gating)
            tile, kept = _tile(weights, columns, loader), _part(save, start, end, columns)
            ffn_forward(x.rows(start, end), tile, loader, part_RH, save=kept, epilogue=epilogue, gating=gating)
            if not first:
                out_RH.add_(part_RH)
        if afterwards and scale_R1 is not None:
            out_RH.mul_(scale_R1)
        sums(start, end, out_RH)
    return sums.total_TH


def quantized_backward(
    dout_TH: Tensor,
    x_TH: Tensor,
    rows: Rows,
    stack: MXExpertStack,
    saved: Checkpoints,
    wants: Wants,
    gating: Gating,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the tokens ``[T, H]`` and of the rows' factors ``[R]``, fp32; there are no others.

    `x_TH` is empty where gate and up were saved; a missing one is made again.
    """
    d_scale_R = torch.zeros_like(rows.scale_R) if wants.routing and rows.scale_R is not None else None
    scratch = call_scratch(dout_TH.device)
    loader, forward = Loader(_BACKWARD, scratch, rounded_sources=True), Loader(_FORWARD, scratch)
    x = _QuantizedRows(x_TH, rows.token_R, loader=forward, scheme=stack.gate_up_layout.scheme)
    sums = rows.sums(dout_TH) if wants.input else None
    for expert, start, end in rows.runs:
        weights = stack.expert(None if rows.token_R is None else expert)
        dout = rows.source(dout_TH).rows(start, end)
        total_RH = None if sums is None else sums.buffer(start, end, scratch)
        for columns in column_tiles(weights.down):
            first = columns.start == 0
            part_RH = total_RH
            if total_RH is not None and not first:
                part_RH = scratch.get("quantized_out", tuple(total_RH.shape), torch.float32)
            part_R = None if d_scale_R is None else scratch.get("quantized_scale", (end - start,), torch.float32)
            tile, kept = _tile(weights, columns, loader), _part(saved, start, end, columns)
            if len(x_TH):
                kept = _completed(kept, x.rows(start, end), tile, forward, gating)
            grads, scale_R1 = FFNGrads(None, part_RH, part_R), rows.scale(start, end)
            # Of the forward's input only the number of rows is read.
            FFNBackward(dout, dout, tile, loader, grads, kept, scale_R1, gating=gating).run()
            if total_RH is not None and part_RH is not None and not first:
                total_RH.add_(part_RH)
            if d_scale_R is not None and part_R is not None:
                d_scale_R[start:end].add_(part_R)
        if sums is not None and total_RH is not None:
            sums(start, end, total_RH)
    return None if sums is None else sums.total_TH.to(dout_TH.dtype), d_scale_R


def _tile(weights: MXExpertStack, columns: slice, loader: Loader) -> FFNWeights:
    """The values of one part of the intermediate axis, fp32, without zeros that the arrangement added."""
    hidden, inner, scratch = weights.hidden, weights.inner, loader.scratch
    every, size, bias = slice(0, hidden), min(columns.stop, inner) - columns.start, weights.gate_up_bias
    inputs: list[Tensor] = []
    biases: list[Tensor | None] = []
    for half in range(weights.gate.halves):
        rows = slice(half * inner + columns.start, half * inner + columns.start + size)
        out_IH = scratch.get(f"quantized_input_{half}", (size, hidden), torch.float32)
        inputs.append(weights.gate_up.values(rows, every, out_IH))
        biases.append(None if bias is None else bias[rows])
    gate_IH, up_IH = inputs if weights.gate.gated else (inputs[0][:0], inputs[0])
    gate_bias, up_bias = biases if weights.gate.gated else (None, biases[0])
    down_HI = scratch.get("quantized_down", (hidden, columns.stop - columns.start), torch.float32)
    return FFNWeights(gate_IH, up_IH, weights.down.values(every, columns, down_HI)[:, :size], gate_bias, up_bias)


def _part(checkpoints: Checkpoints, start: int, end: int, columns: slice) -> Checkpoints:
    def part(kept: SavedRows | None) -> SavedRows | None:
        if isinstance(kept, FP8Rows):
            return kept.columns(columns)
        return kept[:, columns] if isinstance(kept, Tensor) else None

    rows = checkpoints.rows(start, end)
    return Checkpoints(part(rows.gate), part(rows.up))


def _completed(kept: Checkpoints, x: RowSource, tile: FFNWeights, forward: Loader, gating: Gating) -> Checkpoints:
    """Make the missing pre-activations of a part of the intermediate axis again, rounded to bf16 as kept ones are."""
    gate_RI, up_RI = (
        x.values.new_empty((len(x), len(tile.up_IH)), dtype=torch.bfloat16) if missing else None
        for missing in (kept.gate is None and not gating.skip_gate, kept.up is None)
    )
    if gate_RI is None and up_RI is None:
        return kept
    project_gate_up(x, tile, forward, gate_RI, up_RI, gating)
    return Checkpoints(kept.gate if gate_RI is None else gate_RI, kept.up if up_RI is None else up_RI)
