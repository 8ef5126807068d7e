"""The sections about one run, about what runs save, and about a study; what is missing is said, and why."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hf_neuron_moe.errors import pattern_of, spelled_together
from hf_neuron_moe.report.curves import LAST, band, band_of_runs, differences
from hf_neuron_moe.report.page import Missing, Part, Section
from hf_neuron_moe.report.plots import Figure, Line, Table, Threshold, bar_figure, heat_map, line_figure, short_names
from hf_neuron_moe.report.run_data import RunData, StudyData
from hf_neuron_moe.report.runs import kib

LEAST_DB = 6.0  # Range of a scale of colours: smaller differences of SQNR should not look large
FLOOR = Threshold(
    24.0, "below 24 dB, the least that MXFP8 makes of finite values"
)  # docs/convert.md, what verify checks
DEAD = Threshold(0.01, "below 1 % of the mean: a dead expert")
MOST_PICTURES = 40  # behind one slider
_MAP_KEYS = ("kind", "class_name", "experts", "hidden_size", "intermediate_size", "status", "activations")
_STATUS = ("patched", "skipped", "refused")


def study_sections(study: StudyData) -> list[Section]:
    """Loss curves and differences of a parity study, its table, and what the variants save."""
    drawn = []
    for model, variants in study.content["models"].items():
        # The short comparison of exact policies has a row of the table and no line.
        shown = {name: seeds for name, seeds in variants.items() if seeds and not name.startswith("fp32,")}
        lines = [band(name, seeds) for name, seeds in shown.items()]
        seeds = max((len(seeds) for seeds in variants.values()), default=0)
        bands = f"bands: lowest to highest of {seeds} seeds" if seeds > 1 else "one seed"
        alt = f"Training loss of {model} over the steps, by variant: {', '.join(line.name for line in lines)}"
        title = f"{model}: loss, averaged over a twentieth of the run; {bands}"
        drawn.append(line_figure(lines, title=title, alt=alt, y="loss (nats)"))
        compared = {name: entry.get("reference") for name, entry in _summary(study, model)["variants"].items()}
        gaps = [
            line
            for name, other in compared.items()
            if other in variants and (line := differences(f"{name} to {other}", variants[name], variants[other]))
        ]
        if gaps:
            alt = f"Difference of {model}'s loss between variants in percent over the steps"
            title = f"{model}: difference of the averaged loss on the same batches; {bands}"
            drawn.append(line_figure(gaps, title=title, alt=alt, y="difference (%)"))
    losses = Section(f"Loss curves: {study.name}", [*_study_table(study), *drawn])
    saved = study.content.get("saved_bytes_per_token") or {}
    return [losses, _bytes_figures(saved)] if saved else [losses]


def _summary(study: StudyData, model: str) -> Mapping[str, Any]:
    """What a study says of a model's variants, by name, and of the policies compared in fp32."""
    found: Mapping[str, Any] = (study.content.get("summary") or {}).get(model, {})
    return {"variants": {}, "fp32": None, **found}


def _study_table(study: StudyData) -> list[Table]:
    rows, taken = [], set()
    for model, curves in study.content["models"].items():
        summary = _summary(study, model)
        for name, entry in summary["variants"].items():
            taken |= {min(LAST, len(losses)) for losses in curves.get(name, {}).values()}
            spread, gap, goal = "-", "-", "-"
            if entry.get("seed_spread_percent") is not None:
                spread = f"{entry['seed_spread_percent']:.2f} %"
            if "difference_percent" in entry:
                gap = f"{entry['difference_percent']:+.4f} % to {entry['reference']}"
            if "met" in entry:
                goal = f"{entry['goal_percent']:g} %: {'met' if entry['met'] else 'missed'}"
            rows.append((model, name, f"{entry['last_mean']:.4f}", spread, gap, goal))
        if exact := summary["fp32"]:
            gap = f"{exact['largest_difference']:.1e} (largest, relative)"
            name = f"fp32: lossless policies, {exact['steps']} steps"
            rows.append((model, name, "-", "-", gap, f"{exact['goal']:g}: {'met' if exact['met'] else 'missed'}"))
    last = " or ".join(map(str, sorted(taken))) or LAST
    columns = ("model", "variant", f"mean of last {last} steps", "seeds' spread", "difference", "goal")
    return [Table(columns, rows)] if rows else []


def _bytes_figures(saved: Mapping[str, Mapping[str, float]]) -> Section:
    """A figure per model of what its blocks keep, by policy."""
    drawn = []
    for model, values in saved.items():
        alt = f"KiB per token that the blocks of {model} keep for backward, by policy"
        series = {"KiB/token": [value / 1024 for value in values.values()]}
        drawn.append(bar_figure(list(values), series, title=f"{model}: kept by all patched blocks together", alt=alt))
    return Section("Saved for backward", drawn)


def map_section(runs: Sequence[RunData]) -> Section:
    """Which modules are patched, with which policy."""
    parts: list[Part] = []
    for run in runs:
        counts = ((sum(entry["status"] == status for entry in run.entries), status) for status in _STATUS)
        parts += [f"{run.name}: {', '.join(f'{count} {status}' for count, status in counts)}.", _map(run)]
    return Section("Patch map", parts)


def _map(run: RunData) -> Table:
    """The entries, those that differ in their numbers only in one row."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in run.entries:
        cells = [str(entry.get(key) or "-") for key in (*_MAP_KEYS, "reason")]
        facts = (pattern_of(entry["name"]), *cells[:-1], kib(entry.get("saved_bytes_per_token")), cells[-1])
        groups[facts].append(entry["name"])
    rows = [
        (f"{spelled_together(names)} ({len(names)})" if len(names) > 1 else names[0], *facts[1:])
        for facts, names in groups.items()
    ]
    return Table(("module", "kind", "class", "E", "H", "I", "status", "activations", "KiB/token each", "reason"), rows)


def bytes_section(runs: Sequence[RunData]) -> Section:
    """What the patched blocks of every run keep for backward."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        patched = [entry for entry in run.entries if entry["status"] == "patched"]
        kept = [float(e["saved_bytes_per_token"]) for e in patched if e.get("saved_bytes_per_token") is not None]
        if kept and len(kept) == len(patched):
            values[run.model][run.policy] = sum(kept)
    if not values:
        return Section("Saved for backward", [Missing("The patch report has no saved bytes.")])
    return _bytes_figures(values)


def health_section(run: RunData) -> Section:
    """Signal-to-noise ratio of MXFP8 quantization per module, tensor and step, the least of all, and what to do."""
    sampled = [record for record in run.metrics if record.get("health")]
    title = f"Quantization health: {run.name}"
    if not sampled:
        return Section(title, [Missing("Not sampled: neuron_health_steps was 0, or the run ended before.")])
    last = sampled[-1]["health"]
    modules, steps = short_names(list(last)), [str(record["step"]) for record in sampled]
    weights = dict.fromkeys(tensor for module in last.values() for tensor in module.get("weights", {}))
    by_step = {
        str(record["step"]): [
            [_sqnr({**of.get("weights", {}), "input": of.get("input")}.get(tensor)) for tensor in (*weights, "input")]
            for of in (record["health"].get(module, {}) for module in last)
        ]
        for record in sampled
    }
    shown = {step: by_step[step] for step in list(by_step)[:: -(-len(by_step) // MOST_PICTURES)]} | {
        steps[-1]: by_step[steps[-1]]
    }
    alt = f"SQNR per module and tensor at step {steps[-1]}" + (", and at earlier steps" if len(shown) > 1 else "")
    facts: dict[str, Any] = {"unit": "dB", "least_range": LEAST_DB, "thresholds": [FLOOR]}
    columns, caption = [*weights, "input"], "SQNR under MXFP8, by module and tensor"
    drawn = [heat_map(modules, columns, shown, title=caption, alt=alt, **facts)]
    if len(by_step) > 1:
        alt, caption = (
            "SQNR of the modules' inputs over the steps",
            "SQNR of the inputs under MXFP8, by module and step",
        )
        inputs = [[cells[row][-1] for cells in by_step.values()] for row in range(len(modules))]
        drawn.append(heat_map(modules, list(by_step), inputs, title=caption, alt=alt, **facts))
        drawn.append(_least(by_step, len(columns)))
    return Section(title, [*drawn, _advice(by_step, list(last), columns), _worst(last)])


def _least(by_step: Mapping[str, Sequence[Sequence[float | None]]], count: int) -> Figure:
    """The lowest SQNR of all modules' weights and inputs over the steps."""
    lines = []
    for name, places in (("weights", slice(0, count - 1)), ("inputs", slice(count - 1, count))):
        known = {step: [v for row in cells for v in row[places] if v is not None] for step, cells in by_step.items()}
        points = [(float(step), min(values)) for step, values in known.items() if values]
        lines += [Line(name, points)] if points else []
    alt = "Lowest SQNR of all modules over the steps, of weights and of inputs"
    return line_figure(lines, title="Lowest SQNR of all modules under MXFP8", alt=alt, y="dB", thresholds=[FLOOR])


def _advice(by_step: Mapping[str, Any], modules: Sequence[str], columns: Sequence[str]) -> str:
    """Which modules fall below the threshold, and what to do about them."""
    low = {
        module: f"{module} ({columns[place]}, step {step})"
        for step, cells in by_step.items()
        for module, row in zip(modules, cells)
        for place, value in enumerate(row)
        if value is not None and value < FLOOR.value
    }
    if not low:
        return f"No module is {FLOOR.text}. Cells without a value lose nothing, or were not measured."
    names = ", ".join(list(low.values())[:6]) + (f" and {len(low) - 6} more" if len(low) > 6 else "")
    return (
        f"An SQNR {FLOOR.text}: {names}. Subnormal or infinite values do this. To leave a module in bf16, pass "
        f'precision={{"*": "mxfp8", "{next(iter(low))}": "bf16"}}.'
    )


def _sqnr(figures: Mapping[str, Any] | None) -> float | None:
    return (figures or {}).get("sqnr_db")


def _worst(health: Mapping[str, Any]) -> Table:
    """The extremes over all modules of one sample."""
    tensors = [tensor for module in health.values() for tensor in module.get("weights", {}).values()]
    tensors += [module["input"] for module in health.values() if module.get("input")]
    rows = []
    for key, text, most in (
        ("sqnr_db", "lowest SQNR (dB)", min),
        ("flushed", "largest share flushed to zero", max),
        ("saturated", "largest share saturated", max),
        ("amax", "largest magnitude", max),
    ):
        values = [tensor[key] for tensor in tensors if tensor and tensor.get(key) is not None]
        rows.append((text, f"{most(values):.4g}" if values else "-"))
    return Table(("over all modules, last sample", "value"), rows)


def load_section(run: RunData) -> Section:
    """Load of every expert relative to the mean, and its evenness over time."""
    logged = [record for record in run.metrics if record.get("experts")]
    title = f"Expert load: {run.name}"
    if not logged:
        text = "No experts: the model's patched blocks are dense, or nothing was logged."
        return Section(title, [Missing(text)])
    modules = list(logged[-1]["experts"])
    cells: list[list[float | None]] = []
    for module in modules:
        loads = [record["experts"][module]["load"] for record in logged if module in record["experts"]]
        totals = [sum(column) for column in zip(*loads)]
        mean = sum(totals) / len(totals)
        cells.append([count / mean if mean else None for count in totals])
    names, columns = short_names(modules), [str(expert) for expert in range(max(map(len, cells)))]
    alt = "Load of every expert over its module's mean, over the whole run"
    caption = "Tokens per expert over the module's mean, whole run"
    drawn = [heat_map(names, columns, cells, title=caption, alt=alt, unit="x mean", low=0.0, thresholds=[DEAD])]
    lines = []
    for name, module in list(zip(names, modules))[:: max(1, len(modules) // 6)][:6]:
        of_module = [record for record in logged if module in record["experts"]]
        entropy = {float(record["step"]): record["experts"][module]["entropy"] for record in of_module}
        known = [(step, value) for step, value in entropy.items() if value is not None]
        lines += [band_of_runs(name, {"": known})] if known else []
    if len(logged) > 1 and lines:
        caption = "Entropy of the load (1: all experts alike), of some modules"
        drawn.append(line_figure(lines, title=caption, alt="Entropy of the expert load over the steps", y="entropy"))
    return Section(title, drawn)


def environment_section(title: str, environment: Mapping[str, Any]) -> Section:
    """Versions, machine, date; what has no value (no accelerator, say) is left out."""
    facts: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, Mapping):
            facts |= {f"{inner}": str(known) for inner, known in value.items() if known is not None}
        elif value is not None:
            facts[key] = value if isinstance(value, str) else json.dumps(value)
    return Section(title, [Table(("of", "value"), list(facts.items())) if facts else Missing("Nothing was recorded.")])
