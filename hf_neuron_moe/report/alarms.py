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
_ALARM = ("step", "block", "product", "operand", "result", "expert", "figure", "value", "low", "high", "process")
_REMEDY = {
    "rounding": "The result is not what the operands give: replay the reproduction and report it.",
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
            ("Largest error of a row against a second computation", "%", 0.0, _largest_error),
            ("Largest magnitude of the operands", "log2", 0.0, _largest_magnitude),
        )
        if (drawing := _by_product(run.guard, name, unit, range_, worst))
    ]
    if not alarms:
        return Section(title, [f"{len(run.guard)} steps were looked at, and nothing left its band.", *drawn])
    first = alarms[0]
    said = (
        f"Alarms: {len(alarms)}, in {len(run.guard)} steps that were looked at. The first is {first['figure']} of "
        f"{first['block']}, {first['product']}, in step {first['step']}. "
    )
    said += _REMEDY.get(_SAME.get(first["figure"], first["figure"]), "")
    file = f"guard_step{first['step']}" + (f"_process{first['process']}" if first.get("process") else "")
    replay = f"python -m hf_neuron_moe.training.guard.reproduction {run.name}/neuron_moe/{file}.safetensors"
    rows = [[None if alarm.get(key) == -1 else alarm.get(key) for key in _ALARM] for alarm in alarms[:MOST_ALARMS]]
    return Section(title, [said, f"Replay it in float64: {replay}", *drawn, Table(_ALARM, rows)])


def _by_product(
    records: Sequence[Mapping[str, Any]], name: str, unit: str, least_range: float, worst: Callable[[Measured], Any]
) -> Figure | None:
    """A heat map per step; None where nothing of it was measured. The first steps with alarms are among those shown."""
    blocks = list(dict.fromkeys(block for record in records for block in record["blocks"]))
    known = {product for record in records for products in record["blocks"].values() for product in products}
    products = [product for product in PRODUCTS if product in known]
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
    if not any(cell is not None for cells in pictures.values() for row in cells for cell in row):
        return None
    alt = f"{name}, per block and product, at {len(pictures)} steps"
    framed = [Marks("a figure of it left its band", marks)] if any(marks.values()) else []
    facts: dict[str, Any] = {"unit": unit, "least_range": least_range, "thresholds": framed}
    return heat_map(short_names(blocks), products, pictures, title=f"{name}, by block and product", alt=alt, **facts)


def _of(measured: Measured, figure: str) -> list[float]:
    return [value for figures in measured.values() if (value := figures.get(figure)) is not None]


def _lowest_sqnr(measured: Measured) -> float | None:
    return min(_of(measured, "sqnr_db"), default=None)


def _largest_error(measured: Measured) -> float | None:
    return max((100 * value for value in _of(measured, "worst")), default=None)


def _largest_magnitude(measured: Measured) -> float | None:
    return max((math.log2(value) for value in _of(measured, "amax") if value > 0), default=None)
