"""Fills the tensors of a weight from its source tensors, and cuts a source tensor out of them again.

A fused weight is what Hugging Face's fused modules hold: ``[F, K]`` for a dense MLP, ``[E, F, K]`` for experts. E
experts, F rows and K columns of one rank's matrix. ``orientations`` has the target layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from hf_neuron_moe.convert.io.nonfinite import Place, check_or_count
from hf_neuron_moe.convert.io.source import nbytes_of
from hf_neuron_moe.convert.layout.codecs import TRANSPOSED_ROWS, copy_transposed, decode, encode, keep_codes
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, StoredForm, bf16_layout, matrix_shape
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, Part, halves_in
from hf_neuron_moe.convert.manifest import Piece, WrittenTensor, grouped
from hf_neuron_moe.convert.options import FORWARD
from hf_neuron_moe.errors import naming
from hf_neuron_moe.formats.constants import E8M0_BIAS, MX_BLOCK

# Dtypes a weight to convert may have on disk.
WEIGHT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# What the tensors of converted weights are filled as: codes as bytes, words as the formats' carriers.
_CARRIERS = {"F8_E4M3": torch.uint8, "U8": torch.uint8, "U16": torch.int16, "U32": torch.int32}
_STORED_DTYPES = {"BF16": torch.bfloat16, **_CARRIERS}
# Source dtypes that bf16 may not hold, and the integers their bits are compared as.
_BITS = {torch.float16: torch.int16, torch.float32: torch.int32}

CHUNK_ELEMENTS = 1 << 20  # Elements compared at a time
SCRATCH_ALIGNMENT = 64  # Bytes; a cache line, and a multiple of every dtype
READ_BYTES = 1 << 22  # Bytes of a source tensor read at a time: what is read is copied on while it is in the cache

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
# Reads rows of a piece's matrix, as the source has it; with an expert index, of that expert of a piece that holds all.
# Without rows, the scale bytes of a matrix of MX codes, one per row and 32 columns as the codes lie.
ReadPiece = Callable[[Piece, int | None, slice | None], torch.Tensor]
# Reads the i-th tensor of a converted weight; with an expert index, that expert's part.
ReadStored = Callable[[int, int | None], torch.Tensor]


class Scratch:
    """One buffer that every weight is put together in; each thread has its own.

    With tens to hundreds of megabytes allocated anew for each, the C library keeps freed ones, and memory grows.
    """

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)

    def tensors(self, shapes: Shapes) -> list[torch.Tensor]:
        """Return uninitialised contiguous tensors in the buffer, which share memory with those of the next call."""
        taken, end = [], 0
        for shape, dtype in shapes:
            start, nbytes = end, math.prod(shape) * dtype.itemsize
            taken.append(self._buffer[start : start + nbytes].view(dtype).view(shape))
            end += _aligned(nbytes)
        return taken


def scratch_bytes(weight: FusedWeight, forms: tuple[StoredForm, ...]) -> int:
    """Scratch memory that :func:`store` needs for one rank's part of a weight."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in _shapes(weight, forms))


def _shapes(weight: FusedWeight, forms: tuple[StoredForm, ...]) -> Shapes:
    """What :func:`store` gives at a time and, for layouts that are more than a view, the matrix that is made of."""
    shapes = [(form.shape[1:] if weight.has_experts else form.shape, _STORED_DTYPES[form.dtype]) for form in forms]
    if _view_of(forms[0].layout, weight.has_experts) is None:
        shapes.append((forms[0].part.shape, torch.bfloat16))
    return shapes


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % SCRATCH_ALIGNMENT


def read_bytes(piece: Piece) -> int:
    """Memory that :func:`store` needs to read a piece."""
    rows, columns = piece.matrix
    return nbytes_of(piece.dtype, (min(rows, _rows_per_read(piece)), columns))


def store(
    weight: FusedWeight,
    forms: tuple[StoredForm, ...],
    read: ReadPiece,
    scratch: Scratch,
    rounded: Counter[str],
    *,
    on_nonfinite: str = "keep",
    nonfinite: Counter[str] | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Read a weight's pieces and give its tensors, one per stored form: MX codes as uint8, words as the carriers.

    Weights with experts come expert by expert: joined along a new first axis, the parts are the tensors. A dense weight
    is one part. Parts lie in `scratch` (:func:`scratch_bytes`), valid until the next one is asked for. Beyond it,
    :func:`read_bytes` and chunks of a few megabytes are held. May run in several threads with a `scratch` each.

    `forms` are those of :func:`stored_forms` for one rank. NaN and infinity in the source are an error with
    `on_nonfinite` ``"error"``. `nonfinite` is raised, per source tensor, by the number of those that were kept, and
    `rounded` by the number of values that bf16 does not hold bit for bit.
    """
    part, view = forms[0].part, _view_of(forms[0].layout, weight.has_experts)
    kept = Counter() if nonfinite is None else nonfinite
    tensors = scratch.tensors(_shapes(weight, forms))
    stored = tensors[: len(forms)]
    # Through bf16 whatever the source is: the kernels, and patched blocks, quantize bf16 weights.
    matrix_FK = tensors[-1] if view is None else view(stored[0])
    if part.padding:
        matrix_FK.zero_()
    scales_FG = None
    if forms[0].layout in PERMUTED_WORDS.values():
        F, K = part.shape
        scales_FG = torch.full((F, K // MX_BLOCK), E8M0_BIAS, dtype=torch.uint8)  # of zeros, where nothing else belongs
    first = forms[0].first_expert
    for expert in range(first, first + forms[0].shape[0]) if weight.has_experts else (None,):
        for piece in (piece for piece in weight.pieces if piece.expert in (None, expert)):
            index = expert if piece.holds_experts else None
            for rows, places in _reads(piece, part):
                with naming("convert"):
                    read_rows = read(piece, index, rows)
                for own, columns, row, column in places:
                    at = Place(index, slice(rows.start + own.start, None, own.step), columns)
                    values = read_rows[own, columns]
                    with naming("convert"):
                        check_or_count(values, on_nonfinite, kept, file=piece.file, name=piece.source, at=at)
                    values = _rows_first(values, piece)
                    place = matrix_FK[row : row + values.shape[0], column : column + values.shape[1]]
                    rounded[piece.source] += _copy(place, values)
            if scales_FG is not None:
                with naming("convert"):
                    read_scales = read(piece, index, None)
                for block in part.blocks(piece.rows):
                    groups = slice(block.columns.start // MX_BLOCK, block.columns.stop // MX_BLOCK)
                    scales = read_scales[piece.source_rows(block.rows), groups]
                    scales_FG[block.row : block.row + scales.shape[0], : scales.shape[1]] = scales
        if scales_FG is not None:
            keep_codes(matrix_FK, scales_FG, forms, stored)
        elif view is None:
            encode(matrix_FK, forms, stored)
        yield stored


def restore(piece: Piece, tensors: Sequence[WrittenTensor], read: ReadStored) -> torch.Tensor:
    """Cut one source tensor out of a converted weight: the way back of :func:`store`.

    `tensors` are all tensors of its weight, of all ranks; `read` takes their places in that list. The result is in the
    piece's dtype and shape, contiguous: the same bits for bf16 sources and layouts, the dequantized values for MX.
    """
    out = torch.empty(piece.shape, dtype=WEIGHT_DTYPES[piece.dtype])
    matrices = out.unflatten(0, (piece.stacked, -1)) if piece.stacked else out
    for part, indices in _parts(tensors):
        first = tensors[indices[0]].first_expert
        layouts = [tensors[index].layout for index in indices]
        for expert in range(piece.experts) if piece.holds_experts else (piece.expert,):
            if not tensors[indices[0]].holds(expert):
                continue
            target_FK = _rows_first(matrices[expert] if piece.holds_experts else out, piece)
            stored = [read(index, None if expert is None else expert - first) for index in indices]
            view = _view_of(layouts[0], expert is not None)
            for block in part.blocks(piece.rows):
                place_FK = target_FK[piece.source_rows(block.rows), block.columns]
                rows = slice(block.row, block.row + len(place_FK))
                chunks = decode(layouts, stored, part, rows) if view is None else [(0, view(stored[0])[rows])]
                for start, values_FK in chunks:
                    place_FK[start : start + len(values_FK)].copy_(values_FK[:, : place_FK.shape[1]])
    return out


def _reads(piece: Piece, part: Part) -> Iterator[tuple[slice, list[tuple[slice, slice, int, int]]]]:
    """Rows to read together of a piece, and which of them and of their columns go where in the part's matrix."""
    step, whole = _rows_per_read(piece), slice(0, None)
    blocks = list(part.blocks(piece.rows))
    if piece.transposed:  # rows of the source are columns of the blocks, the same ones of all
        for wanted in [block.columns for block in blocks[:1]]:
            for start in range(wanted.start, wanted.stop, step):
                places = [(whole, piece.source_rows(block.rows), block.row, start - wanted.start) for block in blocks]
                yield slice(start, min(start + step, wanted.stop)), places
    elif piece.interleaved:  # pairs of rows, the same ones of gate and up
        for wanted in [block.rows for block in blocks[:1]]:
            for start in range(wanted.start, wanted.stop, max(1, step // 2)):
                moved, stop = start - wanted.start, min(start + max(1, step // 2), wanted.stop)
                halves = enumerate(blocks)
                places = [(slice(half, None, 2), block.columns, block.row + moved, 0) for half, block in halves]
                yield slice(2 * start, 2 * stop), places
    else:
        for block in blocks:
            for start in range(block.rows.start, block.rows.stop, step):
                place = (whole, block.columns, block.row + start - block.rows.start, 0)
                yield piece.source_rows(slice(start, min(start + step, block.rows.stop))), [place]


def _rows_per_read(piece: Piece) -> int:
    """Rows of a piece's matrix to read at a time: whole pieces of those that are transposed together."""
    rows = max(1, READ_BYTES // nbytes_of(piece.dtype, piece.shape[-1:]))
    return rows - rows % TRANSPOSED_ROWS if rows > TRANSPOSED_ROWS else rows


def _copy(place: torch.Tensor, values: torch.Tensor) -> int:
    """Copy `values` into bf16 memory; return how many of them do not come back from there bit for bit."""
    if (place.stride(-1) == 1) == (values.stride(-1) == 1):
        place.copy_(values)
    elif place.stride(-1) == 1:
        copy_transposed(place, values.t())
    else:
        copy_transposed(place.t(), values)
    rows = max(1, CHUNK_ELEMENTS // max(1, values.shape[-1]))
    return sum(map(rounded_values, values.split(rows), place.split(rows)))


def rounded_values(values: torch.Tensor, stored: torch.Tensor | None = None) -> int:
    """Count values that do not come back bit for bit from bf16, where they are `stored` or would be."""
    if values.dtype not in _BITS:
        return 0
    bits, stored = _BITS[values.dtype], values.bfloat16() if stored is None else stored
    return int(torch.count_nonzero(stored.to(values.dtype).view(bits) != values.view(bits)))


def _parts(tensors: Sequence[WrittenTensor]) -> list[tuple[Part, list[int]]]:
    """Each rank's part of the matrix, with the places of the forward tensors that hold it: values, then scales."""
    halves = halves_in(tensors[0].weight)
    forward = (index for index, tensor in enumerate(tensors) if tensor.orientation == FORWARD)
    ranks = grouped(forward, lambda index: tensors[index].group[1])
    parts, start = [], 0
    for rank, places in sorted(ranks.items(), key=lambda item: item[0] or 0):
        indices = sorted(places, key=lambda index: tensors[index].layout in SCALES)
        values = tensors[indices[0]]
        F, K = matrix_shape(values)
        hidden, width = (K, F // halves) if halves else (F, K)
        start = 0 if values.ep_rank is not None else start
        stop = start + width - values.padding.get("I", 0)
        part = Part(halves, hidden - values.padding.get("H", 0), hidden, 0, start, stop, width, rank)
        parts.append((part, indices))
        start = stop
    return [(replace(part, intermediate=start), indices) for part, indices in parts]


def _view_of(layout: str, has_experts: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How to see a stored bf16 matrix as ``[F, K]``; None for layouts that are more than a view."""
    row = bf16_layout(layout, has_experts)
    return None if row is None else row.view


def _rows_first(matrix: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Swap the axes of a piece that its source holds transposed; its own inverse."""
    return matrix.transpose(-1, -2) if piece.transposed else matrix
