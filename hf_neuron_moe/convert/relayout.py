"""Target layouts of a fused weight: what is stored, how it is filled and how a source tensor is cut out of it again.

A fused weight is what Hugging Face's fused modules hold: ``[F, K]`` for a dense MLP, ``[E, F, K]`` for experts.

E experts, F rows (2I of gate and up, H of down), K contraction axis of the forward matmul (H of gate and up, I of
down), P = K/4 rows of a swizzled operand, B = K/32 blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hf_neuron_moe.convert.manifest import ConvertOptions, Piece
from hf_neuron_moe.convert.source import nbytes_of
from hf_neuron_moe.errors import ConversionError, refuse
from hf_neuron_moe.formats.constants import MX_BLOCK
from hf_neuron_moe.formats.mx import dequantize_mx, quantize_mx
from hf_neuron_moe.formats.scales import ScaleLayout, scale_row_count, to_compact, to_packed
from hf_neuron_moe.formats.swizzle import swizzle, unswizzle

SOURCE = "source"
BF16_FUSED = "bf16_fused"
BF16_KERNEL = "bf16_kernel"
MX_FUSED_CODES = "mxfp8_fused_codes"
MX_FUSED_SCALES = "mxfp8_compact_scales"
MX_KERNEL_CODES = "mxfp8_swizzled_codes"
MX_KERNEL_SCALES = "mxfp8_packed_scales"

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes a weight to convert may have on disk."""

_BITS = {torch.float16: torch.int16, torch.float32: torch.int32}
"""Source dtypes that bf16 may not hold, and the integers their bits are compared as."""

CHUNK_ELEMENTS = 1 << 20
"""Elements compared at a time."""

SCRATCH_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype."""

SCALE_SUFFIX = "_scale"
"""Appended to a weight's name for its block scales."""

ReadPiece = Callable[[Piece, int | None], torch.Tensor]
"""Reads a piece; with an expert index, that expert's matrix of a piece that holds all experts."""

ReadStored = Callable[[int, int | None], torch.Tensor]
"""Reads the i-th tensor of a converted weight; with an expert index, that expert's part."""


@dataclass(frozen=True)
class FusedWeight:
    """One weight to convert.

    Attributes:
        name: its name in the converted checkpoint.
        shape: ``[F, K]`` or ``[E, F, K]``.
        pieces: the source tensors that fill it; all of one dtype.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StoredForm:
    """Name suffix, safetensors dtype, shape and layout of one tensor that stores (part of) a weight."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


def stored_forms(weight: FusedWeight, options: ConvertOptions) -> tuple[StoredForm, ...]:
    """Describe the tensors that will hold `weight`.

    Raises:
        ConversionError: MX quantisation is asked for and K does not consist of whole blocks of 32.
    """
    *experts, F, K = weight.shape
    kernel = options.layout == "kernel"
    if options.precision == "bf16":
        # Dense kernels take [F, K] as it is; the MoE kernels take [E, K, F] (gate_up [E, H, 2, I] with 2, I merged).
        shape = (*experts, K, F) if kernel and experts else weight.shape
        return (StoredForm("", "BF16", shape, BF16_KERNEL if kernel else BF16_FUSED),)
    if K % MX_BLOCK:
        raise refuse(
            ConversionError,
            where="convert",
            argument=f"contraction size of {weight.name}",
            expected=f"a multiple of {MX_BLOCK} for MXFP8",
            got=K,
            remedy="Use --precision bf16 for this model.",
        )
    if kernel:
        return (
            StoredForm("", "F8_E4M3", (*experts, K // 4, 4 * F), MX_KERNEL_CODES),
            StoredForm(SCALE_SUFFIX, "U8", (*experts, scale_row_count(K, ScaleLayout.PACKED), F), MX_KERNEL_SCALES),
        )
    return (
        StoredForm("", "F8_E4M3", weight.shape, MX_FUSED_CODES),
        StoredForm(SCALE_SUFFIX, "U8", (*experts, K // MX_BLOCK, F), MX_FUSED_SCALES),
    )


class Scratch:
    """One buffer that every weight is put together in.

    Weights are tens to hundreds of megabytes. Allocating each anew lets the C library's allocator keep freed ones, and
    memory then grows with the checkpoint.
    """

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        """Give everything that was taken back: tensors taken before share memory with those taken after."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in the buffer."""
        start, nbytes = self._used, math.prod(shape) * dtype.itemsize
        self._used += nbytes + -nbytes % SCRATCH_ALIGNMENT
        assert self._used <= self._buffer.numel(), "scratch_bytes is too small"
        return self._buffer[start : start + nbytes].view(dtype).view(shape)


def scratch_bytes(weight: FusedWeight, forms: tuple[StoredForm, ...]) -> int:
    """Scratch memory that :func:`store` needs for a weight."""
    sizes = [nbytes_of(form.dtype, form.shape) for form in forms]
    if len(forms) > 1:
        sizes.append(nbytes_of("BF16", weight.shape[-2:]))
    return sum(size + -size % SCRATCH_ALIGNMENT for size in sizes)


def store(
    weight: FusedWeight,
    forms: tuple[StoredForm, ...],
    read: ReadPiece,
    scratch: Scratch,
    rounded: Counter[str],
) -> list[torch.Tensor]:
    """Read a weight's pieces and return its tensors, one per stored form (MX codes as uint8).

    The result lies in `scratch` and is valid until the next call. Beyond it, one expert's matrix is held for MX.
    `rounded` is raised, per source tensor, by the number of values that bf16 does not hold bit for bit.
    """
    scratch.clear()
    if len(forms) == 1:
        stored = scratch.take(forms[0].shape, torch.bfloat16)
        fused = _fused_view(stored, forms[0].layout, has_experts=stored.ndim == 3)
        for piece in weight.pieces:
            place = fused if piece.expert is None else fused[piece.expert]
            rounded[piece.source] += _fill(place[..., piece.rows, :], _rows_first(read(piece, None), piece))
        return [stored]
    E, F, K = (1, *weight.shape)[-3:]
    codes = scratch.take((E, *forms[0].shape[-2:]), torch.uint8)
    scales = scratch.take((E, *forms[1].shape[-2:]), torch.uint8)
    # Through bf16 whatever the source is: the kernels, and patched blocks, quantize bf16 weights.
    matrix_FK = scratch.take((F, K), torch.bfloat16)
    for expert in range(E):
        for piece in weight.pieces:
            if piece.expert in (None, expert):
                part = _rows_first(read(piece, expert if piece.holds_experts else None), piece)
                rounded[piece.source] += _fill(matrix_FK[piece.rows], part)
        codes[expert], scales[expert] = _quantize(matrix_FK, swizzled=forms[0].layout == MX_KERNEL_CODES)
    return [codes.view(forms[0].shape), scales.view(forms[1].shape)]


def restore(piece: Piece, layouts: tuple[str, ...], read: ReadStored) -> torch.Tensor:
    """Cut one source tensor out of a converted weight: the way back of :func:`store`.

    Args:
        piece: the source tensor to make.
        layouts: layouts of the weight's tensors, values first.
        read: access to the weight's tensors.

    Returns:
        The tensor in the piece's dtype and shape, contiguous: the same bits for bf16 sources and layouts, the
        dequantised values for MX.
    """
    dtype = TORCH_DTYPES[piece.dtype]
    if layouts[0] in (BF16_FUSED, BF16_KERNEL):
        has_experts = piece.expert is not None or piece.holds_experts
        fused = _fused_view(read(0, piece.expert), layouts[0], has_experts=has_experts)
        return _rows_first(fused[..., piece.rows, :], piece).to(dtype).contiguous()
    K = piece.shape[-2 if piece.transposed else -1]
    matrices = []
    for expert in range(piece.shape[0]) if piece.holds_experts else (piece.expert,):
        matrix_FK = _dequantize(read(0, expert), read(1, expert), K, swizzled=layouts[0] == MX_KERNEL_CODES)
        matrices.append(_rows_first(matrix_FK[piece.rows], piece).to(dtype))
    return torch.stack(matrices) if piece.holds_experts else matrices[0].contiguous()


def _fill(place: torch.Tensor, values: torch.Tensor) -> int:
    """Copy `values` into bf16 memory; return how many of them do not come back from there bit for bit."""
    place.copy_(values)
    if values.dtype not in _BITS:
        return 0
    bits = _BITS[values.dtype]
    changed = 0
    for stored, given in zip(_row_chunks(place), _row_chunks(values)):
        changed += int(torch.count_nonzero(stored.to(given.dtype).view(bits) != given.view(bits)))
    return changed


def _row_chunks(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The rows of a matrix, or of a stack of them, in chunks that keep temporaries small."""
    rows = max(1, CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
    for matrix in tensor if tensor.ndim == 3 else (tensor,):
        yield from matrix.split(rows)


def _quantize(matrix_FK: torch.Tensor, *, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mx = quantize_mx(matrix_FK)
    return (mx.codes, to_packed(mx.scales)) if swizzled else (unswizzle(mx.codes), mx.scales)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, K: int, *, swizzled: bool) -> torch.Tensor:
    codes = codes.view(torch.uint8)
    if swizzled:
        return unswizzle(dequantize_mx(codes, to_compact(scales, K)))
    return unswizzle(dequantize_mx(swizzle(codes), scales))


def _fused_view(stored: torch.Tensor, layout: str, *, has_experts: bool) -> torch.Tensor:
    """View a stored bf16 weight, or one expert of it, as ``[..., F, K]``: the kernels' expert matrices are [K, F]."""
    return stored.transpose(-1, -2) if has_experts and layout == BF16_KERNEL else stored


def _rows_first(matrix: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Swap the axes of a piece that its source holds transposed; its own inverse."""
    return matrix.transpose(-1, -2) if piece.transposed else matrix
