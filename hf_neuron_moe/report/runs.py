"""The sections over all runs of a folder: the table of runs, and by configuration what they log over their steps."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_neuron_moe.report.curves import band_of_runs
from hf_neuron_moe.report.page import Missing, Section
from hf_neuron_moe.report.plots import Cell, Figure, Line, Point, Table, line_figure
from hf_neuron_moe.report.run_data import RunData

Facts = dict[str, str]

_LOGGED = (
    ("learning_rate", "Learning rate", "learning rate", 1),
    ("grad_norm", "Gradient norm", "gradient norm", 1),
    ("reward_margin", "Reward margin", "chosen minus rejected", 1),
    ("reward_accuracy", "Reward accuracy", "share of pairs", 1),
    ("tokens_per_second", "Throughput", "tokens/s", 1),
    ("peak_memory_bytes", "Peak memory", "GiB", 2**30),
)
"""Key of the metrics, title of the figure, label of its axis and its unit in the key's."""
_NO_LOSS = "No loss was logged. A run of fewer steps than logging_steps logs none."


@dataclass
class Group:
    """Runs of one configuration."""

    facts: Facts  # what the runs have in common, in words, by name
    runs: list[RunData]


def configuration(run: RunData) -> Facts:
    """Return what two runs must share to be runs of one configuration, as far as their files tell, in words.

    Seeds and the number of steps are not part of it. A resumed run shares its configuration with no other: its losses
    before and after may come from different options.
    """
    facts = {"blocks": run.policy}
    for key, value in run.run.get("config", {}).items():
        if key not in ("precision", "activations"):
            facts[key] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    # Losses that are averaged over unlike numbers of steps make no band.
    steps = [record["step"] for record in run.metrics if record.get("loss") is not None]
    facts |= {**_arguments(run), "steps per log": str(steps[1] - steps[0]) if len(steps) > 2 else "-"}
    if run.training.get("resumed_from_step"):
        facts["resumed"] = f"{run.name} from step {run.training['resumed_from_step']}"
    return facts


def _arguments(run: RunData) -> Facts:
    """What a run was trained with, as far as that was recorded."""
    training, rate = run.training, run.training.get("learning_rate")
    logged = [record["learning_rate"] for record in run.metrics if record.get("learning_rate") is not None]
    if rate is not None:
        rate = f"{rate:g}"
    elif logged:
        rate = f"up to {max(logged):.2g}"
    parts = [training.get(key) for key in ("batch_size_per_process", "accumulation_steps", "processes")]
    sizes = [part for part in parts if isinstance(part, int)]
    batch = f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}" if len(sizes) == len(parts) else None
    processes = training.get("processes", (run.run.get("environment") or {}).get("processes"))
    facts = {"trained": _trained(training), "processes": processes, "learning rate": rate, "batch": batch}
    facts |= {"rows": training.get("rows"), "loss type": training.get("loss_type")}
    return {name: _text(value) for name, value in facts.items()}


def _trained(training: Mapping[str, Any]) -> str | None:
    count, of = training.get("trainable_parameters"), training.get("parameters")
    if count is None:
        return None
    adapter, rank = training.get("adapter"), training.get("lora_rank")
    how = "" if adapter is None else f"{adapter}{'' if rank is None else f' of rank {rank}'}: "
    return f"{how}{count:,}" + (f" of {of:,}" if of is not None and of != count else "")


def grouped(runs: Sequence[RunData]) -> dict[str, list[Group]]:
    """Return the runs that logged losses, by model, kind of loss and configuration."""
    models: dict[str, list[Group]] = defaultdict(list)
    for run in runs:
        if _logged(run, "loss"):
            kind = run.training.get("loss_type")
            name = run.model if kind in (None, "nll") else f"{run.model}, loss {kind}"
            groups, facts = models[name], configuration(run)
            known = next((group for group in groups if group.facts == facts), None)
            if known is None:
                groups.append(Group(facts, [run]))
            else:
                known.runs.append(run)
    return models


def _logged(run: RunData, key: str, unit: int = 1) -> list[Point]:
    """Steps and values of a metric, as far as it was logged; of a step that was logged twice the later value."""
    values = {float(record["step"]): record[key] / unit for record in run.metrics if record.get(key) is not None}
    return sorted(values.items())


def labels(groups: Sequence[Group]) -> list[str]:
    """Return a name per group: the policy of its blocks, and whatever else is not the same in all groups."""
    keys = list(dict.fromkeys(key for group in groups for key in group.facts))
    telling = [key for key in keys if key != "blocks" and len({group.facts.get(key) for group in groups}) > 1]
    return [
        "; ".join([group.facts["blocks"], *(f"{key} {group.facts[key]}" for key in telling if key in group.facts)])
        for group in groups
    ]


def losses_section(runs: Sequence[RunData]) -> Section:
    """Loss curves, one figure per model; runs of one configuration are one line with a band."""
    drawn = [_losses_figure(model, groups) for model, groups in grouped(runs).items()]
    return Section("Loss curves", drawn or [Missing(_NO_LOSS)])


def _losses_figure(model: str, groups: Sequence[Group]) -> Figure:
    lines, caption = [], f"{model}: loss as logged, averaged over a twentieth of the run"
    most = max(len(group.runs) for group in groups)
    if most > 1:
        caption += f"; bands: lowest to highest of up to {most} runs of one configuration, of those that have the step"
    for name, group in zip(labels(groups), groups):
        curves = {run.name: _logged(run, "loss") for run in group.runs}
        lines.append(band_of_runs(name, curves))
        ends = [curve[-1][0] for curve in curves.values()]
        if ends.count(max(ends)) < len(ends):
            caption += f"; {name}: {ends.count(max(ends))} of {len(ends)} runs reach step {max(ends):g}"
    return _figure(model, "Training loss", "loss (nats)", lines, caption)


def progress_section(runs: Sequence[RunData]) -> Section:
    """Evaluation loss, learning rate, gradient norm, throughput and memory over the steps, each by model."""
    drawn = []
    for model, groups in grouped(runs).items():
        named = list(zip(labels(groups), groups))
        datasets = list(dict.fromkeys(key for group in groups for run in group.runs for key in run.evaluations))
        curves = {
            name if len(datasets) == 1 else f"{name}; {dataset}": {
                run.name: run.evaluations.get(dataset, []) for run in group.runs
            }
            for dataset in datasets
            for name, group in named
        }
        courses = [("Evaluation loss", "evaluation loss (nats)", _lines(curves))]
        for key, title, axis, unit in _LOGGED:
            logged = {name: {run.name: _logged(run, key, unit) for run in group.runs} for name, group in named}
            courses.append((title, axis, _lines(logged)))
        for title, axis, lines in courses:
            caption = "; bands: lowest to highest of several runs" if any(line.low for line in lines) else ""
            if lines:
                drawn.append(_figure(model, title, axis, lines, f"{model}: {title.lower()} as logged{caption}"))
    return Section("Course of training", drawn or [Missing("Nothing else was logged.")])


def _lines(curves: Mapping[str, Mapping[str, Sequence[Point]]]) -> list[Line]:
    """A line per configuration whose runs have the curve, as logged."""
    known = {name: {run: curve for run, curve in runs.items() if curve} for name, runs in curves.items()}
    return [band_of_runs(name, of_runs, window=1) for name, of_runs in known.items() if of_runs]


def _figure(model: str, title: str, axis: str, lines: Sequence[Line], caption: str) -> Figure:
    alt = f"{title} of {model} over the steps, by configuration: {' | '.join(line.name for line in lines)}"
    return line_figure(lines, title=caption, alt=alt, y=axis)


def runs_table(runs: Sequence[RunData]) -> Section:
    """Configuration of every run and the figures of its last logging step."""
    rows: list[dict[str, Cell]] = []
    for run in runs:
        last, whole = run.metrics[-1] if run.metrics else {}, run.training.get("max_steps")
        row: dict[str, Cell] = {
            "run": run.name,
            "loss": _number(last.get("loss"), ".4f"),
            "eval loss": _evaluated(run),
            "tokens/s": _number(last.get("tokens_per_second"), ",.0f"),
            "saved KiB/token": kib(last.get("saved_bytes_per_token")),
            "padding overhead, with tokens": _number(last.get("padding_overhead"), ".1%").replace("%", " %"),
            "last step": f"{last.get('step', '-')}" + (f" of {whole}" if whole else ""),
            "model": run.model,
            "blocks": run.policy,
            **_arguments(run),
            "seed": _text(run.training.get("seed")),
            "resumed from": _text(run.training.get("resumed_from_step") or None),
        }
        rows.append(row)
    caption = (
        "Padding overhead: extra multiply-adds of the Neuron kernels, which pad H and I to multiples of 128 and every "
        "expert's tokens to whole blocks; it says nothing about the torch backend's time."
    )
    return Section("Runs", [Table(list(rows[0]), [list(row.values()) for row in rows]), caption])


def _evaluated(run: RunData) -> str:
    """The last evaluation losses: one number, or one per dataset with its name."""
    last = {name: curve[-1][1] for name, curve in run.evaluations.items()}
    if list(last) == ["eval_loss"]:
        return _number(last["eval_loss"], ".4f")
    return ", ".join(f"{name} {_number(loss, '.4f')}" for name, loss in last.items()) or "-"


def kib(nbytes: float | None) -> str:
    """Bytes in KiB for a cell."""
    return "-" if nbytes is None else f"{nbytes / 1024:,.2f}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
