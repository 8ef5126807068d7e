"""The section about what the guard measured of every product of a run's blocks, and what left its band."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_neuron_moe.report.page import Missing, Section
from hf_neuron_moe.report.plots import Figure, Marks, Table, heat_map, short_names
from hf_neuron_moe.report.run_data import RunData
from hf_neuron_moe.report.sections import LEAST_DB, MOST_PICTURES

PRODUCTS = ("gate_up", "gate", "down", "down.dx", "gate_up.dx", "down.dw", "gate_up.dw")  # as they are computed
MOST_ALARMS = 50
LEAST_ERROR, MOST_ERROR = 1e-8, 10.0
"""What errors are drawn between: results are often equal to the second computation, or not finite."""
_ALARM = ("step", "product", "operand or result", "figure", "value", "expected", "expert", "process", "block")
_FIGURES = {
    "worst": "worst, the largest error of a row,",
    "rounding": "rounding, the error of the median row,",
    "sqnr_db": "the SQNR in dB",
    "flushed": "the share of values that become zero",
    "amax": "amax, the largest magnitude,",
    "rms": "rms, the root mean square,",
    "nonfinite": "nonfinite, the number of values that are not finite,",
}
_REMEDY = {
    "rounding": "The result is not what its operands give, so a kernel or the memory is wrong. Replay it, resume from "
    "a checkpoint of an earlier step, and report it with its file.",
    "sqnr_db": "The values outgrew the format: leave the block in bf16 with precision, or lower the learning rate.",
    "amax": "The values have changed since the first steps: lower the learning rate, or look at the step's data.",
    "nonfinite": "Resume from the last checkpoint with a lower learning rate, and look at the step's data.",
}
_SAME = {"worst": "rounding", "flushed": "sqnr_db", "rms": "amax"}

Measured = Mapping[
    str, Mapping[str, float | None]
]  # figures by operand or result, of one product of a block in one step


def guard_section(run: RunData) -> Section:
    """Heat maps of blocks and products through the steps with the alarms framed, the alarms, and what to do."""
    title = f"Guard: {run.name}"
    if not run.guard:
        return Section(title, [Missing("Not watched: neuron_guard was off, or the run ended before.")])
    alarms = [alarm for record in run.guard for alarm in record.get("alarms", [])]
    drawn = [
        drawing
        for name, unit, range_, worst in (
            ("Lowest SQNR of the operands", "dB", LEAST_DB, _lowest_sqnr),
            ("Largest error of a row against a second computation", "log10", 0.0, _largest_error),
            ("Largest magnitude of operands and results", "log2", 0.0, _largest_magnitude),
        )
        if (drawing := _by_product(run.guard, name, unit, range_, worst))
    ]
    if not alarms:
        return Section(title, [f"{len(run.guard)} steps were looked at, and nothing left its band.", *drawn])
    first = alarms[0]
    said = f"Alarms: {len(alarms)}, in {len(run.guard)} steps that were looked at. The first: {_described(first)}."
    remedy = "What to do: " + _REMEDY.get(_SAME.get(first["figure"], first["figure"]), "Replay it.")
    file = f"guard_step{first['step']}" + (f"_process{first['process']}" if first.get("process") else "")
    replay = f"python -m hf_neuron_moe.training.guard.reproduction {run.name}/neuron_moe/{file}.safetensors"
    rows = [_row(alarm) for alarm in alarms[:MOST_ALARMS]]
    return Section(title, [said, remedy, f"Replay it in float64: {replay}", Table(_ALARM, rows), *drawn])


def _what(alarm: Mapping[str, Any]) -> str:
    return f"operand {alarm['operand']}" if alarm["result"] is None else f"result {alarm['result']}"


def _expected(alarm: Mapping[str, Any]) -> str:
    bounds = {"at least": alarm["low"], "at most": alarm["high"]}
    return " and ".join(f"{word} {limit:.3g}" for word, limit in bounds.items() if limit is not None)


def _value(alarm: Mapping[str, Any]) -> str:
    return "not finite" if alarm["value"] is None else f"{alarm['value']:.3g}"


def _described(alarm: Mapping[str, Any]) -> str:
    """An alarm in words."""
    expert = "" if alarm["expert"] == -1 else f" of expert {alarm['expert']}"
    figure = _FIGURES.get(alarm["figure"], alarm["figure"])
    place = f"{_what(alarm)}{expert} of {alarm['product']} in {alarm['block']}, step {alarm['step']}"
    return f"{figure} was {_value(alarm)}, expected {_expected(alarm)}, in the {place}"


def _row(alarm: Mapping[str, Any]) -> list[Any]:
    expert = None if alarm["expert"] == -1 else alarm["expert"]
    shown = [_what(alarm), alarm["figure"], _value(alarm), _expected(alarm), expert, alarm.get("process")]
    return [alarm["step"], alarm["product"], *shown, alarm["block"]]


def _by_product(
    records: Sequence[Mapping[str, Any]], name: str, unit: str, least_range: float, worst: Callable[[Measured], Any]
) -> Figure | None:
    """A heat map per step, at first that of the first alarm; None where nothing of it was measured."""
    blocks = list(dict.fromkeys(block for record in records for block in record["blocks"]))
    measured = {
        product
        for record in records
        for figures in record["blocks"].values()
        for product in figures
        if worst(figures[product]) is not None
    }
    products = [product for product in PRODUCTS if product in measured]
    if not products:
        return None
    alarmed = [index for index, record in enumerate(records) if record.get("alarms")][:MOST_PICTURES]
    chosen = {*range(0, len(records), -(-len(records) // MOST_PICTURES)), len(records) - 1, *alarmed}
    shown = [records[index] for index in sorted(chosen)]
    pictures = {
        str(record["step"]): [
            [worst(record["blocks"].get(block, {}).get(product, {})) for product in products] for block in blocks
        ]
        for record in shown
    }
    marks = {
        str(record["step"]): {
            (blocks.index(alarm["block"]), products.index(alarm["product"]))
            for alarm in record.get("alarms", [])
            if alarm["block"] in blocks and alarm["product"] in products
        }
        for record in shown
    }
    alt = f"{name}, per block and product, at {len(pictures)} steps"
    framed = [Marks("a figure of it left its band", marks)] if any(marks.values()) else []
    facts: dict[str, Any] = {"unit": unit, "least_range": least_range, "thresholds": framed}
    first = str(records[alarmed[0]]["step"]) if alarmed else None
    title = f"{name}, by block and product"
    return heat_map(short_names(blocks), products, pictures, title=title, alt=alt, first=first, **facts)


def _of(measured: Measured, figure: str) -> list[float]:
    return [value for figures in measured.values() if (value := figures.get(figure)) is not None]


def _lowest_sqnr(measured: Measured) -> float | None:
    return min(_of(measured, "sqnr_db"), default=None)


def _largest_error(measured: Measured) -> float | None:
    """The logarithm, since errors of healthy results are of all sizes; null is an infinite error."""
    found = [figures["worst"] for figures in measured.values() if "worst" in figures]
    errors = (MOST_ERROR if error is None else min(max(error, LEAST_ERROR), MOST_ERROR) for error in found)
    return max((round(math.log10(error), 1) for error in errors), default=None)


def _largest_magnitude(measured: Measured) -> float | None:
    return max((round(math.log2(value), 1) for value in _of(measured, "amax") if value > 0), default=None)
