"""The swizzled layout of matmul operands, and the x4 words of the hardware.

Letters: F free axis of the operand, K contraction axis, P = K/4 swizzled rows, T tile size, s = T/4 its stride,
n tiles of one size in a row. ``4F`` is one axis: quad f occupies columns 4f to 4f+3.

The map, for a tile that starts at k0 (nki-library 2.31, scheme wrapX)::

    Z[k0/4 + p, 4*f + j] = W[f, k0 + j*s + p]        p in [0, s), j in [0, 4)

so the four values of one x4 word lie s apart in K, and eight consecutive rows of one quad form one MX block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import VIEW, check_axes, check_dtype, check_multiple
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.formats.constants import (
    LANES,
    MX_BLOCK,
    TILE_SIZES,
    ElementFormat,
    SwizzleScheme,
    choose,
    element_format,
)
from hf_neuron_moe.formats.elements import check_contraction, codes_as_bytes


class Segment(NamedTuple):
    """A run of equal tiles along K: `tiles` tiles of `tile` elements from element `start` on."""

    start: int
    tile: int
    tiles: int

    @property
    def stop(self) -> int:
        """First element after the run."""
        return self.start + self.tile * self.tiles


@public
def tile_segments(K: int, scheme: str | SwizzleScheme = "wrapX") -> list[Segment]:
    """Split a contraction axis into runs of equal swizzle tiles.

    wrapX: tiles of 512; a remainder that is a multiple of 128 as one 256 tile and one 128 tile, as they fit. Any other
    remainder is one tile, which only operands prepared on the host can have. ``"1x32"`` is the map with tiles of 4.
    Returns at most three segments, in order, covering [0, K).
    """
    scheme = choose(SwizzleScheme, scheme, argument="scheme")
    check_contraction(K)
    if scheme is SwizzleScheme.CONSECUTIVE:
        return [Segment(0, LANES, K // LANES)]
    if scheme is SwizzleScheme.ONE_TILE:
        return [Segment(0, K, 1)]
    largest, *smaller = TILE_SIZES
    rest = K % largest
    segments = [Segment(0, largest, K // largest)] if largest <= K else []
    one_tile = rest % smaller[-1] or scheme is SwizzleScheme.WRAPX_SINGLE
    # The sizes are powers of two, so a remainder's binary digits name its tiles: 384 = 256 + 128.
    sizes = [rest] if one_tile else [tile for tile in smaller if rest & tile]
    for size in sizes if rest else ():
        segments.append(Segment(segments[-1].stop if segments else 0, size, 1))
    return segments


@public
def block_segments(K: int, scheme: str | SwizzleScheme = "wrapX") -> list[Segment]:
    """Split a contraction axis into runs of tiles that, seen as ``[4, s]``, are s/8 whole blocks ``[4, 8]``.

    They have the order of the rows of compact scales. That is :func:`tile_segments`, with runs of 32 for ``"1x32"``.
    """
    if choose(SwizzleScheme, scheme, argument="scheme") is SwizzleScheme.CONSECUTIVE:
        check_contraction(K)
        return [Segment(0, MX_BLOCK, K // MX_BLOCK)]
    return tile_segments(K, scheme)


@public
def k_map(K: int, scheme: str | SwizzleScheme = "wrapX", device: torch.device | str | None = None) -> Tensor:
    """Return the K index at each swizzled row and lane, int64 ``[K/4, 4]``: ``Z[p, 4f + j] = W[f, k_map[p, j]]``."""
    check_contraction(K)
    return swizzle(torch.arange(K, device=device).unsqueeze(0), scheme)


@public
def swizzle(weight_FK: Tensor, scheme: str | SwizzleScheme = "wrapX") -> Tensor:
    """Rearrange an operand ``[F, K]`` (a ``torch.nn.Linear`` weight, an activation) into the kernels' ``[K/4, 4F]``.

    Any dtype and strides come in, a contiguous tensor of that dtype comes out; nothing is rounded or padded.
    """
    check_axes(weight_FK, ("F", "K"), "weight_FK")
    weight_FK = weight_FK.detach()
    F, K = weight_FK.shape
    check_contraction(K, argument="weight_FK's last axis K")
    segments = tile_segments(K, scheme)
    out_P4F = weight_FK.new_empty(K // LANES, LANES * F)
    for start, tile, tiles in segments:
        stop = start + tile * tiles
        source_FnJs = weight_FK[:, start:stop].unflatten(1, (tiles, LANES, tile // LANES))
        rows = out_P4F[start // LANES : stop // LANES]
        rows.view(tiles, tile // LANES, F, LANES).copy_(source_FnJs.permute(1, 3, 0, 2))
    return out_P4F


@public
def unswizzle(swizzled_P4F: Tensor, scheme: str | SwizzleScheme = "wrapX") -> Tensor:
    """Return ``[F, K]``, contiguous, of ``[K/4, 4F]`` swizzled with `scheme` (the data do not tell which)."""
    P, F = check_swizzled(swizzled_P4F, argument="swizzled_P4F")
    swizzled_P4F = swizzled_P4F.detach()
    out_FK = swizzled_P4F.new_empty(F, P * LANES)
    for start, tile, tiles in tile_segments(P * LANES, scheme):
        stop = start + tile * tiles
        rows = swizzled_P4F[start // LANES : stop // LANES]
        source_nsFJ = rows.unflatten(1, (F, LANES)).unflatten(0, (tiles, tile // LANES))
        out_FK[:, start:stop].unflatten(1, (tiles, LANES, tile // LANES)).copy_(source_nsFJ.permute(2, 0, 3, 1))
    return out_FK


def check_swizzled(tensor_P4F: Tensor, *, argument: str) -> tuple[int, int]:
    """Check the shape of a swizzled operand and return (P, F)."""
    check_axes(tensor_P4F, ("K/4", "4F"), argument=argument)
    P, columns = tensor_P4F.shape
    remedy = "Swizzle the operand first; zero-pad K to a multiple of 32 before that."
    check_multiple(P, MX_BLOCK // LANES, argument=f"{argument}.shape[0] (K/4)", remedy=remedy)
    check_multiple(columns, LANES, argument=f"{argument}.shape[1] (4F)", remedy=remedy)
    return P, columns // LANES


@public
def pack_x4(codes: Tensor, fmt: str | ElementFormat = "e4m3fn") -> Tensor:
    """Pack four neighbouring codes into one hardware word, code 0 in the lowest bits.

    fp8: codes 0x11, 0x22, 0x33, 0x44 become 0x44332211. fp4: nibbles 1, 2, 3, 4 become 0x4321. Codes are uint8
    ``[..., 4F]`` (fp4: 0 to 15) or the fp8 dtype of `fmt`. Returns ``[..., F]`` int32 (fp8; a view of contiguous codes)
    or int16 (fp4) with the bits of NKI's unsigned words.
    """
    fmt = element_format(fmt)
    codes = codes_as_bytes(codes, fmt)
    columns = codes.shape[-1] if codes.ndim else 0
    check_multiple(columns, LANES, "codes.shape[-1]", remedy="Pack whole quads: the last axis is 4F.")
    if fmt.code_bits == 8:
        return codes.contiguous().view(fmt.carrier)
    if not codes.is_meta and bool((codes >> fmt.code_bits).any()):
        expected = f"{fmt.name} codes from 0 to {2**fmt.code_bits - 1}, one per byte"
        raise ShapeError.about("codes", expected, f"a code of {int(codes.max())}", "Pass unpacked codes.")
    lanes = codes.to(torch.int32).unflatten(-1, (-1, LANES)).unbind(-1)
    return (lanes[0] | lanes[1] << 4 | lanes[2] << 8 | lanes[3] << 12).to(fmt.carrier)


@public
def unpack_x4(words: Tensor, fmt: str | ElementFormat = "e4m3fn") -> Tensor:
    """Invert :func:`pack_x4`: uint8 codes ``[..., 4F]`` of signed or unsigned words, for fp8 a view where possible."""
    fmt = element_format(fmt)
    unsigned = torch.uint32 if fmt.carrier is torch.int32 else torch.uint16
    check_dtype(words, (fmt.carrier, unsigned), "words", VIEW)
    check_multiple(words.ndim, 1, "words.ndim", remedy="Pass a tensor with at least one axis.")
    words = words.detach().contiguous()
    if fmt.code_bits == 8:
        return words.view(torch.uint8)
    shifts = torch.arange(0, 16, fmt.code_bits, device=words.device, dtype=torch.int32)
    nibbles = words.view(torch.int16).to(torch.int32).unsqueeze(-1) >> shifts & 0xF
    return nibbles.to(torch.uint8).flatten(-2)
