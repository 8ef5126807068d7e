"""The cheapest choice of activation policies within a byte budget: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One policy that a block could have.

    Attributes:
        keep: its name.
        saved: bytes per token that it keeps.
        flops: operations per token that its backward computes again.
    """

    keep: str
    saved: float
    flops: int


Trail = tuple[Any, Any]
"""How a sum was reached: ``(trail before, what was added)``."""

_Sum = tuple[float, int, Trail | None]
"""Bytes, operations, and the way there."""


def cheapest_plan(blocks: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """Choose one option per block so that the saved bytes stay within `limit` and the fewest operations are repeated.

    Among plans with equally many operations the one that keeps the fewest bytes wins. Equal blocks are summed up by
    themselves first: most models have two or three kinds of blocks, and which of equal ones gets which option does not
    matter.

    Args:
        blocks: each block's options.
        limit: most bytes per token, all blocks together.

    Returns:
        The options in the order of `blocks`; None where even the smallest ones exceed the limit.
    """
    kinds: dict[tuple[Option, ...], list[int]] = {}
    for number, options in enumerate(blocks):
        kinds.setdefault(_undominated(options), []).append(number)
    groups = sorted(kinds.items(), key=lambda group: len(group[1]))
    least = [len(members) * min(option.saved for option in options) for options, members in groups]
    room = limit - sum(least)
    if room < 0:
        return None
    total: list[_Sum] = [(0.0, 0, None)]
    for number, (options, members) in enumerate(groups):
        own = _sums_of_equal(options, len(members), least[number] + room)
        if number == len(groups) - 1:
            total = [_best_pair(total, own, limit)]
        else:
            total = _frontier(
                (saved + more, flops + again, (trail, own_trail))
                for saved, flops, trail in total
                for more, again, own_trail in own
                if saved + more <= sum(least[: number + 1]) + room
            )
    plan: dict[int, Option] = {}
    _, _, trail = min(total, key=lambda entry: (entry[1], entry[0]))
    for _, members in reversed(groups):
        assert trail is not None, "every group added to the trail"
        trail, own_trail = trail
        for member in members:
            own_trail, plan[member] = own_trail
    return [plan[number] for number in range(len(blocks))]


def _sums_of_equal(options: Sequence[Option], count: int, room: float) -> list[_Sum]:
    """Return what `count` blocks with the same options can add up to within `room` bytes."""
    sums: list[_Sum] = [(0.0, 0, None)]
    smallest = min(option.saved for option in options)
    for left in range(count - 1, -1, -1):
        sums = _frontier(
            (saved + option.saved, flops + option.flops, (trail, option))
            for saved, flops, trail in sums
            for option in options
            if saved + option.saved <= room - left * smallest
        )
    return sums


def _best_pair(first: Sequence[_Sum], second: Sequence[_Sum], limit: float) -> _Sum:
    """Return the sum of one entry of each with the fewest operations within `limit`; both are frontiers."""
    sizes = [entry[0] for entry in second]
    fitting = []
    for saved, flops, trail in first:
        position = (
            bisect.bisect_right(sizes, limit - saved) - 1
        )  # of those that fit, the last has the fewest operations
        if position >= 0:
            more, again, own_trail = second[position]
            fitting.append((saved + more, flops + again, (trail, own_trail)))
    return min(fitting, key=lambda entry: (entry[1], entry[0]))


def _frontier(sums: Iterable[_Sum]) -> list[_Sum]:
    """Return the sums that no other beats or equals in both respects: bytes ascending, operations descending."""
    kept: list[_Sum] = []
    for entry in sorted(sums, key=lambda entry: (entry[0], entry[1])):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def _undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options that no other beats or equals in both respects; of equal ones the first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.saved, option.flops)):
        if not kept or option.flops < kept[-1].flops:
            kept.append(option)
    return tuple(kept)
