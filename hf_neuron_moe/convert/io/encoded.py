"""Reads values of tensors that a source stores as codes with scales: rows of one matrix at a time, as bf16.

N rows and K columns of a stored matrix, E experts. Only the codes and scales of the rows that are asked for are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from hf_neuron_moe.convert.io.source import Encoding, SourceTensor, damaged, misfit
from hf_neuron_moe.formats.constants import MX_BLOCK
from hf_neuron_moe.formats.source_codes import (
    GROUP_BYTES,
    dequantize_fp8_blocks,
    dequantize_mxfp4_blocks,
    dequantize_packed_fp4,
)

FP4_BLOCK = (1, MX_BLOCK)
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
BYTE_SCALES = ("F8_E8M0", "U8")
ROWS_BYTES = 1 << 22  # Bytes of bf16 values that are decoded at a time where they are only passed on
_CODE_AXES = {"F8_E4M3": (2, 3), "I8": (2, 3), "U8": (4,)}  # Numbers of axes by the dtype of codes

# Reads a tensor of a file, or one expert of it, or rows of that.
ReadStored = Callable[[SourceTensor, int | None, slice | None], torch.Tensor]


def values_shape(encoding: Encoding) -> tuple[int, ...]:
    """Shape of the tensor of values; an error names codes or scales that do not fit each other."""
    codes, scales = encoding.codes, encoding.scales
    known = len(codes.shape) in _CODE_AXES.get(codes.dtype, ()) and (codes.dtype == "U8" or not encoding.transposed)
    if not known or 0 in codes.shape:
        expected = "codes of FP8 (F8_E4M3), of packed FP4 (I8) or of MXFP4 (U8, four axes)"
        raise misfit(codes, expected, f"{codes.dtype} of shape {list(codes.shape)}")
    *experts, N, K = codes.shape if codes.dtype != "U8" else codes.shape[:-1]
    if codes.dtype == "U8":
        if codes.shape[-1] != GROUP_BYTES:
            raise misfit(codes, f"of {GROUP_BYTES} bytes per group", f"shape {list(codes.shape)}")
        K *= MX_BLOCK
    elif codes.dtype == "I8":
        K *= 2
    allowed = SCALE_DTYPES if codes.dtype == "F8_E4M3" else BYTE_SCALES
    if scales.dtype not in allowed:
        raise misfit(scales, f"of dtype {' or '.join(allowed)}", scales.dtype)
    grid = _grid(encoding, (*experts, N, K))
    whole = math.prod(grid) == 1 and scales.shape in ((), (1,))  # one scale of the whole tensor
    if scales.shape != grid and not whole:
        rows, columns = encoding.block
        expected = f"of shape {list(grid)}, a scale per {rows} x {columns} values of {codes.name} {[*experts, N, K]}"
        raise misfit(scales, expected, list(scales.shape))
    return (*experts, K, N) if encoding.transposed else (*experts, N, K)


def _grid(encoding: Encoding, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, columns = encoding.block
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


def mx_kind(encoding: Encoding) -> str:
    """``"mxfp8"`` or ``"mxfp4"`` for codes of which 32 adjacent ones of a row share a power of two; "" for others."""
    if encoding.codes.dtype != "F8_E4M3":
        return "mxfp4"
    whole = encoding.codes.shape[-1] % MX_BLOCK == 0 and encoding.block[1] % MX_BLOCK == 0
    return "mxfp8" if whole and encoding.scales.dtype in BYTE_SCALES else ""


def read_group_scales(read: ReadStored, encoding: Encoding, expert: int | None) -> torch.Tensor:
    """Read the scale bytes of one matrix of MX codes, one per row and 32 columns: uint8 ``[N, K/32]``."""
    rows, columns = encoding.block
    axes = encoding.codes.shape[-3:-1] if encoding.codes.dtype == "U8" else encoding.codes.shape[-2:]
    groups = (
        axes[1]
        if encoding.codes.dtype == "U8"
        else axes[1] // (GROUP_BYTES if encoding.codes.dtype == "I8" else MX_BLOCK)
    )
    scales = _scales(read, encoding, expert, slice(0, -(-axes[0] // rows))).view(torch.uint8)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns // MX_BLOCK, 1)
    return spread[: axes[0], :groups]


def read_values(read: ReadStored, encoding: Encoding, expert: int | None, rows: slice | None) -> torch.Tensor:
    """Read values as bf16: the whole tensor, one expert's matrix, or `rows` of a matrix."""
    shape = values_shape(encoding)
    matrix = shape if expert is None else shape[1:]
    if rows is None:
        rows = slice(0, matrix[0])
        if len(matrix) == 3:
            return torch.stack([read_values(read, encoding, index, None) for index in range(matrix[0])])
    if len(matrix) != 2:
        raise damaged(encoding.codes.name, "read by experts", f"rows of shape {list(matrix)}")
    return _columns(read, encoding, expert, rows).mT if encoding.transposed else _rows(read, encoding, expert, rows)


def value_chunks(read: ReadStored, encoding: Encoding) -> Iterator[torch.Tensor]:
    """Read all values in their order, contiguous, a few megabytes at a time."""
    *experts, rows, columns = values_shape(encoding)
    step = max(1, ROWS_BYTES // (2 * columns))
    size = encoding.block[1 if encoding.transposed else 0]
    step += -step % size if size < rows else 0
    for expert in range(experts[0]) if experts else (None,):
        for start in range(0, rows, step):
            yield read_values(read, encoding, expert, slice(start, min(start + step, rows))).contiguous()


def _rows(read: ReadStored, encoding: Encoding, expert: int | None, rows: slice) -> torch.Tensor:
    """Decode rows of a stored matrix, from the beginning of the block that holds the first one."""
    height, first, blocks = encoding.block[0], rows.start, slice(0, 1)
    if height < encoding.codes.shape[-3 if encoding.codes.dtype == "U8" else -2]:
        blocks = slice(rows.start // height, -(-rows.stop // height))
        first = blocks.start * height
    codes = read(encoding.codes, expert, slice(first, rows.stop))
    return _decode(codes, _scales(read, encoding, expert, blocks), encoding)[rows.start - first :]


def _columns(read: ReadStored, encoding: Encoding, expert: int | None, columns: slice) -> torch.Tensor:
    """Decode columns of a stored matrix of MXFP4, from the beginning of the group that holds the first one."""
    groups = slice(columns.start // MX_BLOCK, -(-columns.stop // MX_BLOCK))
    first = groups.start * MX_BLOCK
    codes = read(encoding.codes, expert, None)[:, groups]
    scales = read(encoding.scales, expert, None)[:, groups]
    return _decode(codes, scales, encoding)[:, columns.start - first : columns.stop - first]


def _scales(read: ReadStored, encoding: Encoding, expert: int | None, blocks: slice) -> torch.Tensor:
    if len(encoding.scales.shape) < 2:
        return read(encoding.scales, None, None).reshape(1, 1)
    return read(encoding.scales, expert, blocks)


def _decode(codes: torch.Tensor, scales: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    if encoding.codes.dtype == "U8":
        return dequantize_mxfp4_blocks(codes, scales)
    if encoding.codes.dtype == "I8":
        return dequantize_packed_fp4(codes, scales)
    rows, columns = encoding.block
    return dequantize_fp8_blocks(codes, scales, (rows, columns))
