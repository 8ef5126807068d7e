"""MXFP8 quantization (e4m3, Neuron scale rule) along columns, along each group's rows, or both in one read.

The bytes are those of ``formats/mx.py``. Along columns, codes come in the hardware's order: blocks of 32 neighbours,
which ``tl.dot_scaled`` takes. Along rows they stay where their values are, and the product finds its blocks itself.

Legend: T tokens, R rows sorted by group, C columns, c columns padded to a multiple of 128, S places for rows' scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_neuron_moe.backends.triton import device_functions as dev
from hf_neuron_moe.backends.triton.launch_grid import Tiles, as_bits, launch, tile_sizes
from hf_neuron_moe.checks import check_multiple
from hf_neuron_moe.formats.constants import MX_BLOCK
from hf_neuron_moe.formats.padding import padded_size


class Quantized(NamedTuple):
    """One operand in MXFP8: bf16 values, exact, or codes and scales."""

    values: Tensor | None = None
    """bf16, where the source's values are: ``[R, c]`` of columns, ``[R, C]`` of rows."""
    codes: Tensor | None = None
    """uint8, ``[R, c]`` of columns in the hardware's order, ``[R, C]`` of rows where the source's values are."""
    scales: Tensor | None = None
    """uint8, ``[R, c/32]`` of columns; ``[S, C]`` of rows: that of a block of group g is in the row
    ``first // 8 + g``, where `first` is the block's first row. Other rows hold anything."""

    @classmethod
    def empty(cls, rows: int, columns: int, places: tuple[int, int] | None, anchor: Tensor) -> Quantized:
        """Return room for codes, and scales of the shape `places`; for values where that is None."""
        if places is None:
            return cls(anchor.new_empty(rows, columns, dtype=torch.bfloat16))
        codes, scales = (anchor.new_empty(shape, dtype=torch.uint8) for shape in ((rows, columns), places))
        return cls(None, codes, scales)

    @property
    def pointers(self) -> tuple[Tensor | None, Tensor | None]:
        """Values or codes as the kernels write them, and scales."""
        return as_bits(self.values, "values") if self.codes is None else self.codes, self.scales


def scale_places(rows: int, groups: int) -> int:
    """Return S."""
    return rows // 8 + groups + 1


@triton.jit
def _codes(x, AXIS: tl.constexpr):
    """Return the codes of blocks of 32 along an axis, the blocks' scale bytes, and each code's scale byte."""
    P: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    magnitude = dev.bits_of(x) & dev.MAGNITUDE
    if AXIS == 1:
        byte = tl.maximum((tl.max(tl.reshape(magnitude, (P, Q // 32, 32)), 2) >> 23) - 7, 0)  # the Neuron rule
        spread = tl.reshape(tl.broadcast_to(byte[:, :, None], (P, Q // 32, 32)), (P, Q))
    else:
        byte = tl.maximum((tl.max(tl.reshape(magnitude, (P // 32, 32, Q)), 1) >> 23) - 7, 0)
        spread = tl.reshape(tl.broadcast_to(byte[:, None, :], (P // 32, 32, Q)), (P, Q))
    return dev.e4m3_codes(x, spread), byte, spread


@triton.jit
def _quantize(
    x, token, ends, column_out, column_scales, row_out, row_scales, R, C, E, x_row, x_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SINGLE_COLUMNS: tl.constexpr,
    SINGLE_ROWS: tl.constexpr, VALUES: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Quantize one tile. Rows are in the hardware's order of their block if there are `ends`, columns always."""
    q = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    column = dev.natural_position(q, WIDTH, SINGLE_COLUMNS)
    place = tl.arange(0, TILE_R)
    if ends is None:
        row = tl.program_id(0) * TILE_R + place
        end, filled = R, R
    else:
        PER_BLOCK: tl.constexpr = BLOCK // TILE_R
        block = tl.program_id(0) // PER_BLOCK
        group, first, end = dev.group_of_tile(ends, block, R, E, GROUPS, BLOCK)
        offset = tl.program_id(0) % PER_BLOCK * TILE_R
        if first + dev.natural_position(offset, BLOCK, SINGLE_ROWS) >= end:
            return  # the group ends before
        row = first + dev.natural_position(offset + place, BLOCK, SINGLE_ROWS)
        filled = tl.where(group < E, end, 0)  # rows after the last group's are zeros
    wanted, real, inside = row < filled, (row < end)[:, None], (column < C)[None, :]
    source, target = row.to(tl.int64), row.to(tl.int64)[:, None]
    if token is not None:
        source = tl.load(token + row, mask=wanted, other=0).to(tl.int64)
    at = source[:, None] * x_row + column[None, :] * x_column
    values = dev.to_fp32(tl.load(x + at, mask=wanted[:, None] & inside, other=0))
    if column_out is not None:
        code, byte, spread = _codes(values, 1)
        if VALUES:
            dev.store(column_out + target * WIDTH + column[None, :], dev.scaled(dev.e4m3_values(code), spread), real)
        else:
            tl.store(column_out + target * WIDTH + q[None, :], code.to(tl.uint8), mask=real)
            b = tl.program_id(1) * (TILE_C // 32) + tl.arange(0, TILE_C // 32)
            tl.store(column_scales + target * (WIDTH // 32) + b[None, :], byte.to(tl.uint8), mask=real)
    if row_out is not None:
        code, byte, spread = _codes(values, 0)
        if VALUES:
            dev.store(row_out + target * C + column[None, :], dev.scaled(dev.e4m3_values(code), spread), real & inside)
        else:
            tl.store(row_out + target * C + column[None, :], code.to(tl.uint8), mask=real & inside)
            lead = first + dev.natural_position(offset + tl.arange(0, TILE_R // 32) * 32, BLOCK, SINGLE_ROWS)
            slot = (lead // 8 + group).to(tl.int64)[:, None]
            mask = (lead < filled)[:, None] & inside
            tl.store(row_scales + slot * C + column[None, :], byte.to(tl.uint8), mask=mask)


def quantize(
    x_TC: Tensor,
    rows_of: tuple[Tensor, int] | None = None,
    *,
    values: bool,
    columns: bool = True,
    token_R: Tensor | None = None,
    lone_384: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Quantized, Quantized]:
    """Return fp32 or bf16 ``[T, C]``, or the rows `token_R` of it, quantized along columns and along rows.

    * rows_of: end row of each group (int32), and the rows of one sum in MX. These are the rows of an MoE block, or the
      padded tokens of a dense MLP, a multiple of 32. Missing rows of a block count as zeros, and rows after the last
      end become zeros. With None nothing is quantized along rows.
    * values: return bf16 values instead of codes and scales.
    * columns: quantize along columns, a contraction axis of length c.
    * lone_384: a contraction axis of 384 is one tile (``Loader.lone_384``).
    """
    ends_E, block = (None, 0) if rows_of is None else rows_of
    if ends_E is not None:
        check_multiple(block, MX_BLOCK, "rows_of[1]", remedy="Pass the rows of an MoE block.")
    rows, C, width = len(x_TC) if token_R is None else len(token_R), x_TC.shape[1], padded_size(x_TC.shape[1])
    groups, by_columns, by_rows = 0 if ends_E is None else len(ends_E), Quantized(), Quantized()
    sizes = dict(tile_sizes("quantize_both" if groups else "quantize_columns") if tiles is None else tiles)
    if block % sizes["TILE_R"] or block % 128:
        sizes["TILE_R"] = MX_BLOCK
    if columns:
        by_columns = Quantized.empty(rows, width, None if values else (rows, width // MX_BLOCK), x_TC)
    row_tiles = triton.cdiv(rows, sizes["TILE_R"])
    if ends_E is not None:
        by_rows = Quantized.empty(rows, C, None if values else (scale_places(rows, groups), C), x_TC)
        row_tiles = (rows // block + min(groups + 1, rows)) * (block // sizes["TILE_R"])
    launch(
        _quantize, (row_tiles, width // sizes["TILE_C"]), x_TC,
        as_bits(x_TC, "x"), token_R, ends_E, *by_columns.pointers, *by_rows.pointers, rows, C, groups, *x_TC.stride(),
        WIDTH=width, BLOCK=block, GROUPS=triton.next_power_of_2(groups + 1), SINGLE_COLUMNS=lone_384 and width == 384,
        SINGLE_ROWS=block % 128 != 0, VALUES=values, **sizes,
    )  # fmt: skip
    return by_columns, by_rows
