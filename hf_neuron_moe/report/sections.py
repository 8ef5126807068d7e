"""The sections of the page: each function returns the HTML of one, or says what is missing and why."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hf_neuron_moe.errors import pattern_of, spelled_together
from hf_neuron_moe.report.curves import band, differences
from hf_neuron_moe.report.run_data import RunData, StudyData
from hf_neuron_moe.report.svg import Line, bar_chart, heat_map, line_chart

LEAST_DB = 6.0  # Range of a scale of colours: smaller differences of SQNR should not look large
_MAP_KEYS = ("kind", "class_name", "experts", "hidden_size", "intermediate_size", "status", "activations")
_STATUS = {"patched": "ok", "skipped": "skipped", "refused": "bad"}


def section(title: str, body: str) -> str:
    """Return a section with its heading."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def figure(drawing: str, caption: str) -> str:
    """Return a figure with its caption."""
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(drawn: Iterable[str]) -> str:
    """Put figures beside each other where there is room."""
    return f'<div class="figures">{"".join(drawn)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls by itself where it is wider than the page."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(text: str) -> str:
    """Explain what is above."""
    return f'<p class="soft">{escape(text)}</p>'


def missing(text: str) -> str:
    """Say what is not there."""
    return f'<p class="missing">{escape(text)}</p>'


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out what all module names begin with, up to a dot: ``model.layers.3.mlp`` -> ``3.mlp``."""
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split) and len({parts[shared] for parts in split}) == 1:
        shared += 1
    return [".".join(parts[shared:]) for parts in split]


def kib(nbytes: float | None) -> str:
    """Bytes in KiB for a cell."""
    return "-" if nbytes is None else f"{nbytes / 1024:,.2f}"


def step_figure(lines: Sequence[Line], axis: str, alt: str, caption: str) -> str:
    """Return a figure of curves over the steps."""
    return figure(line_chart(lines, alt=alt, x_label="step", y_label=axis), caption)


def study_sections(study: StudyData) -> str:
    """Loss curves and differences of a parity study, its table, and what the variants save."""
    drawn = []
    for model, variants in study.content["models"].items():
        # The short comparison of exact policies has a row of the table and no line.
        shown = {name: seeds for name, seeds in variants.items() if seeds and not name.startswith("fp32,")}
        lines = [band(name, list(seeds.values())) for name, seeds in shown.items()]
        seeds = max((len(seeds) for seeds in variants.values()), default=0)
        bands = f"bands: lowest to highest of {seeds} seeds" if seeds > 1 else "one seed"
        alt = f"Training loss of {model} over the steps, by variant: {', '.join(line.name for line in lines)}"
        caption = f"{model}: loss, averaged over a twentieth of the run; {bands}"
        drawn.append(step_figure(lines, "loss (nats)", alt, caption))
        compared = {name: entry.get("reference") for name, entry in _summary(study, model)["variants"].items()}
        gaps = [
            line
            for name, other in compared.items()
            if other in variants and (line := differences(f"{name} to {other}", variants[name], variants[other]))
        ]
        if gaps:
            alt = f"Difference of {model}'s loss between variants in percent over the steps"
            caption = f"{model}: difference of the averaged loss on the same batches; {bands}"
            drawn.append(step_figure(gaps, "difference (%)", alt, caption))
    losses = section(f"Loss curves: {study.name}", figures(drawn) + _study_table(study))
    saved = study.content.get("saved_bytes_per_token") or {}
    return losses + (_bytes_figures(saved) if saved else "")


def _summary(study: StudyData, model: str) -> Mapping[str, Any]:
    """What a study says of a model's variants, by name, and of the policies compared in fp32."""
    found: Mapping[str, Any] = (study.content.get("summary") or {}).get(model, {})
    return {"variants": {}, "fp32": None, **found}


def _study_table(study: StudyData) -> str:
    rows = []
    for model in study.content["models"]:
        summary = _summary(study, model)
        for name, entry in summary["variants"].items():
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
    return table(("model", "variant", "last-100 mean", "seeds' spread", "difference", "goal"), rows) if rows else ""


def _bytes_figures(saved: Mapping[str, Mapping[str, float]]) -> str:
    """A figure per model of what its blocks keep, by policy."""
    drawn = []
    for model, values in saved.items():
        shown = {name: value / 1024 for name, value in values.items()}
        alt = f"KiB per token that the blocks of {model} keep for backward, by policy"
        chart = bar_chart(shown, alt=alt, unit="KiB/token")
        drawn.append(figure(chart, f"{model}: kept by all patched blocks together"))
    return section("Saved for backward", figures(drawn))


def map_section(runs: Sequence[RunData]) -> str:
    """Which modules are patched, with which policy."""
    parts = []
    for run in runs:
        counts = {status: sum(entry["status"] == status for entry in run.entries) for status in _STATUS}
        caption = escape(", ".join(f"{count} {status}" for status, count in counts.items()))
        cells = ""
        for entry in run.entries:
            why = f", {entry['reason']}" if entry.get("reason") else ""
            title = escape(f"{entry['name']}: {entry['status']}{why}")
            cells += f'<i class="{_STATUS.get(entry["status"], "bad")}" title="{title}"></i>'
        strip = f'<div class="strip" role="img" aria-label="{caption}, in model order">{cells}</div>'
        parts.append(f"<h3>{escape(run.name)}: {escape(run.policy)}</h3><p>{caption}.</p>{strip}{_map(run)}")
    return section("Patch map", "".join(parts))


def _map(run: RunData) -> str:
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
    headings = ("module", "kind", "class", "E", "H", "I", "status", "activations", "KiB/token each", "reason")
    return table(headings, rows)


def bytes_section(runs: Sequence[RunData]) -> str:
    """What the patched blocks of every run keep for backward."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        patched = [entry for entry in run.entries if entry["status"] == "patched"]
        kept = [float(e["saved_bytes_per_token"]) for e in patched if e.get("saved_bytes_per_token") is not None]
        if kept and len(kept) == len(patched):
            values[run.model][run.policy] = sum(kept)
    if not values:
        return section("Saved for backward", missing("The patch report has no saved bytes."))
    return _bytes_figures(values)


def health_section(run: RunData) -> str:
    """Signal-to-noise ratio of MXFP8 quantization per module: by tensor at the last sample, and of inputs over time."""
    sampled = [record for record in run.metrics if record.get("health")]
    title = f"Quantization health: {run.name}"
    if not sampled:
        return section(title, missing("Not sampled: neuron_health_steps was 0, or the run ended before."))
    last = sampled[-1]["health"]
    rows, steps = short_names(list(last)), [str(record["step"]) for record in sampled]
    tensors = list(dict.fromkeys(tensor for module in last.values() for tensor in module.get("weights", {})))
    now = [
        [_sqnr(of) for of in (*(module.get("weights", {}).get(tensor) for tensor in tensors), module.get("input"))]
        for module in last.values()
    ]
    alt = f"SQNR per module and tensor at step {steps[-1]}"
    drawing = heat_map(rows, [*tensors, "input"], now, alt=alt, unit="dB", least_range=LEAST_DB)
    drawn = [figure(drawing, f"SQNR under MXFP8 at step {steps[-1]}, by module and tensor")]
    if len(sampled) > 1:
        alt = "SQNR of the modules' inputs over the steps"
        inputs = [[_sqnr(record["health"].get(module, {}).get("input")) for record in sampled] for module in last]
        drawing = heat_map(rows, steps, inputs, alt=alt, unit="dB", least_range=LEAST_DB)
        drawn.append(figure(drawing, "SQNR of the inputs under MXFP8, by module and step"))
    return section(title, figures(drawn) + _worst(last))


def _sqnr(figures: Mapping[str, Any] | None) -> float | None:
    return (figures or {}).get("sqnr_db")


def _worst(health: Mapping[str, Any]) -> str:
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
        values = [tensor[key] for tensor in tensors if tensor.get(key) is not None]
        rows.append((text, f"{most(values):.4g}" if values else "-"))
    return table(("over all modules", "value"), rows)


def load_section(run: RunData) -> str:
    """Load of every expert relative to the mean, and its evenness over time."""
    logged = [record for record in run.metrics if record.get("experts")]
    title = f"Expert load: {run.name}"
    if not logged:
        return section(title, missing("No experts: the model's patched blocks are dense, or nothing was logged."))
    modules = list(logged[-1]["experts"])
    cells: list[list[float | None]] = []
    for module in modules:
        loads = [record["experts"][module]["load"] for record in logged if module in record["experts"]]
        totals = [sum(column) for column in zip(*loads)]
        mean = sum(totals) / len(totals)
        cells.append([count / mean if mean else None for count in totals])
    names, columns = short_names(modules), [str(expert) for expert in range(max(map(len, cells)))]
    alt = "Load of every expert over its module's mean, over the whole run"
    drawing = heat_map(names, columns, cells, alt=alt, unit="x mean", low=0.0)
    drawn = [figure(drawing, "Tokens per expert over the module's mean, whole run; 0 is a dead expert")]
    lines = []
    for name, module in list(zip(names, modules))[:: max(1, len(modules) // 6)][:6]:
        entropy = {float(record["step"]): record["experts"][module]["entropy"] for record in logged}
        known = {step: value for step, value in entropy.items() if value is not None}
        if known:
            lines.append(band(name, [list(known.values())], list(known)))
    if len(logged) > 1 and lines:
        caption = "Entropy of the load (1: all experts alike), of some modules"
        drawn.append(step_figure(lines, "entropy", "Entropy of the expert load over the steps", caption))
    return section(title, figures(drawn))


def environment_section(title: str, environment: Mapping[str, Any]) -> str:
    """Versions, machine, date; what has no value (no accelerator, say) is left out."""
    facts: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, Mapping):
            facts |= {f"{inner}": str(known) for inner, known in value.items() if known is not None}
        elif value is not None:
            facts[key] = value if isinstance(value, str) else json.dumps(value)
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return section(title, f"<dl>{items}</dl>" if items else missing("Nothing was recorded."))
