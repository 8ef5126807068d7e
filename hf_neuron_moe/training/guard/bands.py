"""Bands that figures stay in: learned in the first sampled steps, and widened by every healthy step after them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LEARNED = 8
"""Values of a figure that make its band; a run is sampled in so many steps at first."""
FACTOR = 64.0  # magnitudes may grow or shrink by it
DECIBELS = 8.0  # an operand's SQNR may fall by it
FLUSHED = 0.25  # by which the share of flushed values may grow
WEIGHT = "largest_weight"
"""Figure of the operand of ``down``: the largest routing weight. It has no band; rows count by their share of it."""

_FORMS = {
    "bf16": (8e-2, 2e-2, 4e-4),
    "mxfp8": (8e-2, 2e-2, 4e-4),
    "fp32": (4e-4, 1e-4, 2e-6),
}
"""By precision: relative errors that are wrong however long they last, of one row and of the median row. Then what a
band adds to the median rows that it has seen. One row has more, since one value at the border of two codes may be
rounded to the other side."""


class Limits(NamedTuple):
    """A band; None is no limit."""

    low: float | None
    high: float | None

    def hold(self, value: float) -> bool:
        """Whether `value` is inside; NaN is not."""
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high) and not math.isnan(value)


@dataclass
class _Seen:
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)


@dataclass
class Bands:
    """The bands of all figures, each by block, product, operand or result, and name."""

    seen: dict[tuple[str, str, str, str], _Seen] = field(default_factory=dict)

    def limits(self, key: tuple[str, str, str, str], form: str) -> Limits:
        """Return the band of a figure; `form` is a precision."""
        figure = key[-1]
        seen = self.seen.get(key, _Seen())
        learned = seen.count >= LEARNED
        if figure == "nonfinite":
            return Limits(None, 0.0)
        worst, rounding, least = _FORMS[form]
        if figure == "worst":
            return Limits(None, worst)
        if figure == "rounding":
            return Limits(None, min(rounding, 2 * seen.high + least) if learned else rounding)
        if not learned or figure == WEIGHT:
            return Limits(None, None)
        if figure == "sqnr_db":
            return Limits(seen.low - DECIBELS, None)
        if figure == "flushed":
            return Limits(None, seen.high + FLUSHED)
        return Limits(seen.low / FACTOR, seen.high * FACTOR)

    def largest_weight(self, block: str) -> float:
        """Return the largest routing weight that a block has had; 0 where none was seen."""
        return max(0.0, self.seen.get((block, "down", "activations", WEIGHT), _Seen()).high)

    def learn(self, blocks: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> None:
        """Widen the bands by the figures of a step without alarms; zeros and what is not finite teach nothing."""
        for block, products in blocks.items():
            for product, measured in products.items():
                for name, figures in measured.items():
                    for figure, value in figures.items():
                        exact = figure in ("worst", "rounding", "flushed")
                        if value is not None and math.isfinite(value) and (value or exact):
                            self.seen.setdefault((block, product, name, figure), _Seen()).add(value)
