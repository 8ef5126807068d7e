"""A product as the tensor engine makes it: tile by tile, contraction tile after contraction tile.

Legend: M rows, N columns, K contraction axis. The engine multiplies up to 128 values of the contraction axis at a time,
one per partition. A PSUM bank keeps the fp32 sums of one tile: 128 partitions of up to 512 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PARTITIONS = 128
BANK = 512  # fp32 values of one partition of a PSUM bank


def cut(part: slice | int, step: int) -> list[slice]:
    """Return the tiles of a range, or of an axis of that size; the last one holds what remains."""
    whole = part if isinstance(part, slice) else slice(0, part)
    return [slice(start, min(start + step, whole.stop)) for start in range(whole.start, whole.stop, step)]


def tiled_product(
    left_MK: Tensor, right_KN: Tensor, *, rows: int, columns: int, contraction: Sequence[slice | Tensor] | None = None
) -> Tensor:
    """Return the fp32 product of fp32 operands, by tiles of ``rows x columns``.

    `contraction` has the parts of K that are multiplied one after the other; None is tiles of 128. Each part is added
    to the sums in fp32, in this order.
    """
    parts = cut(left_MK.shape[1], PARTITIONS) if contraction is None else contraction
    product_MN = left_MK.new_empty((len(left_MK), right_KN.shape[1]))
    for row in cut(len(left_MK), rows):
        for column in cut(right_KN.shape[1], columns):
            psum = torch.zeros_like(product_MN[row, column])
            for part in parts:
                psum.addmm_(left_MK[row, part], right_KN[part, column])
            product_MN[row, column] = psum
    return product_MN
