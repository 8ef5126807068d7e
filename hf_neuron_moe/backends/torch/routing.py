"""Token-expert pairs sorted by expert, so that each expert multiplies one contiguous run of rows.

Legend: T tokens, K experts per token, R = T * K pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.errors import ShapeError


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


_BY_HAND = 64
"""Up to this many pairs sorting a Python list takes less time than dispatching torch's operators."""


def _negative_id(value: int) -> ShapeError:
    return ShapeError.about(
        "top_k_index",
        "made of expert ids of 0 and above",
        f"the id {value}",
        "Mark pairs that belong to no expert of this rank with an id of at least the number of experts.",
    ).named("experts")


def checked_ids(index_TK: Tensor) -> list[int]:
    """Return the expert ids ``[T * K]`` on the host.

    Raises:
        ShapeError: an id is negative.
    """
    flat: list[int] = index_TK.reshape(-1).tolist()
    if flat and min(flat) < 0:
        raise _negative_id(min(flat))
    return flat


def _sort_by_hand(index_TK: Tensor, experts: int) -> SortedPairs:
    flat = checked_ids(index_TK)
    order = sorted(range(len(flat)), key=flat.__getitem__)
    offsets, slot, top_k = [0] * (experts + 1), [0] * len(flat), index_TK.shape[1]
    for position, pair in enumerate(order):
        slot[pair] = position
        if flat[pair] < experts:
            offsets[flat[pair] + 1] += 1
    for expert in range(experts):
        offsets[expert + 1] += offsets[expert]
    tokens = [pair // top_k for pair in order]
    order_R, token_R, slot_R = torch.tensor((order, tokens, slot), dtype=torch.int64).unbind(0)
    return SortedPairs(order_R, token_R, slot_R.view(index_TK.shape), offsets)


def sort_pairs(index_TK: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of a top-k routing by expert; tokens stay in ascending order within an expert.

    Args:
        index_TK: integer expert ids; ids >= `experts` are sentinels of expert parallelism and sort behind the rest.
        experts: E.

    Raises:
        ShapeError: an id is negative.
    """
    if index_TK.numel() <= _BY_HAND and index_TK.device.type == "cpu":
        return _sort_by_hand(index_TK, experts)
    flat = index_TK.reshape(-1).clamp(max=experts)
    lowest = int(flat.min()) if flat.numel() else 0
    if lowest < 0:
        raise _negative_id(lowest)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    token = torch.div(order, index_TK.shape[1], rounding_mode="floor")
    return SortedPairs(order, token, slot.view(index_TK.shape), offsets)
