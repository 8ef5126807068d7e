"""Products of MX operands, tile by tile: fp32 GEMMs of exact MX values.

Letters: M rows of the result (F of the left operand), N columns (F of the right one), K contraction axis. K is never
cut: every sum is one fp32 GEMM, and operands are held in fp32 only for one tile. With a `walk` the same values are
summed as :mod:`~hf_neuron_moe.reference.mlp_mxfp8.tile_walk` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.reference.described_operand import MXOperand
from hf_neuron_moe.reference.mlp_mxfp8.tile_walk import Products, TileWalk, walk_tiles
from hf_neuron_moe.reference.tiled_product import cut

ROWS = 512  # rows of a tile; the elementwise work between two products touches this many rows of a few buffers
COLUMNS = 2048  # of a tile; more where K is short, so that left operands are loaded fewer times, less where it is long
_RIGHT_ELEMENTS = 1 << 22  # elements of a right operand's tile up to which it is widened, 16 MiB of fp32
_MOST_RIGHT_ELEMENTS = 1 << 24  # elements above which it is narrowed, 64 MiB


def product_tiles(
    pairs: Sequence[tuple[MXOperand, MXOperand]],
    scratch: Scratch,
    *,
    rows: slice,
    k_major: tuple[bool, bool] = (False, False),
    walk: TileWalk | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the tiles of ``sum(left @ right^T for left, right in pairs)``, one fp32 accumulator for all pairs.

    A tile is rows and columns of the result, and fp32 values, valid until the next one. `rows` is the part of M to
    compute. `k_major` is the memory order of the left and the right values: a property of the product, not of the
    operands' modes, so that all modes run the same GEMMs.
    """
    products = {"product": [(left, right, 0) for left, right in pairs]}
    for part, columns, made in _tiles(products, scratch, rows, pairs[0][1].F, k_major, walk):
        yield part, columns, made["product"]


def gate_up_tiles(
    hidden: MXOperand,
    gate_up: MXOperand,
    scratch: Scratch,
    *,
    rows: slice,
    wanted: Collection[str] = ("gate", "up"),
    walk: TileWalk | None = None,
) -> Iterator[tuple[slice, slice, dict[str, Tensor]]]:
    """Yield rows, columns of I, and by name the fp32 tiles of ``Q(X) Q(Wg)^T`` and ``Q(X) Q(Wu)^T`` that are `wanted`.

    `hidden` is X (F = S, K = H), quantized once for both, `gate_up` the fused weight (F = 2I, gate first, K = H).
    `rows` is the part of S to compute.
    """
    inner = gate_up.F // 2
    products = {name: [(hidden, gate_up, base)] for name, base in (("gate", 0), ("up", inner)) if name in wanted}
    return _tiles(products, scratch, rows, inner, (False, False), walk) if products else iter(())


def _tiles(
    products: Products, scratch: Scratch, rows: slice, size: int, k_major: tuple[bool, bool], walk: TileWalk | None
) -> Iterator[tuple[slice, slice, dict[str, Tensor]]]:
    """Yield rows, columns below `size` and the values of all products, which have one K and are in one tile."""
    if walk is not None:
        yield from walk_tiles(products, walk, rows=rows, columns=size)
        return
    summands = [(name, *summand) for name, pairs in products.items() for summand in pairs]
    right = summands[0][2]
    widest = min(max(COLUMNS, _RIGHT_ELEMENTS // right.K), _MOST_RIGHT_ELEMENTS // right.K) // ROWS * ROWS
    step = max(ROWS, widest // (right.F // size) // ROWS * ROWS)  # tiles of gate and up share the room
    for columns in cut(size, step):
        rights = [
            right.load(
                base + columns.start, base + columns.stop, k_major=k_major[1], scratch=scratch, name=f"mx_right{n}"
            )
            for n, (_, _, right, base) in enumerate(summands)
        ]
        for part in cut(rows, ROWS):
            shape, loaded = (part.stop - part.start, columns.stop - columns.start), None
            made: dict[str, Tensor] = {}
            for (name, left, *_), right_NK in zip(summands, rights, strict=True):
                if left is not loaded:
                    left_MK = left.load(part.start, part.stop, k_major=k_major[0], scratch=scratch, name="mx_left")
                    loaded = left
                if name in made:
                    made[name].addmm_(left_MK, right_NK.t())
                else:
                    values = scratch.get(f"mx_{name}", shape, torch.float32)
                    made[name] = torch.mm(left_MK, right_NK.t(), out=values)
            yield part, columns, made
