"""Quantizes an operand piece by piece, straight into the swizzled layout.

Letters: F free axis, K contraction axis, n tiles, J = 4 lanes, p consecutive rows of a swizzled tile. A piece is
``[F, n, J, p]`` where K is contiguous, and ``[n, J, p, F]`` where F is, as in a transposed matrix. Every pass finds the
piece in a core's cache, and every code is moved once, four lanes as one word. bf16 pieces without NaN, infinity and
scales near fp32's denormals are scaled on their own 16 bits, exactly; all others go through fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_neuron_moe.formats.constants import LANES, MX_BLOCK, PATCH_ROWS, ElementFormat, ScaleRule, SwizzleScheme
from hf_neuron_moe.formats.e8m0 import DENORMAL_BYTES, MAGNITUDE_MASK, divide_by_scale_, scale_bytes
from hf_neuron_moe.formats.elements import encode_
from hf_neuron_moe.formats.swizzle import block_segments

PIECE = 1 << 18  # elements of a piece: what one pass leaves is in a core's cache at the next, and few calls cost little
LEAST_ROWS = 64  # f values of a piece with contiguous K: their words lie side by side at the end
LEAST_COLUMNS = 512  # f values of a piece with contiguous F: whole cache lines, and few calls

# bf16 has 1 sign bit, 8 exponent bits with fp32's bias, and 7 mantissa bits: the upper half of fp32.
_MAGNITUDE = 0x7FFF
_INFINITY = 0x7F80
_MANTISSA_BITS = 7
_HALF_BITS = 16
_INVERSE = 254  # exponent field of 2**(127 - byte), plus the byte


def quantize_into(
    weight_FK: Tensor,
    codes_P4F: Tensor,
    scales_BF: Tensor,
    *,
    fmt: ElementFormat,
    rule: ScaleRule,
    scheme: SwizzleScheme,
) -> None:
    """Write what :func:`~hf_neuron_moe.formats.mx.quantize_mx` returns into memory of the caller.

    The weight is on a CPU, has any strides and is read once. Both targets are uint8; rows of the codes are contiguous
    and begin at whole words, scales have any strides.
    """
    F, K = weight_FK.shape
    words_PF = codes_P4F.view(torch.int32)
    by_columns = weight_FK.stride(0) == 1 and weight_FK.stride(1) != 1
    for start, tile, tiles in block_segments(K, scheme):
        stop, run = start + tile * tiles, tile // LANES
        values = weight_FK[:, start:stop].unflatten(1, (tiles, LANES, run))
        words = words_PF[start // LANES : stop // LANES].unflatten(0, (tiles, run))
        scales = scales_BF[start // MX_BLOCK : stop // MX_BLOCK].unflatten(0, (tiles, run // PATCH_ROWS))
        for f, n, p in _pieces(F, tiles, run, LEAST_COLUMNS if by_columns else LEAST_ROWS):
            piece = values[f, n, :, p]
            blocks = slice(p.start // PATCH_ROWS, p.stop // PATCH_ROWS)
            _quantize_piece(
                piece.permute(1, 2, 3, 0) if by_columns else piece,
                words[n, p, f],
                scales[n, blocks, f],
                by_columns=by_columns,
                fmt=fmt,
                rule=rule,
                consecutive=scheme is SwizzleScheme.CONSECUTIVE,
            )


def quantize_tiles(tile_RJs: Tensor, byte_Rb: Tensor, codes_RJs: Tensor, fmt: ElementFormat, rule: ScaleRule) -> None:
    """Quantize tiles ``[..., 4, s]``, any float dtype and strides, through fp32.

    Written are uint8 codes ``[..., 4, s]`` and one scale byte per ``[4, 8]`` block, ``[..., s/8]``.
    """
    tile_RJs = tile_RJs.to(torch.float32, copy=True)
    # Non-negative floats order as their bits do, with Inf above the finite values and NaN above Inf.
    magnitude = tile_RJs.view(torch.int32) & MAGNITUDE_MASK
    amax_bits = magnitude.amax(dim=-2).unflatten(-1, (-1, PATCH_ROWS)).amax(dim=-1)
    byte = scale_bytes(amax_bits, fmt, rule)
    byte_Rb.copy_(byte)
    codes_RJs.copy_(encode_(divide_by_scale_(tile_RJs, per_element(byte)), fmt))


def per_element(byte_Rb: Tensor) -> Tensor:
    """Spread scale bytes ``[..., s/8]`` over tiles: ``[..., 1, s]``."""
    return byte_Rb.repeat_interleave(PATCH_ROWS, dim=-1).unsqueeze(-2)


def _pieces(F: int, tiles: int, run: int, least: int) -> Iterator[tuple[slice, slice, slice]]:
    """Split ``[F, tiles, run]`` into ranges of F, of tiles and of whole blocks, about :data:`PIECE` values each."""
    free = max(1, min(F, max(least, PIECE // (tiles * LANES * run))))
    count = max(1, PIECE // (free * LANES * run))
    rows = min(run, max(PATCH_ROWS, PIECE // (free * LANES) // PATCH_ROWS * PATCH_ROWS))
    for n in range(0, tiles, count):
        for p in range(0, run, rows):
            for f in range(0, F, free):
                yield slice(f, min(f + free, F)), slice(n, min(n + count, tiles)), slice(p, min(p + rows, run))


def _quantize_piece(
    values: Tensor,
    words_npF: Tensor,
    scales_nbF: Tensor,
    *,
    by_columns: bool,
    fmt: ElementFormat,
    rule: ScaleRule,
    consecutive: bool,
) -> None:
    codes = torch.empty(values.shape, dtype=torch.uint8)
    byte = _quantize_halves(values, codes, 1 if by_columns else 2, fmt, rule)
    if byte is None:
        byte = torch.empty_like(scales_nbF if by_columns else scales_nbF.permute(2, 0, 1))
        order = (3, 0, 1, 2) if by_columns else (0, 1, 2, 3)
        bytes_Fnb = byte.permute(2, 0, 1) if by_columns else byte
        quantize_tiles(values.permute(order), bytes_Fnb, codes.permute(order), fmt, rule)
    scales_nbF.copy_(byte if by_columns else byte.permute(1, 2, 0))
    if by_columns:
        n, _, p, F = codes.shape
        lanes = codes.view(n * p, LANES, 1, F) if consecutive else codes
        _join_lanes([lane.view(n, p, F) for lane in lanes.unbind(1)], words_npF)
        return
    F, n, _, p = codes.shape
    lanes = codes.view(F, n * p, LANES, 1) if consecutive else codes
    words = torch.empty(F, n, p, dtype=torch.int32)
    _join_lanes([lane.reshape(F, n, p) for lane in lanes.unbind(2)], words)
    # torch transposes fast only from and to contiguous memory.
    words_npF.copy_(words.view(F, n * p).t().contiguous().view(n, p, F))


def _join_lanes(lanes: list[Tensor], words: Tensor) -> None:
    """Fill int32 words with four codes each, lane 0 in the lowest byte."""
    words.copy_(lanes[-1].view(torch.int8))  # with its sign, so that no product overflows
    for lane in reversed(lanes[:-1]):
        torch.add(lane, words, alpha=256, out=words)


def _quantize_halves(
    values: Tensor, codes: Tensor, lane_axis: int, fmt: ElementFormat, rule: ScaleRule
) -> Tensor | None:
    """Quantize a bf16 piece into contiguous uint8 `codes` of its shape, without leaving 16 bits.

    The lanes lie at `lane_axis`, the rows of a tile at the next. Returns scale bytes, the shape of `values` without the
    lanes and with an eighth of the rows. Returns None, and nothing useful in `codes`, where a block needs fp32, the
    values are no bf16, or the format is no torch dtype.
    """
    if values.dtype is not torch.bfloat16 or fmt.dtype is None:
        return None
    magnitude = values.view(torch.int16).bitwise_and(_MAGNITUDE)
    # Positive integers order as the magnitudes that they are the bits of.
    amax = magnitude.amax(dim=lane_axis).unflatten(lane_axis, (-1, PATCH_ROWS)).amax(dim=lane_axis + 1)
    byte = scale_bytes(amax.to(torch.int32) << _HALF_BITS, fmt, rule)
    if int(amax.max()) >= _INFINITY or int(byte.min()) < DENORMAL_BYTES:
        return None
    inverse = (_INVERSE - byte.to(torch.int16)) << _MANTISSA_BITS
    factor = inverse.repeat_interleave(PATCH_ROWS, dim=lane_axis).unsqueeze(lane_axis).view(torch.bfloat16)
    # The product is exact, or far below the smallest code.
    scaled = torch.mul(values, factor, out=magnitude.view(torch.bfloat16))
    if rule is not ScaleRule.NEURON:  # whose largest scaled magnitude is below 2**emax
        scaled.clamp_(-fmt.max, fmt.max)
    codes.view(fmt.dtype).copy_(scaled)
    return byte
