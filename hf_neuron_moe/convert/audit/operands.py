"""Reads a stored operand back as a plain matrix, by the index formulas of the kernels' documents.

The second opinion of ``verify`` and ``inspect``: nothing here calls the functions that wrote the operand. So a mistake
in a swizzle, a scale's place or an expert's axis shows as a wrong number instead of cancelling out. It is not fast.

F rows of the matrix, K contraction axis, P = K/4 swizzled rows, Q partitions, t tiles, j = 4 lanes of an x4 word.
Formulas: nki-library 2.31 ``mlp_fwd_mxfp8`` (swizzle and scale layouts), 2.29 ``moe_cte`` (words of experts).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_neuron_moe.convert.manifest import WrittenTensor
from hf_neuron_moe.errors import ConversionError

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Read = Callable[[WrittenTensor, int | None], Tensor]  # Of a stored tensor; with an expert index, that expert's part


def read_operand(stored: WrittenTensor, scales_of: WrittenTensor | None, expert: int | None, read: Read) -> Tensor:
    """Return one matrix as stored, padding included: fp32 ``[F, K]``; `expert` is None for a weight without experts.

    `stored` holds values, codes or words of one orientation and rank, `scales_of` their block scales, None for bf16.
    """
    formula = FORMULAS.get(stored.layout)
    if formula is None:
        expected = f"one that can be read back ({', '.join(FORMULAS)})"
        fix = "Add its formula to FORMULAS in convert/audit/operands.py, or verify without the source."
        raise ConversionError.about(f"layout of {stored.name}", expected, repr(stored.layout), fix)
    values = read(stored, expert)
    return formula(values, _NO_SCALES if scales_of is None else read(scales_of, expert).view(torch.uint8), stored)


def _natural(swizzled: Tensor) -> Tensor:
    """Take a matrix ``[F, K]`` out of a swizzled one, ``[K/4, 4F]``."""
    row_K, lane_K = k_positions(4 * swizzled.shape[0])
    return swizzled.view(swizzled.shape[0], -1, 4)[row_K, :, lane_K].t()


def k_positions(K: int) -> tuple[Tensor, Tensor]:
    """Return for every k of a swizzled contraction axis its row and its lane: int64 ``[K]`` each.

    A tile from k0 of size T puts ``k0 + j*T/4 + p`` into row ``k0/4 + p``, lane j. Tiles are 512 as long as they fit; a
    rest that is a multiple of 128 is cut into 256 and 128; any other rest is one tile.
    """
    rows, lanes, start = [], [], 0
    while start < K:
        rest = K - start
        size = 512 if rest >= 512 else rest if rest % 128 else 256 if rest >= 256 else 128
        inside = torch.arange(size)
        rows.append(start // 4 + inside % (size // 4))
        lanes.append(inside // (size // 4))
        start += size
    return torch.cat(rows), torch.cat(lanes)


def scale_row_of(block: Tensor, layout: str | None) -> Tensor:
    """Return the row of a scale tensor that holds block rows; a block is 8 swizzled rows."""
    if layout == "oversized":
        return 32 * (block // 4) + block % 4
    if layout == "packed":
        tile, rest = block // 16, block % 16
        return 128 * (tile // 4) + 32 * (rest // 4) + 4 * (tile % 4) + rest % 4
    return block


def _read_codes(codes_FK: Tensor, scales: Tensor, stored: WrittenTensor) -> Tensor:
    """Codes of the MLP kernels in Linear's order, with their scales."""
    block_K = k_positions(codes_FK.shape[1])[0] // 8
    return _e4m3(codes_FK) * _power(scales[scale_row_of(block_K, stored.scale_layout)].t())


def _read_words(words: Tensor, scales: Tensor, stored: WrittenTensor) -> Tensor:
    """One expert of ``moe_cte``'s MX weights: gate_up ``[128, 2, t, I]`` along H, down ``[Q, t, H]`` along I.

    Without a gate, up has 1 for the 2.
    """
    lanes, packed = _lanes(words, stored.layout.startswith("mxfp4")), stored.scale_layout == "packed"  # [..., 4]
    partition = torch.arange(words.shape[0])
    if words.ndim == 4:
        scales_Q2tI = _unpack_rows(scales, words.shape[2]).movedim(1, 2) if packed else scales
        matrix_Q2tIj = lanes * _power(scales_Q2tI[partition // 8])[..., None]
        # h = j*(H/4) + t*128 + q: [2, I, j, t, q]
        return matrix_Q2tIj.permute(1, 3, 4, 2, 0).reshape(words.shape[1] * words.shape[3], -1)
    scales_QtH = _unpack_rows(scales, words.shape[1]) if packed else scales
    matrix_QtHj = lanes * _power(scales_QtH[partition // 8])[..., None]
    # i = t*512 + j*Q + q: [H, t, j, q]
    return matrix_QtHj.permute(2, 1, 3, 0).reshape(words.shape[2], -1)


def _read_permuted(words: Tensor, scales: Tensor, stored: WrittenTensor) -> Tensor:
    """The same, where H and I are permuted."""
    matrix = _read_words(words, scales, stored)
    if words.ndim == 3:
        return matrix[:, _group_places(matrix.shape[1], 512)]
    rows = _group_places(words.shape[3], 512)
    halves = torch.cat([half * len(rows) + rows for half in range(words.shape[1])])
    return matrix[halves][:, _group_places(matrix.shape[1], matrix.shape[1])]


def _group_places(size: int, largest: int) -> Tensor:
    """Where each value of a permuted axis lies: group q of a tile, in it s = 8r + i, at ``r*(tile/4) + 8q + i``."""
    tile = min(size, largest)
    place = torch.arange(size)
    inside = place % tile
    return place - inside + inside % 32 // 8 * (tile // 4) + inside // 32 * 8 + inside % 8


def _unpack_rows(packed_QbX: Tensor, tiles: int) -> Tensor:
    """Take ``[16, tiles, ...]`` out of packed scales ``[128, ceil(tiles/4), ...]``: 4 rows of a quadrant per tile."""
    tile, row = torch.arange(tiles), torch.arange(16)[:, None]
    return packed_QbX[32 * (row // 4) + 4 * (tile % 4) + row % 4, tile // 4]


def _lanes(words: Tensor, fp4: bool) -> Tensor:
    """Decode x4 words, lane 0 in the lowest bits: fp32 with one more axis of 4."""
    raw = words.contiguous().view(torch.uint8)
    if not fp4:
        return _e4m3(raw.view(*words.shape, 4))
    nibbles = torch.stack([raw & 15, raw >> 4], -1).view(*words.shape, 4)
    magnitude = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32)[(nibbles & 7).long()]
    return torch.where(nibbles >= 8, -magnitude, magnitude)


def _e4m3(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _power(scales: Tensor) -> Tensor:
    """2**(byte - 127); byte 255 is NaN."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float32), torch.arange(256) - 127)
    powers[255] = torch.nan
    return powers[scales.long()]


_NO_SCALES = torch.empty(0, dtype=torch.uint8)
FORMULAS: dict[str, Callable[[Tensor, Tensor, WrittenTensor], Tensor]] = {
    "bf16_fused": lambda values, _, stored: values.float(),
    # The MoE kernels take an expert's matrix with the contraction axis first, the MLP kernels as Linear has it.
    "bf16_kernel": lambda values, _, stored: (values.t() if len(stored.shape) == 3 else values).float(),
    "bf16_swizzled": lambda values, _, stored: _natural(values).float(),
    "mxfp8_fused_codes": lambda codes, *others: _read_codes(codes.view(torch.uint8), *others),
    "mxfp8_swizzled_codes": lambda codes, *others: _read_codes(_natural(codes.view(torch.uint8)), *others),
    **dict.fromkeys(("mxfp8_moe_words", "mxfp4_moe_words"), _read_words),
    **dict.fromkeys(("mxfp8_moe_permuted_words", "mxfp4_moe_permuted_words"), _read_permuted),
}
"""By layout: fp32 ``[F, K]`` of one matrix's values, codes or words, its scales (uint8) and what describes it."""
