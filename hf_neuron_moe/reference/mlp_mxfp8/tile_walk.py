"""The products of the MXFP8 MLP as the kernels walk them: ``execute="tiles"``, slow, to read and to compare with.

M, N are rows and columns of the result ``left @ right^T``, K is the contraction axis. One core runs::

    for each block of M x N:                    TILES_IN_BLOCK_M x TILES_IN_BLOCK_N tiles of the result
        for each block of K:                    TILES_IN_BLOCK_K slots of tile_k
            load_and_quantize_tile              both operands' tiles of the block, or reload them (spill_reload)
            for each tile of M x N:             tile_m x tile_n, at most 128 x 512
                PSUM = 0
                for each K tile of the block:
                    PSUM += nc_matmul_mx        one instruction, at most 512 of K
                accumulator in SBUF += PSUM     the first block of K stores
        the tiles go on: to the elementwise step of a phase, or rounded to the output

* Cores (LNC2): each walks its own half of the rows. Forward, recompute, phase 1 and phase 2 halve S, phase 3 halves 2I
  (gate rows, up rows) and phase 4 halves H. K is never cut, so no core needs another one's sums.
* K tiles are those of the swizzle: 512, then the remainder as 256 and 128, or 384 as one tile where a kernel groups it
  so. A remainder is the last slot of its block, with one or two instructions.
* A tile on chip is ``[K'/4, 4F']``: swizzled rows on at most 128 partitions, the values of one x4 word side by side.
  Its scales are one byte per 8 partitions and x4 column.
* With spill_reload an operand's tile is quantized once per core. Its bytes are kept in HBM and reloaded. Without it,
  each block that reads a tile quantizes it again. The bytes are the same.
* Gate and up share the quantized hidden tiles of a block. Two products into one result (phase 2 of release 2.30) are
  one walk: all blocks of the first product, then all of the second.

PSUM, accumulators and the sum inside an instruction are fp32. The documents leave the order inside an instruction open:
here it is that of one GEMM. The loop orders of a configuration ("mnk" and so on) change no sum and are not modeled.

Sources: nki-library 2.30 ``mlp_fwd_mxfp8``, ``mlp_bwd_mxfp8`` and ``matmul_mxfp8``; NKI ``nc_matmul_mx``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.formats.constants import LANES
from hf_neuron_moe.formats.mx import MXTensor, dequantize_mx
from hf_neuron_moe.formats.swizzle import tile_segments, unswizzle
from hf_neuron_moe.reference.described_operand import MXOperand
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig
from hf_neuron_moe.reference.tiled_product import cut

Products = Mapping[str, Sequence[tuple[MXOperand, MXOperand, int]]]
"""By the name of a result: left operand, right operand and the first position of the right one's F to read, summed."""

Spilled = dict[tuple[MXOperand, int, int], MXTensor]
"""Quantized tiles by operand and by where they begin in F and in swizzled rows."""


class TileWalk(NamedTuple):
    """How one core walks a product: tile sizes, tiles per block, and whether quantized tiles are spilled."""

    config: MatmulMxfp8KernelConfig
    spill_reload: bool = True


def walk_tiles(
    products: Products, walk: TileWalk, *, rows: slice, columns: int
) -> Iterator[tuple[slice, slice, dict[str, Tensor]]]:
    """Run the loops at the top of this file for the rows of one core; yield each finished tile of all results."""
    config = walk.config
    spilled: Spilled = {}
    blocks_of_K = [
        [(name, left, right, offset, k_tiles) for name, (left, right, offset) in zip(products, step)]
        for step in zip(*products.values(), strict=True)
        for k_tiles in k_blocks(step[0][0], config)
    ]
    for block_M in cut(rows, config.tile_m * config.TILES_IN_BLOCK_M):
        for block_N in cut(columns, config.tile_n * config.TILES_IN_BLOCK_N):
            tiles = [(m, n) for m in cut(block_M, config.tile_m) for n in cut(block_N, config.tile_n)]
            accumulators: dict[tuple[str, int, int], Tensor] = {}
            for block_K in blocks_of_K:
                if not walk.spill_reload:
                    spilled.clear()
                for name, left, right, offset, k_tiles in block_K:
                    for m, n in tiles:
                        right_n = slice(offset + n.start, offset + n.stop)
                        pairs = ((_reload(left, m, k, spilled), _reload(right, right_n, k, spilled)) for k in k_tiles)
                        psum = functools.reduce(torch.add, (nc_matmul_mx(*pair) for pair in pairs))
                        key = (name, m.start, n.start)
                        accumulators[key] = accumulators[key] + psum if key in accumulators else psum
            for m, n in tiles:
                yield m, n, {name: accumulators[name, m.start, n.start] for name in products}


def _reload(operand: MXOperand, f: slice, k: slice, spilled: Spilled) -> MXTensor:
    """Return a quantized tile that was spilled, or quantize it and spill it."""
    key = (operand, f.start, k.start)
    if key not in spilled:
        spilled[key] = operand.load_and_quantize_tile(f, k)
    return spilled[key]


def nc_matmul_mx(stationary: MXTensor, moving: MXTensor) -> Tensor:
    """Return the fp32 product ``[M, N]`` of two swizzled tiles: a sum over partitions and the 4 values of a word."""
    tiles = (unswizzle(dequantize_mx(tile.codes, tile.scales), "1x32") for tile in (stationary, moving))
    left_MK, right_NK = tiles  # exact fp32 values; a row holds partition after partition, four values each
    return torch.mm(left_MK, right_NK.t())


def k_blocks(operand: MXOperand, config: MatmulMxfp8KernelConfig) -> list[list[slice]]:
    """Return the K tiles of each block as ranges of swizzled rows, of which 4 elements of K share one.

    A swizzle tile longer than tile_k is cut into instructions of tile_k.
    """
    blocks: dict[int, list[slice]] = {}
    for segment in tile_segments(operand.K, operand.scheme):
        for start in range(segment.start, segment.stop, segment.tile):
            for k in cut(slice(start, start + segment.tile), config.tile_k):
                block = k.start // (config.tile_k * config.TILES_IN_BLOCK_K)
                blocks.setdefault(block, []).append(slice(k.start // LANES, k.stop // LANES))
    return list(blocks.values())
