"""Token-expert pairs sorted by expert, so that each expert multiplies one contiguous run of rows.

Legend: T tokens, K experts per token, R = T * K pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_neuron_moe.errors import ShapeError, refuse


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


def _negative_id(value: int) -> ShapeError:
    return refuse(
        ShapeError,
        where="experts",
        argument="top_k_index",
        expected="made of expert ids of 0 and above",
        got=f"the id {value}",
        remedy="Mark pairs that belong to no expert of this rank with an id of at least the number of experts.",
    )


def checked_ids(index_TK: Tensor) -> list[int]:
    """Return the expert ids ``[T * K]`` on the host.

    Raises:
        ShapeError: an id is negative.
    """
    flat: list[int] = index_TK.reshape(-1).tolist()
    if flat and min(flat) < 0:
        raise _negative_id(min(flat))
    return flat


def _sort_on_host(index_TK: Tensor, experts: int) -> SortedPairs:
    """The same with NumPy, whose calls take a fraction of the time of torch's where there are few pairs."""
    flat_R = index_TK.reshape(-1).long().numpy()
    lowest = int(flat_R.min(initial=0))
    if lowest < 0:
        raise _negative_id(lowest)
    flat_R = np.minimum(flat_R, experts)
    order_R = flat_R.argsort(kind="stable")
    ends_E = np.searchsorted(flat_R[order_R], np.arange(experts), side="right")
    slot_R = np.empty_like(order_R)
    slot_R[order_R] = np.arange(len(order_R))
    as_tensor = torch.from_numpy
    slot_TK, token_R = as_tensor(slot_R).view(index_TK.shape), as_tensor(order_R // index_TK.shape[1])
    return SortedPairs(as_tensor(order_R), token_R, slot_TK, [0, *ends_E.tolist()])


def _sort_by_torch(index_TK: Tensor, experts: int) -> SortedPairs:
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


def sort_pairs(index_TK: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of a top-k routing by expert; tokens stay in ascending order within an expert.

    Args:
        index_TK: integer expert ids; ids >= `experts` are sentinels of expert parallelism and sort behind the rest.
        experts: E.

    Raises:
        ShapeError: an id is negative.
    """
    return _sort_on_host(index_TK, experts) if index_TK.is_cpu else _sort_by_torch(index_TK, experts)
