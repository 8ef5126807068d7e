"""Products of MX operands, tile by tile: fp32 GEMMs of exact MX values.

Letters: M rows of the result (F of the left operand), N columns (F of the right one), K contraction axis, never cut:
every sum is one fp32 GEMM, and operands are held in fp32 only for one tile. With a `walk` the same values are summed as
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.tile_walk` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.reference.described_operand import MXOperand
from hf_neuron_moe.reference.mlp_mxfp8.tile_walk import TileWalk, cut, walk_gate_up, walk_sum

ROWS = 512  # rows of a tile; the elementwise work between two products touches this many rows of a few buffers
COLUMNS = 2048  # of a tile; more where K is short, so that left operands are loaded fewer times, less where it is long
_RIGHT_ELEMENTS = 1 << 22  # elements of a right operand's tile up to which it is widened, 16 MiB of fp32
_MOST_RIGHT_ELEMENTS = 1 << 24  # elements above which it is narrowed, 64 MiB


def column_step(K: int) -> int:
    """Columns per tile for a contraction size."""
    wanted, most = max(COLUMNS, _RIGHT_ELEMENTS // K), _MOST_RIGHT_ELEMENTS // K
    return max(ROWS, min(wanted, most) // ROWS * ROWS)


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
    if walk is not None:
        yield from walk_sum(pairs, walk, rows=rows)
        return
    step = column_step(max(right.K for _, right in pairs))
    for width in cut(slice(0, pairs[0][1].F), step):
        rights = [
            right.load(width.start, width.stop, k_major=k_major[1], scratch=scratch, name=f"mx_right{number}")
            for number, (_, right) in enumerate(pairs)
        ]
        for part in cut(rows, ROWS):
            shape = (part.stop - part.start, width.stop - width.start)
            values = scratch.get("mx_product", shape, torch.float32)
            for number, ((left, _), right_NK) in enumerate(zip(pairs, rights, strict=True)):
                left_MK = left.load(part.start, part.stop, k_major=k_major[0], scratch=scratch, name="mx_left")
                if number == 0:
                    torch.mm(left_MK, right_NK.t(), out=values)
                else:
                    values.addmm_(left_MK, right_NK.t())
            yield part, width, values


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
    if walk is not None:
        yield from walk_gate_up(hidden, gate_up, walk, rows=rows, wanted=wanted)
        return
    inner = gate_up.F // 2
    offsets = {name: offset for name, offset in (("gate", 0), ("up", inner)) if name in wanted}
    step = max(ROWS, column_step(gate_up.K) // 2 // ROWS * ROWS)
    for columns in cut(slice(0, inner), step):
        weights = {}
        for name, offset in offsets.items():
            first, last = offset + columns.start, offset + columns.stop
            weights[name] = gate_up.load(first, last, k_major=False, scratch=scratch, name=f"mx_{name}_weight")
        for part in cut(rows, ROWS):
            x_RH = hidden.load(part.start, part.stop, k_major=False, scratch=scratch, name="mx_left")
            shape, made = (part.stop - part.start, columns.stop - columns.start), {}
            for name, weight_IH in weights.items():
                made[name] = torch.mm(x_RH, weight_IH.t(), out=scratch.get(f"mx_{name}", shape, torch.float32))
            yield part, columns, made
