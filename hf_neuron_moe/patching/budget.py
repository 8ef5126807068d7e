"""The cheapest choice of activation policies within a byte budget: a multiple-choice knapsack.

Buying the steps between policies in the order of what a byte saves gives a plan and, by the price of a byte, a bound
from below (Lagrangian relaxation). Then blocks are added one by one. Of the sums that a better plan could go through,
those are kept that no other beats in both bytes and operations. That is exact. Where there are too many they are
thinned out, and the plan is near the best one instead, by a known distance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SUMS = (1 << 9, 1 << 13)
"""Most sums that are kept from block to block: in a first search, which is exact for most models, and in a second."""


@dataclass(frozen=True)
class Option:
    """One policy that a block could have."""

    keep: str
    saved: float  # bytes per token that it keeps
    flops: int  # operations per token that its backward computes again


@dataclass(frozen=True)
class Plan:
    """One option per block."""

    options: tuple[Option, ...]  # in the order of the blocks
    gap: float = 0.0  # operations per token by which the plan may be above the best one; 0 where it is the best

    @property
    def saved(self) -> float:
        """Bytes per token, all blocks together."""
        return sum(option.saved for option in self.options)

    @property
    def flops(self) -> int:
        """Operations per token that are computed again, all blocks together."""
        return sum(option.flops for option in self.options)


def cheapest_plan(blocks: Sequence[Sequence[Option]], limit: float) -> Plan | None:
    """Choose one option per block so that the saved bytes stay within `limit` and the fewest operations are repeated.

    The plan is the best one, and among those the one that keeps the fewest bytes. That does not hold where there are
    more sums than a search may keep, as of several dozens of blocks of different sizes. Then its `gap` is at most the
    largest step between two policies of one block, for 64 sizes about a thousandth of the operations of recomputing
    everything. None where even the smallest options exceed the limit (bytes per token, all blocks together).
    """
    own = [_undominated(options) for options in blocks]
    if sum(options[0].saved for options in own) > limit:
        return None
    plan, price = _bought(own, limit)
    if not price:
        return plan
    bound = sum(min(option.flops + price * option.saved for option in options) for options in own) - price * limit
    order = sorted(range(len(own)), key=lambda number: [(one.saved, one.flops) for one in own[number]])
    for most in _SUMS:
        found, lost = _search([own[number] for number in order], limit, price, plan.flops - bound, most)
        if found is not None:
            options = dict(zip(order, found, strict=True))
            better = Plan(tuple(options[number] for number in range(len(own))))
            plan = min(plan, better, key=lambda one: (one.flops, one.saved))
        gap = max(0.0, min(lost, plan.flops - bound))
        if not gap:
            break
    return Plan(plan.options, gap)


def _bought(blocks: Sequence[Sequence[Option]], limit: float) -> tuple[Plan, float]:
    """Buy the steps between policies, those first that save the most operations per byte, as long as they fit.

    Returned are the plan and the price: operations per byte of the first step that did not fit; 0 if all fit.
    """
    steps = []
    for number, options in enumerate(blocks):
        corners = _corners(options)
        for place, (before, after) in enumerate(itertools.pairwise(corners)):
            steps.append((_worth(before, after), -number, -place, before, after))
    steps.sort(key=lambda step: step[:3], reverse=True)
    chosen = [options[0] for options in blocks]
    room = limit - sum(option.saved for option in chosen)
    price = 0.0
    for worth, number, _, before, after in steps:
        if chosen[-number] is before and after.saved - before.saved <= room:
            chosen[-number] = after
            room -= after.saved - before.saved
        elif not price:
            price = worth
    return Plan(tuple(chosen)), price


def _corners(options: Sequence[Option]) -> list[Option]:
    """Options on the lower convex hull; from one to the next, a byte saves fewer and fewer operations."""
    corners: list[Option] = []
    for option in options:
        while len(corners) > 1 and _worth(corners[-1], option) >= _worth(corners[-2], corners[-1]):
            corners.pop()
        corners.append(option)
    return corners


def _worth(before: Option, after: Option) -> float:
    return (before.flops - after.flops) / (after.saved - before.saved)


def _search(
    blocks: Sequence[Sequence[Option]], limit: float, price: float, slack: float, most: int
) -> tuple[list[Option] | None, float]:
    """Add up the blocks one by one, and keep every sum that may lead to a plan at most `slack` above the bound.

    A sum's surplus is what it costs, bytes at their price, above the least that its blocks can cost. A plan's
    operations are the bound, its surplus, and the price of the room it leaves. At most `most` sums are kept after each
    block; equal blocks are best in a row, as many of their sums coincide.

    Returned are the best plan found, None if none as good as the known one was found, and by how many operations sums
    were thinned out. Its operations, or the known one's, may be so much more than the best plan's.
    """
    least_left = sum(options[0].saved for options in blocks)
    slack += 1e-9 * sum(option.flops + price * option.saved for options in blocks for option in options)  # roundings
    saved_S, flops_S, surplus_S = np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    lost = 0.0
    for options in blocks:
        least_left -= options[0].saved
        bytes_O = np.array([option.saved for option in options], dtype=np.float64)
        again_O = np.array([option.flops for option in options], dtype=np.int64)
        cost_O = again_O + price * bytes_O
        saved_SO = saved_S[:, None] + bytes_O
        surplus_SO = surplus_S[:, None] + (cost_O - np.min(cost_O))
        sums, chosen = np.nonzero((saved_SO + least_left <= limit) & (surplus_SO <= slack))
        saved, flops = saved_SO[sums, chosen], flops_S[sums] + again_O[chosen]
        kept = _frontier(saved, flops)
        if len(kept) > most:
            # Of each of `most` equal parts of the range of operations, the sum with the fewest bytes. What is left out
            # has less than a part's width fewer operations than a sum that has fewer bytes and is kept.
            again = flops[kept]
            width = -(-int(again[0] - again[-1] + 1) // most)
            parts = (again - again[-1]) // width
            kept = kept[np.concatenate([[True], parts[1:] != parts[:-1]])]
            lost += float(width - 1)
        if not len(kept):
            return None, lost
        trail.append((sums[kept], chosen[kept]))
        saved_S, flops_S, surplus_S = saved[kept], flops[kept], surplus_SO[sums, chosen][kept]
    place = len(flops_S) - 1  # operations descend
    plan = []
    for options, (sums, chosen) in zip(reversed(blocks), reversed(trail), strict=True):
        plan.append(options[chosen[place]])
        place = sums[place]
    return plan[::-1], lost


def _frontier(saved_S: npt.NDArray[np.float64], flops_S: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return where the sums are that no other beats or equals in both: bytes ascending, operations descending."""
    order = np.lexsort((flops_S, saved_S))
    descending = flops_S[order]
    best_before = np.minimum.accumulate(descending)[:-1]
    return order[np.concatenate([np.ones(min(1, len(order)), dtype=bool), descending[1:] < best_before])]


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Options that no other beats or equals in both respects, bytes ascending; of equal ones the first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.saved, option.flops)):
        if not kept or option.flops < kept[-1].flops:
            kept.append(option)
    return kept
