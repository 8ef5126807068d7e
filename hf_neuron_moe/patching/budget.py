"""The cheapest choice of activation policies within a byte budget: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def cheapest_plan(blocks: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """Choose one option per block so that the saved bytes stay within `limit` and the fewest operations are repeated.

    Among plans with equally many operations the one that keeps the fewest bytes wins.

    Args:
        blocks: each block's options.
        limit: most bytes per token, all blocks together.

    Returns:
        The options in the order of `blocks`; None where even the smallest ones exceed the limit.
    """
    # Sums of all prefixes that no other sum beats in both respects, each with the way it was reached.
    frontiers: list[list[tuple[float, int, int, Option | None]]] = [[(0.0, 0, 0, None)]]
    choices = [_undominated(options) for options in blocks]
    rest = [0.0]
    for options in reversed(choices):
        rest.append(rest[-1] + min(option.saved for option in options))
    for number, options in enumerate(choices):
        room = limit - rest[len(choices) - number - 1]
        sums = [
            (saved + option.saved, flops + option.flops, origin, option)
            for origin, (saved, flops, _, _) in enumerate(frontiers[-1])
            for option in options
            if saved + option.saved <= room
        ]
        sums.sort(key=lambda entry: entry[:2])
        frontier: list[tuple[float, int, int, Option | None]] = []
        for entry in sums:
            if not frontier or entry[1] < frontier[-1][1]:
                frontier.append(entry)
        if not frontier:
            return None
        frontiers.append(frontier)
    plan: list[Option] = []
    position = len(frontiers[-1]) - 1  # sorted by bytes, so the last has the fewest operations
    for frontier in reversed(frontiers[1:]):
        _, _, origin, chosen = frontier[position]
        assert chosen is not None, "only the empty prefix has no choice"
        plan.append(chosen)
        position = origin
    return plan[::-1]


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Options that no other beats or equals in both respects; of equal ones the first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.saved, option.flops)):
        if not kept or option.flops < kept[-1].flops:
            kept.append(option)
    return kept
