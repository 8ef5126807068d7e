"""The three layouts of MX scale bytes and the rule that tells two of them apart.

Letters: B = K/32 blocks along K, F free axis. Block row i covers swizzled rows 8i to 8i+7 (nki-library 2.31).

========= ======================== ==========================================================================
layout    rows                     row that holds block row i
========= ======================== ==========================================================================
compact   K/32                     i
oversized K/4                      ``32*(i//4) + i%4``
packed    ``128*ceil(K/2048)``     ``128*(t//4) + 32*(r//4) + 4*(t%4) + r%4`` with ``t = i//16``, ``r = i%16``
========= ======================== ==========================================================================

The hardware reads a quadrant of 32 partitions' scales from its first four partitions. Oversized places them so, and
packed uses partitions 4, 8 and 12 onward of a quadrant for the next three K tiles of 512. Rows that hold no block are
0 when written here and undefined when a kernel wrote them: never compare them. Kernels take oversized or packed.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from hf_neuron_moe.checks import VIEW, check_dtype, check_multiple
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.formats.constants import MX_BLOCK, PACKED_SLAB_K, PACKED_SLAB_ROWS, SCALE_DTYPES, choose
from hf_neuron_moe.formats.elements import check_contraction

QUADRANT_ROWS, QUADRANT_SCALES = 32, 4
TILE_BLOCKS = 512 // MX_BLOCK
SLAB_TILES = PACKED_SLAB_K // 512


class ScaleLayout(StrEnum):
    """Where the scale of a block lies; see the table at the top of this file."""

    COMPACT = "compact"
    OVERSIZED = "oversized"
    PACKED = "packed"


@public
def scale_row_count(K: int, layout: str | ScaleLayout) -> int:
    """Return the number of rows of a scale tensor."""
    check_contraction(K)
    packed = PACKED_SLAB_ROWS * -(-K // PACKED_SLAB_K)
    rows = {ScaleLayout.COMPACT: K // MX_BLOCK, ScaleLayout.OVERSIZED: K // 4, ScaleLayout.PACKED: packed}
    return rows[choose(ScaleLayout, layout, argument="layout")]


def kernel_row_counts(K: int) -> tuple[int, int]:
    """Return the rows of oversized and of packed scales, which the kernels take."""
    return scale_row_count(K, ScaleLayout.OVERSIZED), scale_row_count(K, ScaleLayout.PACKED)


@public
def scale_rows(K: int, layout: str | ScaleLayout, device: torch.device | str | None = None) -> Tensor:
    """Return which row holds each block row: int64 ``[K/32]``, strictly one row per block."""
    check_contraction(K)
    block = torch.arange(K // MX_BLOCK, device=device)
    match choose(ScaleLayout, layout, argument="layout"):
        case ScaleLayout.COMPACT:
            return block
        case ScaleLayout.OVERSIZED:
            return QUADRANT_ROWS * (block // QUADRANT_SCALES) + block % QUADRANT_SCALES
        case ScaleLayout.PACKED:
            tile, row = block // TILE_BLOCKS, block % TILE_BLOCKS
            slab = PACKED_SLAB_ROWS * (tile // SLAB_TILES)
            quadrant = QUADRANT_ROWS * (row // QUADRANT_SCALES)
            return slab + quadrant + QUADRANT_SCALES * (tile % SLAB_TILES) + row % QUADRANT_SCALES


@public
def detect_scale_layout(rows: int, K: int) -> ScaleLayout:
    """Tell oversized from packed scales by their number of rows, as the kernels do, which do not take compact ones.

    For K = 512 both have 128 rows and the same content; the answer is then oversized.
    """
    oversized, packed = kernel_row_counts(K)
    if rows in (oversized, packed):
        return ScaleLayout.OVERSIZED if rows == oversized else ScaleLayout.PACKED
    hint = " These are compact scales; expand them with to_oversized or to_packed." if rows == K // MX_BLOCK else ""
    expected = f"{oversized} (oversized) or {packed} (packed) for K={K}"
    fix = f"Check K and that the scales belong to this operand.{hint}"
    raise ShapeError.about("rows of the scales", expected, rows, fix)


@public
def to_oversized(compact_BF: Tensor) -> Tensor:
    """Expand compact scales ``[..., K/32, F]`` (uint8 or e8m0) to oversized uint8 ``[..., K/4, F]``, 0 where unused."""
    return _expand(compact_BF, ScaleLayout.OVERSIZED)


@public
def to_packed(compact_BF: Tensor) -> Tensor:
    """Pack compact scales ``[..., K/32, F]`` to ``[..., 128*ceil(K/2048), F]``; otherwise as :func:`to_oversized`."""
    return _expand(compact_BF, ScaleLayout.PACKED)


@public
def to_compact(scales: Tensor, K: int) -> Tensor:
    """Collect compact uint8 scales ``[..., K/32, F]`` from oversized or packed ones, for contraction size K."""
    scales = _as_bytes(scales)
    layout = detect_scale_layout(scales.shape[-2], K)
    return scales.index_select(-2, scale_rows(K, layout, scales.device))


@public
def oversized_to_packed(oversized: Tensor) -> Tensor:
    """Convert oversized scales ``[..., K/4, F]`` to packed ones."""
    return to_packed(to_compact(oversized, 4 * _as_bytes(oversized).shape[-2]))


@public
def packed_to_oversized(packed: Tensor, K: int) -> Tensor:
    """Convert packed scales of an operand with contraction size K to oversized ones."""
    packed = _as_bytes(packed)
    expected, fix = scale_row_count(K, ScaleLayout.PACKED), "Check K, and whether the scales are packed at all."
    if packed.shape[-2] != expected:
        raise ShapeError.about("rows of the scales", f"{expected} (packed, K={K})", packed.shape[-2], fix)
    return to_oversized(packed.index_select(-2, scale_rows(K, ScaleLayout.PACKED, packed.device)))


def _expand(compact_BF: Tensor, layout: ScaleLayout) -> Tensor:
    compact_BF = _as_bytes(compact_BF)
    *batch, B, F = compact_BF.shape
    K = B * MX_BLOCK
    out = compact_BF.new_zeros(*batch, scale_row_count(K, layout), F)
    return out.index_copy_(-2, scale_rows(K, layout, compact_BF.device), compact_BF)


def _as_bytes(scales: Tensor) -> Tensor:
    check_dtype(scales, SCALE_DTYPES, "scales", VIEW)
    remedy = "Pass scales of shape [rows, F], with leading axes for experts if any."
    check_multiple(max(scales.ndim - 1, 0), 1, "scales.ndim - 1", remedy=remedy)
    check_multiple(scales.shape[-2], 1, "rows of the scales", remedy=remedy)
    return scales.detach().view(torch.uint8)
