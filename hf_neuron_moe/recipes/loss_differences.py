"""From the losses of several seeds to an answer: means of the last steps, differences on the same batches, bands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hf_neuron_moe.report.curves import LAST

CONFIDENCE = 0.95

Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Losses per step by variant and seed."""


def last_mean(losses: Sequence[float]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.fmean(losses[-LAST:])


def compared(curves: Curves, references: Mapping[str, str]) -> dict[str, Any]:
    """Return the last steps' mean per variant, its spread, and how far it is from the variant's reference."""
    means = {name: {seed: last_mean(losses) for seed, losses in seeds.items()} for name, seeds in curves.items()}
    summary: dict[str, Any] = {}
    for name, own in means.items():
        values = list(own.values())
        entry: dict[str, Any] = {"seeds": len(own), "last_mean": statistics.fmean(values), "by_seed": own}
        entry["seed_spread_percent"] = _spread(values)
        reference = references.get(name, "")
        if differences := paired(own, means.get(reference, {})):
            entry |= {"reference": reference, **differences}
        summary[name] = entry
    return summary


def paired(values: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, Any]:
    """Return by how many percent `values` exceed those of the reference with the same seed; nothing without any.

    ``band_percent`` is half the width of the 95 % band around the mean difference; None for a single seed.
    """
    gaps = [100 * (value / reference[seed] - 1) for seed, value in values.items() if seed in reference]
    if not gaps:
        return {}
    return {"difference_percent": statistics.fmean(gaps), "band_percent": band_of(gaps), "by_seed_percent": gaps}


def band_of(values: Sequence[float]) -> float | None:
    """Return half the width of the confidence band of the mean, by Student's t distribution; None for one value."""
    if len(values) < 2:
        return None
    return t_factor(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_factor(freedom: int) -> float:
    """Return how many standard errors :data:`CONFIDENCE` reaches to either side, for so many degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < CONFIDENCE else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Probability of a magnitude up to ``sqrt(freedom) * tan(angle)``: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd, total = freedom % 2, 0.0
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    for index in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * index + 1 + odd) / (2 * index + 2 + odd)
    return 2 / math.pi * (angle + total) if odd else total


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation over the seeds in percent of the mean; None for a single seed."""
    return 100 * statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None
