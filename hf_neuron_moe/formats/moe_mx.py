"""MX expert weights of the blockwise MoE kernels (``moe_cte``'s MX implementations, nki-library 2.29).

Letters: E experts, H hidden (a multiple of 512), I intermediate, Q partitions, q = 8 of them per scale row,
t tiles, J = 4 lanes of one x4 word.

=================== ========================== ==============================================
tensor              shape                      axis inside the words
=================== ========================== ==============================================
gate_up words       [E, 128, 2, H/512, I]      H: ``h = lane*(H/4) + tile*128 + partition``
gate_up scales      [E, 16, 2, H/512, I]
down words          [E, pI, ceil(I/512), H]    I: ``i = tile*512 + lane*pI + partition``
down scales         [E, pI/8, ceil(I/512), H]
gate_up bias        [E, pI, 2, ceil(I/512), 4] I, as in the down words
=================== ========================== ==============================================

Experts without a gate projection have up alone, with 1 for the 2: a form that no kernel reads.

pI is 128 if I >= 512 and I/4 below. An I above 512 is zero-padded to a multiple of it. A group of 32 values is 8
partitions x 4 lanes. Codes with a scale per 32 adjacent values become words without another rounding if the axis is
permuted (:func:`arrange_moe_words`). Value ``32q + 8r + i`` lies at partition ``8q + i`` of lane r, tile after tile.
Along H, where a lane goes through all tiles, that is position ``r*(H/4) + 8q + i``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.checks import VIEW, check_axes, check_dtype, check_equal_shape, check_float, check_multiple, is_whole
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.formats.constants import (
    LANES,
    MX_BLOCK,
    PATCH_ROWS,
    SCALE_DTYPES,
    TILE_SIZES,
    ElementFormat,
    ScaleRule,
    SwizzleScheme,
    element_format,
)
from hf_neuron_moe.formats.mx import dequantize_mx, quantize_mx
from hf_neuron_moe.formats.swizzle import pack_x4, unpack_x4, unswizzle

TILE = TILE_SIZES[0]
PARTITIONS = TILE // LANES
SCALE_ROWS = PARTITIONS // PATCH_ROWS  # scale rows of a whole tile: one per 8 partitions

HIDDEN_SCHEME = SwizzleScheme.ONE_TILE
"""Scheme with which :func:`fake_quantize_mx` groups a hidden axis as these weights do."""

INTERMEDIATE_SCHEME = SwizzleScheme.WRAPX_SINGLE
"""The same for an intermediate axis of :func:`padded_intermediate` elements."""

_HIDDEN_REMEDY = "The MX implementations of moe_cte need H in multiples of 512; zero-pad the hidden axis."
_INTERMEDIATE_REMEDY = "Zero-pad the intermediate axis of gate, up and down; padding does not change the output."


@dataclass(frozen=True)
class MoEWeightMX:
    """One quantized expert projection in the kernels' layout; shapes in the table at the top of this file."""

    words: Tensor  # x4 words, int32 (fp8) or int16 (fp4)
    scales: Tensor  # uint8
    fmt: ElementFormat


def _extents(tensor: Tensor, axes: tuple[str, ...], argument: str, because: str) -> torch.Size:
    """Return a tensor's extents; those of `axes` named by a number have to be that number."""
    check_axes(tensor, axes, argument)
    expected = tuple(int(name) if name.isdigit() else extent for name, extent in zip(axes, tensor.shape))
    check_equal_shape(tensor, expected, argument, because)
    return tensor.shape


@public
def padded_intermediate(size: int) -> int:
    """Return the intermediate size the kernels work on: I below 512, else the next multiple of 512."""
    check_multiple(size, MX_BLOCK, "I", remedy=_INTERMEDIATE_REMEDY)
    return size if size < TILE else -(-size // TILE) * TILE


@public
def quantize_moe_gate_up(
    gate_up_EH2I: Tensor, *, fmt: str | ElementFormat = "e4m3fn", rule: str | ScaleRule | None = None
) -> MoEWeightMX:
    """Quantize gate and up projections ``[E, H, 2, I]`` (bf16, fp16 or fp32, any strides) along H, or up alone.

    The kernels take the scales of any `rule`. None is Neuron's own for FP8, and OCP's FLOOR for FP4, which no Neuron
    instruction produces. With a scale twice as large FP4 would not use half of its few codes.
    """
    fmt = element_format(fmt)
    check_float(gate_up_EH2I, "gate_up")
    E, H, halves, inter = _extents(gate_up_EH2I, ("E", "H", _halves(gate_up_EH2I), "I"), "gate_up", "gate and up")
    check_multiple(H, TILE, "H", remedy=_HIDDEN_REMEDY)
    rows_FH = gate_up_EH2I.permute(0, 2, 3, 1).reshape(E * halves * inter, H)
    return _quantize_rows(rows_FH, fmt, rule, HIDDEN_SCHEME, (E, halves, inter), (2, 1, 3, 0, 4))


def _halves(gate_up: Tensor) -> str:
    """The extent that the third axis has to have: 1 where up is alone, else 2."""
    return "1" if gate_up.shape[2:3] == (1,) else "2"


def _quantize_rows(
    rows_FK: Tensor,
    fmt: ElementFormat,
    rule: str | ScaleRule | None,
    scheme: SwizzleScheme,
    free: tuple[int, ...],
    order: tuple[int, ...],
) -> MoEWeightMX:
    """Quantize ``[F, K]``; words ``[tiles, Q, *free]`` and scales ``[tiles, q, *free]`` get their axes in `order`."""
    if rule is None:
        rule = "neuron" if fmt.code_bits == 8 else "floor"
    quantized = quantize_mx(rows_FK, fmt=fmt, rule=rule, scheme=scheme)
    tiles = -(-rows_FK.shape[1] // TILE)
    words = pack_x4(quantized.codes, fmt).view(tiles, -1, *free).permute(order).contiguous()
    return MoEWeightMX(words, quantized.scales.view(tiles, -1, *free).permute(order).contiguous(), fmt)


def _dequantize_rows(weight: MoEWeightMX, scheme: SwizzleScheme, F: int, order: tuple[int, ...]) -> Tensor:
    """Invert :func:`_quantize_rows`: fp32 ``[F, K]``; `order` brings tiles and partitions to the front."""
    words_PF = weight.words.permute(order).reshape(-1, F)
    scales_BF = weight.scales.permute(order).reshape(-1, F)
    return unswizzle(dequantize_mx(unpack_x4(words_PF, weight.fmt), scales_BF, fmt=weight.fmt), scheme)


@public
def dequantize_moe_gate_up(weight: MoEWeightMX) -> Tensor:
    """Return gate and up projections as fp32 ``[E, H, 2, I]``, or up's as ``[E, H, 1, I]``."""
    axes = ("E", "128", _halves(weight.words), "H/512", "I")
    E, _, halves, tiles, inter = _extents(weight.words, axes, "words", "one word per partition")
    check_equal_shape(weight.scales, (E, SCALE_ROWS, halves, tiles, inter), "scales", "one row per 8 partitions")
    rows_FH = _dequantize_rows(weight, HIDDEN_SCHEME, E * halves * inter, (3, 1, 0, 2, 4))
    return rows_FH.view(E, halves, inter, tiles * TILE).permute(0, 3, 1, 2)


@public
def quantize_moe_down(
    down_EIH: Tensor, *, fmt: str | ElementFormat = "e4m3fn", rule: str | ScaleRule | None = None
) -> MoEWeightMX:
    """Quantize down projections ``[E, I, H]`` (bf16, fp16 or fp32, any strides) along I, a multiple of 32.

    :func:`quantize_moe_gate_up` says what a `rule` of None is.
    """
    fmt = element_format(fmt)
    check_float(down_EIH, "down")
    check_axes(down_EIH, ("E", "I", "H"), "down")
    E, inter, H = down_EIH.shape
    missing = padded_intermediate(inter) - inter
    rows_FI = down_EIH.detach().transpose(1, 2).reshape(E * H, inter)
    rows_FI = pad(rows_FI, (0, missing)) if missing else rows_FI
    return _quantize_rows(rows_FI, fmt, rule, INTERMEDIATE_SCHEME, (E, H), (2, 1, 0, 3))


@public
def dequantize_moe_down(weight: MoEWeightMX) -> Tensor:
    """Return down projections as fp32 ``[E, padded I, H]``."""
    check_axes(weight.words, ("E", "pI", "ceil(I/512)", "H"), "words")
    E, partitions, tiles, H = weight.words.shape
    check_multiple(partitions, PATCH_ROWS, "words.shape[1] (pI)", remedy=_INTERMEDIATE_REMEDY)
    # Several tiles only exist when I >= 512, and then every one of them fills all partitions.
    expected = (E, partitions if tiles == 1 and partitions < PARTITIONS else PARTITIONS, tiles, H)
    check_equal_shape(weight.words, expected, "words", "pI of the intermediate size")
    check_equal_shape(weight.scales, (E, partitions // PATCH_ROWS, tiles, H), "scales", "one row per 8 partitions")
    rows_FI = _dequantize_rows(weight, INTERMEDIATE_SCHEME, E * H, (2, 1, 0, 3))
    return rows_FI.view(E, H, -1).transpose(1, 2)


def to_groups(values: Tensor, tile: int | None = None) -> Tensor:
    """Permute the last axis so that groups of words hold 32 adjacent values; it has whole tiles, None is a single one.

    Value ``32q + 8r + i`` of a tile moves to position ``r*(tile/4) + 8q + i``. A hidden axis is one tile, an
    intermediate one has tiles of at most 512.
    """
    blocks = (tile or values.shape[-1]) // MX_BLOCK
    return values.unflatten(-1, (-1, blocks, LANES, PATCH_ROWS)).transpose(-3, -2).flatten(-4)


def from_groups(values: Tensor, tile: int | None = None) -> Tensor:
    """Invert :func:`to_groups`."""
    blocks = (tile or values.shape[-1]) // MX_BLOCK
    return values.unflatten(-1, (-1, LANES, blocks, PATCH_ROWS)).transpose(-3, -2).flatten(-4)


def group_words(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Pack codes ``[..., K]``, one per byte, to words ``[..., K/4]`` of which 8 neighbours hold 32 adjacent codes."""
    return pack_x4(codes.unflatten(-1, (-1, LANES, PATCH_ROWS)).transpose(-1, -2).flatten(-3), fmt)


def arrange_moe_words(words: Tensor, scales: Tensor, fmt: ElementFormat) -> MoEWeightMX:
    """Arrange words of :func:`group_words` and a scale byte per 32 adjacent values; every bit stays what it is.

    `words` are gate_up ``[E, 2, I, H/4]``, up alone ``[E, 1, I, H/4]`` or down ``[E, H, I/4]``, H and an I from 512 on
    in multiples of 512. The result holds H and I permuted by :func:`to_groups`, of down only I: the layer's input has
    to be permuted, and its output is in natural order.
    """
    tiles, gate_up = -(-words.shape[-1] // PARTITIONS), words.ndim == 4
    if gate_up:
        words, scales = (to_groups(part.mT, min(part.shape[-2], TILE)).mT for part in (words, scales))
    words, scales = (
        part.unflatten(-1, (tiles, -1)).permute((0, 4, 1, 3, 2) if gate_up else (0, 3, 2, 1)).contiguous()
        for part in (words, scales)
    )
    return MoEWeightMX(words, scales, fmt)


@public
def moe_bias_to_lanes(bias_E2I: Tensor) -> Tensor:
    """Arrange the gate/up bias ``[E, 2, I]`` as ``[E, pI, 2, ceil(I/512), 4]``: a copy, zero where I is padded."""
    E, _, inter = _extents(bias_E2I, ("E", "2", "I"), "bias", "gate and up")
    padded = padded_intermediate(inter)
    lanes_E2tJQ = pad(bias_E2I, (0, padded - inter)).view(E, 2, -(-padded // TILE), LANES, -1)
    return lanes_E2tJQ.permute(0, 4, 1, 2, 3).contiguous()


@public
def moe_bias_from_lanes(bias_EQ2tJ: Tensor) -> Tensor:
    """Invert :func:`moe_bias_to_lanes`: ``[E, 2, padded I]``."""
    _extents(bias_EQ2tJ, ("E", "pI", "2", "ceil(I/512)", "4"), "bias", "gate and up, four lanes")
    return bias_EQ2tJ.permute(0, 2, 3, 4, 1).reshape(len(bias_EQ2tJ), 2, -1)


@public
def pack_moe_scales(scales_EqXtF: Tensor) -> Tensor:
    """Pack MoE scales of four tiles into each 128-partition buffer (``use_packed_scales``, nki-library 2.31).

    Tile t goes to buffer t//4, slot t%4; its rows 4n to 4n+3 to partitions ``32n + 4*slot`` onward. Other partitions
    are 0, among them those of rows that an I below 512 does not have. The number of slots is inferred, not documented.

    Scales are gate_up ``[E, 16, 2, H/512, I]`` or down ``[E, pI/8, ceil(I/512), H]``, with several tiles 16 rows too.
    Returns uint8: gate_up ``[E, 128, ceil(tiles/4), 2, I]``, down ``[E, 128, ceil(tiles/4), H]``.
    """
    check_dtype(scales_EqXtF, SCALE_DTYPES, "scales", VIEW)
    names = ("E", "16", "2", "tiles", "I") if scales_EqXtF.ndim == 5 else ("E", "pI/8", "tiles", "H")
    check_axes(scales_EqXtF, names, "scales")
    tiles_EqtXF = scales_EqXtF.detach().view(torch.uint8).movedim(-2, 2)
    E, rows, tiles, *rest = tiles_EqtXF.shape
    fewer = scales_EqXtF.ndim == 4 and tiles == 1 and rows < SCALE_ROWS
    expected = (E, rows if fewer else SCALE_ROWS, *scales_EqXtF.shape[2:])
    check_equal_shape(scales_EqXtF, expected, "scales", "a row per 8 of 128 partitions")
    buffers = -(-tiles // LANES)
    padded = tiles_EqtXF.new_zeros(E, SCALE_ROWS, buffers * LANES, *rest)
    padded[:, :rows, :tiles] = tiles_EqtXF
    # [E, quadrant, row, buffer, slot, ...] -> partition 32*quadrant + 4*slot + row; the upper half of each stays 0.
    split = padded.view(E, 4, 4, buffers, LANES, *rest)
    out = split.new_zeros(E, 4, 8, 4, buffers, *rest)
    out[:, :, :4] = split.movedim(4, 2)
    return out.view(E, PARTITIONS, buffers, *rest)


@public
def unpack_moe_scales(packed_EPbXF: Tensor, tiles: int, rows: int = SCALE_ROWS) -> Tensor:
    """Invert :func:`pack_moe_scales`: uint8 ``[E, 16, 2, tiles, I]`` or ``[E, rows, tiles, H]``.

    `tiles` are 512 wide. A packed buffer does not say their scale `rows`: 16, or pI/8 for down with I below 512.
    """
    check_dtype(packed_EPbXF, SCALE_DTYPES, "packed", VIEW)
    names = ("E", "128", "buffers", "2", "I") if packed_EPbXF.ndim == 5 else ("E", "128", "buffers", "H")
    check_axes(packed_EPbXF, names, "packed")
    experts, _, buffers, *rest = packed_EPbXF.shape
    check_equal_shape(packed_EPbXF, (experts, PARTITIONS, buffers, *rest), "packed", "a buffer has 128 partitions")
    if not is_whole(tiles) or -(-tiles // LANES) != buffers or not is_whole(rows) or not 0 < rows <= SCALE_ROWS:
        rule = f"whole numbers: tiles that fill {buffers} buffers of {LANES}, and 1 to {SCALE_ROWS} rows"
        fix = "tiles is ceil(I/512) of a down projection and H/512 of gate_up."
        raise ShapeError.about("tiles and rows", rule, f"tiles {tiles!r}, rows {rows!r}", fix)
    # Partition 32*quadrant + 4*slot + row; slots 4..7 are unused.
    slots = packed_EPbXF.detach().view(torch.uint8).reshape(experts, 4, 8, 4, buffers, *rest)[:, :, :LANES]
    unpacked = slots.movedim(2, 4).reshape(experts, SCALE_ROWS, buffers * LANES, *rest)
    return unpacked[:, :rows, :tiles].movedim(2, -2)
