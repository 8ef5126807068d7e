"""How one feed-forward network is cut into tiles, and how tiles are brought into matmul operands.

Legend: R rows (tokens of one expert, or all tokens of a dense MLP), H hidden, I intermediate size.

Tiles along I bound the converted weights (never a whole layer in fp32 unless MX groups force it), tiles along R bound
the activations. In MX the cuts follow the contraction tiles of the format (512, then 256, then 128). Rows are the
contraction axis of the weight gradients, I is that of the down projection and of the input gradient.

A product's fp32 sums depend on how it is cut and how its operands lie in memory. :class:`Projections` therefore makes
gate and up in the forward and in a backward that makes them again, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Compute, Scratch, call_scratch, choose_compute, fp32_products
from hf_neuron_moe.backends.torch.cpu.matmul import matmul, matmul_into, padded_rows
from hf_neuron_moe.backends.torch.device_quantize import quantize_, quantize_tiles_
from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_, fake_quantize_tile_, integer_like
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import tile_segments

_COLUMN_TILE = 2048


@dataclass(frozen=True)
class Span:
    """Positions ``start..stop`` of an axis, held in a tile of `size` >= ``stop - start``."""

    start: int
    stop: int
    size: int
    lane: int = 0
    """Distance of the four lanes of an MX block where the span is a part of one contraction tile, else 0. A tile that
    is not full is held only up to its last lane with real positions; the others are zero and change nothing."""

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


def row_spans(rows: int, loader: Loader, block_size: int | None, hidden: int, inner: int) -> list[Span]:
    """Cut `rows` into spans that are processed together: MX contraction tiles, or chunks padded as the products like.

    `block_size` is as in :func:`row_tiles`; `inner` is the whole axis I.
    """
    compute = loader.compute
    if compute.mx:
        return row_tiles(rows, block_size)
    weight = hidden * min(inner, _COLUMN_TILE)
    step = -(-rows // -(-rows // compute.row_chunk))
    spans = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        size = padded_rows(stop - start, weight, compute.operand, loader.scratch.device)
        spans.append(Span(start, stop, size))
    return spans


def row_tiles(rows: int, block_size: int | None) -> list[Span]:
    """Cut `rows` into the contraction tiles of a sum over them in MX.

    `block_size` is the rows per block of the blockwise MoE kernels; None for a dense MLP, whose weight gradients
    contract over all (padded) rows at once.
    """
    block = padded_size(rows) if block_size is None else block_size
    spans = []
    for first in range(0, rows, block):
        for segment in tile_segments(block):
            lane, begin = segment.tile // 4, first + segment.start
            for start in range(begin, min(begin + segment.tile * segment.tiles, rows), segment.tile):
                length = min(segment.tile, rows - start)
                spans.append(Span(start, start + length, -(-length // lane) * lane, lane))
    return spans


def column_spans(columns: int, compute: Compute) -> list[Span]:
    """Cut the intermediate axis into spans; one single span where MX groups reach over the border of gate and up."""
    total = padded_size(columns) if compute.mx else columns
    step = total if compute.mx and total % 512 else _COLUMN_TILE
    return [Span(start, min(start + step, columns), min(step, total - start)) for start in range(0, total, step)]


@dataclass
class Loader:
    """Brings slices of tensors into operand dtype: cast, rounded, zero padded and MX quantized as asked."""

    compute: Compute
    scratch: Scratch
    lone_384: bool = False  # a contraction axis of 384 is one tile, as in ``mlp_fwd_mxfp8`` with raw operands
    rounded_sources: bool = False  # fp32 sources hold values of the compute's rounded dtype: none need be rounded
    ready_weights: bool = False  # weights are operands already (bf16 products only)
    on_device: bool = False  # no value is read by the host

    @property
    def has_sums(self) -> bool:
        """Whether the products of a forward are fp32 sums, to which biases are added, and not rounded themselves."""
        return self.compute.mx or self.compute.operand == torch.float32

    def width(self, size: int) -> int:
        """Return how long a contraction axis of `size` is held: whole MX groups."""
        return padded_size(size) if self.compute.mx else size

    def load(
        self, name: str, source: Tensor, shape: tuple[int, int], *, mx_axis: int | None = None, lane: int = 0
    ) -> Tensor:
        """Return `source` [r, c] as an operand of `shape`, zero padded; in MX mode quantized along `mx_axis`.

        With `lane` the rows are one contraction tile (:meth:`quantize_rows`). Without anything to do the source itself
        is returned, so the caller must not write into the result.
        """
        compute = self.compute
        if not compute.mx:
            exact = self.rounded_sources or compute.rounded in (source.dtype, compute.operand)
            if exact and source.dtype == compute.operand and tuple(source.shape) == shape:
                return source
            mx_axis, lane = None, 0
        if not compute.mx and lies_by_column(source):
            # A straight copy of weights in the kernels' layout; matmuls take either orientation.
            buffer = self.scratch.get(name, shape[::-1], compute.operand).t()
        else:
            buffer = self.scratch.get(name, shape, compute.operand)
        self.fill(buffer, source)
        if lane:
            return self.quantize_rows(buffer, lane)
        return buffer if mx_axis is None else self.quantize(buffer, mx_axis)

    def fill(self, buffer: Tensor, source: Tensor) -> None:
        """Copy `source` into the corner of `buffer`, rounded to the compute dtype, and zero the rest."""
        rows, columns = source.shape
        if rows < buffer.shape[0]:
            buffer[rows:].zero_()
        if columns < buffer.shape[1]:
            buffer[:rows, columns:].zero_()
        corner = buffer[:rows, :columns]
        if self.compute.rounded in (source.dtype, self.compute.operand):
            corner.copy_(source)
        else:
            self._round_into(corner, source)

    def round_(self, values: Tensor) -> Tensor:
        """Round fp32 `values` to the compute dtype in place."""
        return values if values.dtype == self.compute.rounded else self._round_into(values, values)

    def _round_into(self, target: Tensor, source: Tensor) -> Tensor:
        shape, by_column = tuple(source.shape), source.dim() == 2 and lies_by_column(source)
        staged = self.scratch.get("rounding", shape[::-1] if by_column else shape, self.compute.rounded)
        return target.copy_((staged.t() if by_column else staged).copy_(source))

    def quantize(self, buffer: Tensor, axis: int, scheme: str = "wrapX") -> Tensor:
        """Round `buffer` to MXFP8 along `axis` in place (MX mode only)."""
        if self.lone_384 and buffer.shape[axis] == 384:
            scheme = "wrapX_single"
        if self.on_device:
            return quantize_(buffer, axis, scheme=scheme)
        return fake_quantize_(buffer, axis, self._exponents(buffer), scheme=scheme)

    def quantize_rows(self, buffer: Tensor, lane: int) -> Tensor:
        """Round `buffer`, whose rows are (the first lanes of) one contraction tile, to MXFP8 along its rows."""
        if self.on_device:
            return quantize_tiles_(buffer, 0, lane)
        return fake_quantize_tile_(buffer, 0, lane, self._exponents(buffer))

    def _exponents(self, buffer: Tensor) -> Tensor:
        return self.scratch.get("exponents", (buffer.numel(),), integer_like(buffer.dtype))


def make_loader(
    precision: str, device: torch.device, rows: float, weight_dtype: torch.dtype, *, lone_384: bool = False
) -> Loader:
    """Return a loader for one call of a block: bf16 operands for ``grouped_forward.py``, or fp32 operands for tiles.

    `rows` is the average number of rows that share one weight; few rows are multiplied without casting the weights.
    """
    compute = choose_compute(precision, device, rows_per_expert=rows, weight_dtype=weight_dtype)
    return Loader(compute, call_scratch(device), lone_384)


def tile_loader(precision: str, device: torch.device) -> Loader:
    """Return a loader of fp32 operands."""
    return Loader(fp32_products(precision), call_scratch(device))


def lies_by_column(matrix: Tensor) -> bool:
    """Whether a column's values lie closer together than a row's, one after the other or interleaved with others."""
    return 0 < matrix.stride(0) < matrix.stride(1)


def first_columns(span: Span, columns: int | None) -> int:
    """Return how many columns of `span` are among the first `columns` of the whole axis; all of them for None."""
    return span.length if columns is None else min(max(columns - span.start, 0), span.length)


class Projections:
    """Gate and up of one span of the intermediate axis as matmul operands.

    Up is multiplied in two parts where `up_cut`, a number of columns of the whole axis, lies within the span: those
    that ``"minimal"`` keeps, and the rest. Every policy cuts there, so that all have the same sums.

    `added`, of the gate and of up, are added to the sums: fp32 ``[I]``, or None. A `gate_IH` of None is not
    multiplied. `up_from` is the first column of the span that is wanted of up: 0, the place of the cut, or the span's
    length.
    """

    def __init__(
        self,
        gate_IH: Tensor | None,
        up_IH: Tensor,
        loader: Loader,
        span: Span,
        up_cut: int | None = None,
        up_from: int = 0,
        added: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.loader, self.width = loader, loader.width(up_IH.shape[1])
        self.gate_added_I, self.up_added_I = (None if part_I is None else part_I[span.part] for part_I in added)
        self.gate_IH: Tensor | None = None
        if gate_IH is not None:
            operand_IH = loader.load("gate", gate_IH[span.part], (span.size, self.width), mx_axis=1)
            self.gate_IH = operand_IH[: span.length]
        self.up_parts: list[tuple[int, int, Tensor]] = []
        cut = first_columns(span, up_cut)
        for name, begin, end in (("up", 0, cut), ("up_tail", cut, span.length)):
            if begin < end and begin >= up_from:
                rows = end - begin
                if loader.compute.mx:
                    rows = span.size if rows == span.length else padded_size(rows)
                source = up_IH[span.start + begin : span.start + end]
                operand_IH = loader.load(name, source, (rows, self.width), mx_axis=1)[: end - begin]
                self.up_parts.append((begin, end, operand_IH))

    def operand(self, x_RH: Tensor, rows: Span) -> Tensor:
        """Return `x_RH`, the rows of `rows`, as the left operand of both products: ``[rows.size, H]``, zero padded."""
        return self.loader.load("x", x_RH, (rows.size, self.width), mx_axis=1)

    def gate(self, x_RH: Tensor, out_RI: Tensor, rows: int) -> Tensor:
        """Return the gate's sums, as :func:`~hf_neuron_moe.backends.torch.cpu.matmul.matmul` does with `out_RI`."""
        assert self.gate_IH is not None
        sums_RI = matmul(x_RH, self.gate_IH.t(), out_RI, rows)
        return sums_RI if self.gate_added_I is None else sums_RI.add_(self.gate_added_I)

    def up_into(self, out_RI: Tensor, x_RH: Tensor) -> None:
        """Write the wanted columns of up into their places in `out_RI`, as wide as the span."""
        for begin, end, operand_IH in self.up_parts:
            matmul_into(out_RI[:, begin:end], x_RH, operand_IH.t(), accumulate=False)
            if self.up_added_I is not None:
                out_RI[:, begin:end].add_(self.up_added_I[begin:end])
