"""Products of MX operands, tile by tile: fp32 GEMMs of exact MX values.

Letters: M rows of the result (F of the left operand), N its columns (F of the right one), K contraction axis. K is
never cut: every sum is one fp32 GEMM, and operands are held in fp32 only for one tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.reference.described_operand import MXOperand

ROWS = 512
"""Rows of a tile; the elementwise work between two products touches this many rows of a few buffers."""

COLUMNS = 2048
"""Columns of a tile; more where K is short, so that left operands are brought in fewer times, less where it is long."""

_RIGHT_ELEMENTS = 1 << 22
"""Elements of a right operand's tile up to which it is widened, 16 MiB of fp32."""

_MOST_RIGHT_ELEMENTS = 1 << 24
"""Elements above which it is narrowed, 64 MiB."""


class Tile(NamedTuple):
    """One part of a product: rows and columns in the result, and fp32 values, valid until the next tile."""

    rows: slice
    columns: slice
    values: Tensor


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
) -> Iterator[Tile]:
    """Yield the tiles of ``sum(left @ right^T for left, right in pairs)``, one fp32 accumulator for all pairs.

    All left operands have the same F, and so have all right ones. `rows` is the part of M to compute. `k_major` is the
    memory order of the left and the right values; a property of the product, not of the operands' modes, so that all
    modes run the same GEMMs.
    """
    last = pairs[0][1].F
    step = column_step(max(right.K for _, right in pairs))
    for column in range(0, last, step):
        width = slice(column, min(column + step, last))
        rights = [
            right.load(width.start, width.stop, k_major=k_major[1], scratch=scratch, name=f"mx_right{number}")
            for number, (_, right) in enumerate(pairs)
        ]
        for part in row_tiles(rows):
            shape = (part.stop - part.start, width.stop - width.start)
            values = scratch.get("mx_product", shape, torch.float32)
            for number, ((left, _), right_NK) in enumerate(zip(pairs, rights, strict=True)):
                left_MK = left.load(part.start, part.stop, k_major=k_major[0], scratch=scratch, name="mx_left")
                if number == 0:
                    torch.mm(left_MK, right_NK.t(), out=values)
                else:
                    values.addmm_(left_MK, right_NK.t())
            yield Tile(part, width, values)


class GateUpTile(NamedTuple):
    """Rows, columns of I, and the fp32 accumulators of gate and up (None where not asked for)."""

    rows: slice
    columns: slice
    gate: Tensor | None
    up: Tensor | None


def gate_up_tiles(
    hidden: MXOperand, gate_up: MXOperand, scratch: Scratch, *, rows: slice, gate: bool = True, up: bool = True
) -> Iterator[GateUpTile]:
    """Yield tiles of ``Q(X) Q(Wg)^T`` and ``Q(X) Q(Wu)^T``; X is quantized once for both.

    `hidden` is X (F = S, K = H), `gate_up` the fused weight (F = 2I, gate first, K = H). `rows` is the part of S to
    compute, `gate` and `up` say which of both is wanted.
    """
    inner = gate_up.F // 2
    wanted = [(name, offset) for name, offset, want in (("gate", 0, gate), ("up", inner, up)) if want]
    step = max(ROWS, column_step(gate_up.K) // 2 // ROWS * ROWS)
    for column in range(0, inner, step):
        stop = min(column + step, inner)
        weights = {
            name: gate_up.load(offset + column, offset + stop, k_major=False, scratch=scratch, name=f"mx_{name}_weight")
            for name, offset in wanted
        }
        for part in row_tiles(rows):
            x_RH = hidden.load(part.start, part.stop, k_major=False, scratch=scratch, name="mx_left")
            out: dict[str, Tensor] = {}
            for name, weight_IH in weights.items():
                values = scratch.get(f"mx_{name}", (part.stop - part.start, stop - column), torch.float32)
                out[name] = torch.mm(x_RH, weight_IH.t(), out=values)
            yield GateUpTile(part, slice(column, stop), out.get("gate"), out.get("up"))


def row_tiles(rows: slice, size: int = ROWS) -> list[slice]:
    """Cut a range of rows into tiles."""
    return [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]
