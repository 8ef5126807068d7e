"""MXFP8 quantization (e4m3, Neuron scale rule) along columns, along each group's rows, or both in one read.

The bytes are those of ``formats/mx.py``. Along columns, codes come in the hardware's order: blocks of 32 neighbours,
which ``tl.dot_scaled`` takes. Along rows they stay where their values are, and the product finds its blocks itself.

Legend: R rows sorted by group, C columns, c columns padded to a multiple of 128, S places for the scales of rows.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_neuron_moe.backends.triton.device_functions import (
    MAGNITUDE,
    bits_of,
    e4m3_codes,
    e4m3_values,
    group_of_tile,
    natural_position,
    neuron_byte,
    scaled,
    store,
    to_fp32,
)
from hf_neuron_moe.backends.triton.launch_grid import Tiles, as_bits, cdiv, launch, power_of_two_above, tile_sizes
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


def scale_places(rows: int, groups: int) -> int:
    """Return S."""
    return rows // 8 + groups + 1


@triton.jit
def _quantize(
    x, token, ends, column_out, column_scales, row_out, row_scales,
    R, C, E, x_row, x_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    SINGLE_COLUMNS: tl.constexpr, SINGLE_ROWS: tl.constexpr, VALUES: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Quantize one tile. Rows are in the hardware's order of their block if there are `ends`, columns always."""
    q = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    column = natural_position(q, WIDTH, SINGLE_COLUMNS)
    place = tl.arange(0, TILE_R)
    group = 0
    if ends is None:
        row = tl.program_id(1) * TILE_R + place
        end = R
        real = row < end
    else:
        PER_BLOCK: tl.constexpr = BLOCK // TILE_R
        block = tl.program_id(1) // PER_BLOCK
        group, first, _start, end = group_of_tile(ends, block, R, E, GROUPS, BLOCK)
        offset = tl.program_id(1) % PER_BLOCK * TILE_R
        place += offset
        if first + natural_position(offset, BLOCK, SINGLE_ROWS) >= end:
            return  # the group ends before
        row = first + natural_position(place, BLOCK, SINGLE_ROWS)
        real = (row < end) & (group <= E)
    # Rows after the last group's are zeros.
    wanted = real & (group < E)
    source = row.to(tl.int64)
    if token is not None:
        source = tl.load(token + row, mask=wanted, other=0).to(tl.int64)
    mask = wanted[:, None] & (column < C)[None, :]
    values = to_fp32(tl.load(x + source[:, None] * x_row + column[None, :] * x_column, mask=mask, other=0))
    magnitude = bits_of(values) & MAGNITUDE
    target = row.to(tl.int64)[:, None]
    if column_out is not None:
        byte = neuron_byte(tl.max(tl.reshape(magnitude, (TILE_R, TILE_C // 32, 32)), 2))
        spread = tl.broadcast_to(byte[:, :, None], (TILE_R, TILE_C // 32, 32))
        spread = tl.reshape(spread, (TILE_R, TILE_C))
        code = e4m3_codes(values, spread)
        if VALUES:
            store(column_out + target * WIDTH + column[None, :], scaled(e4m3_values(code), spread), real[:, None])
        else:
            tl.store(column_out + target * WIDTH + q[None, :], code.to(tl.uint8), mask=real[:, None])
            b = tl.program_id(0) * (TILE_C // 32) + tl.arange(0, TILE_C // 32)
            tl.store(column_scales + target * (WIDTH // 32) + b[None, :], byte.to(tl.uint8), mask=real[:, None])
    if row_out is not None:
        byte = neuron_byte(tl.max(tl.reshape(magnitude, (TILE_R // 32, 32, TILE_C)), 1))
        spread = tl.broadcast_to(byte[:, None, :], (TILE_R // 32, 32, TILE_C))
        spread = tl.reshape(spread, (TILE_R, TILE_C))
        code = e4m3_codes(values, spread)
        inside = real[:, None] & (column < C)[None, :]
        if VALUES:
            store(row_out + target * C + column[None, :], scaled(e4m3_values(code), spread), inside)
        else:
            tl.store(row_out + target * C + column[None, :], code.to(tl.uint8), mask=inside)
            lead = offset + tl.arange(0, TILE_R // 32) * 32
            lead = first + natural_position(lead, BLOCK, SINGLE_ROWS)
            inside = ((lead < end) & (group < E))[:, None] & (column < C)[None, :]
            slot = (lead // 8 + group).to(tl.int64)[:, None]
            tl.store(row_scales + slot * C + column[None, :], byte.to(tl.uint8), mask=inside)


def quantize_columns(
    x_TC: Tensor, *, values: bool, token_R: Tensor | None = None, lone_384: bool = False, tiles: Tiles | None = None
) -> Quantized:
    """Quantize fp32 or bf16 ``[T, C]``, or the rows `token_R` of it, along its columns: a contraction axis of length c.

    * values: return bf16 values instead of codes and scales.
    * lone_384: a contraction axis of 384 is one tile (``Loader.lone_384``).
    """
    rows = len(x_TC) if token_R is None else len(token_R)
    columns, _ = _run(x_TC, token_R, None, (True, False, values, lone_384), rows, 0, tiles)
    return columns


def quantize_both(
    x_TC: Tensor,
    ends_E: Tensor,
    block_size: int,
    *,
    values: bool,
    columns: bool = True,
    token_R: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantize along columns, where `columns` are wanted, and along each group's rows; as :func:`quantize_columns`.

    * ends_E: end row of each group, int32. Rows after the last end become zeros.
    * block_size: rows over which a sum in MX goes, a multiple of 32 (``row_tiles``): those of an MoE block, or the
      padded tokens of a dense MLP. Missing rows of a block count as zeros.

    Returns the operand along columns and the one along rows.
    """
    check_multiple(block_size, MX_BLOCK, "block_size", remedy="Pass the rows of an MoE block, padded.")
    rows = len(x_TC) if token_R is None else len(token_R)
    return _run(x_TC, token_R, ends_E, (columns, True, values, False), rows, block_size, tiles)


def _run(
    x_TC: Tensor,
    token_R: Tensor | None,
    ends_E: Tensor | None,
    wanted: tuple[bool, bool, bool, bool],
    rows: int,
    block: int,
    tiles: Tiles | None,
) -> tuple[Quantized, Quantized]:
    by_columns, by_rows, values, lone_384 = wanted
    C, width = x_TC.shape[1], padded_size(x_TC.shape[1])
    groups = 0 if ends_E is None else len(ends_E)
    sizes = dict(tile_sizes("quantize_both" if by_rows else "quantize_columns") if tiles is None else tiles)
    if block % sizes["TILE_R"] or block % 128:
        sizes["TILE_R"] = MX_BLOCK
    dtype = torch.bfloat16 if values else torch.uint8
    columns, over_rows = Quantized(), Quantized()
    if by_columns:
        out, scales = (
            x_TC.new_empty(rows, width, dtype=dtype),
            x_TC.new_empty(rows, width // MX_BLOCK, dtype=torch.uint8),
        )
        columns = Quantized(out) if values else Quantized(None, out, scales)
    if by_rows:
        out = x_TC.new_empty(rows, C, dtype=dtype)
        scales = x_TC.new_empty(0 if values else scale_places(rows, groups), C, dtype=torch.uint8)
        over_rows = Quantized(out) if values else Quantized(None, out, scales)
    row_tiles = cdiv(rows, sizes["TILE_R"])
    if ends_E is not None:
        row_tiles = (rows // block + min(groups + 1, rows)) * (block // sizes["TILE_R"])
    launch(
        _quantize, (width // sizes["TILE_C"], row_tiles), x_TC,
        as_bits(x_TC, "x"), token_R, ends_E, *_pointers(columns), *_pointers(over_rows),
        rows, C, groups if groups else 1, *x_TC.stride(),
        WIDTH=width, BLOCK=block, GROUPS=power_of_two_above(groups),
        SINGLE_COLUMNS=lone_384 and width == 384, SINGLE_ROWS=block % 128 != 0, VALUES=values, **sizes,
    )  # fmt: skip
    return columns, over_rows


def _pointers(result: Quantized) -> tuple[Tensor | None, Tensor | None]:
    if result.values is not None:
        return as_bits(result.values, "values"), None
    return result.codes, result.scales
