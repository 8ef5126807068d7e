"""Token-expert pairs sorted by expert, so that each expert multiplies one contiguous run of rows.

Legend: T tokens, K experts per token, R = T * K pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedPairs:
    """The pairs in expert order.

    Attributes:
        order_R: position of each sorted pair in the flattened ``[T, K]``.
        token_R: token of each sorted pair.
        slot_TK: position of each pair in sorted order; the inverse of the sort.
        offsets: E + 1 row offsets on the host; pairs beyond the last one belong to other ranks.
    """

    order_R: Tensor
    token_R: Tensor
    slot_TK: Tensor
    offsets: list[int]

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """``(expert, first row, end row)`` of every expert that has rows."""
        bounds = zip(self.offsets, self.offsets[1:], strict=False)
        return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if end > start]


def sort_pairs(index_TK: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of a top-k routing by expert; tokens stay in ascending order within an expert.

    Args:
        index_TK: integer expert ids; ids >= `experts` are sentinels of expert parallelism and sort behind the rest.
        experts: E.
    """
    flat = index_TK.reshape(-1).clamp(max=experts)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    token = torch.div(order, index_TK.shape[1], rounding_mode="floor")
    return SortedPairs(order, token, slot.view(index_TK.shape), offsets)
