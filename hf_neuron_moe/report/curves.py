"""From logged numbers to lines: smoothing, bands over seeds, thinning."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from hf_neuron_moe.report.plots import Line, Point

LAST = 100
"""Steps at the end of a run whose mean loss a study compares; of a shorter run all."""
MOST_POINTS = 1000  # of a curve in the page, which can be zoomed


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most `window` values; as many values as before."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(values))]


def window_of(count: int) -> int:
    """Steps to average over for a curve of `count` steps: a twentieth."""
    return max(1, count // 20)


def thinned(points: Sequence[Point]) -> list[int]:
    """Indices of the points to draw: evenly spaced, with the last."""
    if len(points) <= MOST_POINTS:
        return list(range(len(points)))
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [round(index * step) for index in range(MOST_POINTS)]


def band(name: str, seeds: Mapping[str, Sequence[float]]) -> Line:
    """Return the mean of a value per step and seed with a band from the lowest to the highest.

    Steps are counted from 1; those that not all seeds have are left out.
    """
    count = min(len(curve) for curve in seeds.values())
    return band_of_runs(name, {f"seed {seed}": list(enumerate(curve[:count], 1)) for seed, curve in seeds.items()})


def band_of_runs(name: str, runs: Mapping[str, Sequence[Point]], window: int | None = None) -> Line:
    """Return the mean of several runs, up to the end of the longest, with a band from the lowest to the highest.

    Mean and band at a step are over the runs that have it. `window` is the number of logged values to average over;
    None for a twentieth of the run. What was logged comes along, by run, where the line is something else.
    """
    curves = list(runs.values())
    window = window_of(max(len(curve) for curve in curves)) if window is None else window
    values: dict[float, list[float]] = {}
    for curve in curves:
        means = smoothed([loss for _, loss in curve], window)
        # The first means are over fewer steps than the others, and so noisy that they would set the scale.
        for (step, _), mean in list(zip(curve, means))[min(window, len(curve)) - 1 :]:
            values.setdefault(step, []).append(mean)
    raw = runs if window > 1 or len(runs) > 1 else {}
    logged = {run: [curve[index] for index in thinned(curve)] for run, curve in raw.items()}
    return replace(_line(name, sorted(values.items()), several=len(curves) > 1), raw=logged)


def differences(
    name: str, curves: Mapping[str, Sequence[float]], reference: Mapping[str, Sequence[float]]
) -> Line | None:
    """Return by how many percent the smoothed loss differs from the reference's on the same batches; None without."""
    rows = []
    for seed, losses in curves.items():
        if seed in reference:
            window = window_of(len(losses))
            pairs = zip(smoothed(losses, window), smoothed(reference[seed], window))
            rows.append([100 * (mine / theirs - 1) for mine, theirs in pairs])
    if not rows:
        return None
    columns = [(float(step), column) for step, column in enumerate(zip(*rows), start=1)]
    return _line(name, columns[window_of(len(columns)) - 1 :], several=len(rows) > 1)


def _line(name: str, columns: Sequence[tuple[float, Sequence[float]]], *, several: bool) -> Line:
    """Means and, of `several` curves, extremes of the values at every x."""
    points = [(x, statistics.fmean(column)) for x, column in columns]
    kept = thinned(points)
    lows, highs = ([edge(columns[index][1]) for index in kept] if several else [] for edge in (min, max))
    return Line(name, [points[index] for index in kept], lows, highs)
