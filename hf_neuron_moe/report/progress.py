"""What else runs log over their steps: evaluation loss, learning rate, gradient norm, throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_neuron_moe.report.curves import band_of_runs
from hf_neuron_moe.report.read import RunData
from hf_neuron_moe.report.runs import Group, grouped, labels
from hf_neuron_moe.report.sections import figure, figures, missing, section
from hf_neuron_moe.report.svg import Line, Point, line_chart

_LOGGED = (
    ("learning_rate", "Learning rate", "learning rate"),
    ("grad_norm", "Gradient norm", "gradient norm"),
    ("tokens_per_second", "Throughput", "tokens/s"),
)
"""Key of the metrics, title of the figure, label of its axis."""


def progress_section(runs: Sequence[RunData]) -> str:
    """Evaluation loss, learning rate, gradient norm and throughput over the steps, one figure each per model."""
    drawn = []
    for model, groups in grouped(runs).items():
        names = labels(groups)
        evaluated = _evaluated_lines(names, groups)
        if evaluated:
            drawn.append(_drawn(model, "Evaluation loss", "evaluation loss (nats)", evaluated))
        for key, title, axis in _LOGGED:
            lines = _lines(names, groups, lambda run, key=key: _curve(run, key))  # type: ignore[misc]
            if lines:
                drawn.append(_drawn(model, title, axis, lines))
    return section("Course of training", figures(drawn) if drawn else missing("Nothing else was logged."))


def _lines(names: Sequence[str], groups: Sequence[Group], curve_of: Callable[[RunData], Sequence[Point]]) -> list[Line]:
    """A line per configuration whose runs have the curve, as logged."""
    lines = []
    for name, group in zip(names, groups):
        curves = [curve for run in group.runs if (curve := curve_of(run))]
        if curves:
            lines.append(band_of_runs(name, curves, window=1))
    return lines


def _evaluated_lines(names: Sequence[str], groups: Sequence[Group]) -> list[Line]:
    """The same for every evaluation dataset, which is named where there are several."""
    datasets = list(dict.fromkeys(key for group in groups for run in group.runs for key in run.evaluations))
    lines = []
    for dataset in datasets:
        called = names if len(datasets) == 1 else [f"{name}; {dataset}" for name in names]
        lines += _lines(called, groups, lambda run, key=dataset: run.evaluations.get(key, []))  # type: ignore[misc]
    return lines


def _curve(run: RunData, key: str) -> list[Point]:
    logged = {float(record["step"]): float(record[key]) for record in run.metrics if record.get(key) is not None}
    return sorted(logged.items())


def _drawn(model: str, title: str, axis: str, lines: Sequence[Line]) -> str:
    alt = f"{title} of {model} over the steps, by configuration: {' | '.join(line.name for line in lines)}"
    chart = line_chart(lines, alt=alt, x_label="step", y_label=axis)
    told = "; bands: lowest to highest of several runs" if any(line.low for line in lines) else ""
    return figure(chart, f"{model}: {title.lower()} as logged{told}")
