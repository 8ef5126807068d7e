"""The page of an exploration: ranking, predicted against measured, operands, experts, plan, advice."""

from __future__ import annotations

import math
from pathlib import Path

from hf_neuron_moe.device.roofline_math import source_of
from hf_neuron_moe.explore.exploration import Exploration, Ranked, standard_error
from hf_neuron_moe.explore.measures import (
    ACTIVATIONS,
    DW,
    DX,
    GRADIENTS,
    PRODUCTS,
    SAVED,
    WEIGHTS,
    WEIGHTS_MXFP4,
    BlockMeasures,
)
from hf_neuron_moe.report.page import Part, Section, render_page, write_page
from hf_neuron_moe.report.plots import Cell, Figure, Table, Threshold, bar_figure, heat_map, scatter_figure

POOR_DB = 24.0
"""SQNR that is framed: four noise bits below e4m3's usual 31 dB would be 7 dB; this is one bit above half of it."""

_SYMBOLS = {ACTIVATIONS: "x", WEIGHTS: "W", GRADIENTS: "dy"}
_OTHER_KINDS = (("W4", WEIGHTS_MXFP4), ("x saved", SAVED))
_COLUMNS = {
    f"{product}{behind} {_SYMBOLS[kind]}": f"{product}{behind} {kind}"
    for product in PRODUCTS
    for behind, kinds in (("", (ACTIVATIONS, WEIGHTS)), (DX, (GRADIENTS, WEIGHTS)), (DW, (ACTIVATIONS, GRADIENTS)))
    for kind in kinds
}
_EXTRA = {f"{product} {short}": f"{product} {kind}" for product in PRODUCTS for short, kind in _OTHER_KINDS}
_SHORT = {key: short for short, key in (_COLUMNS | _EXTRA).items()}
"""Short names of operands."""


def write_explore_page(result: Exploration, path: Path) -> int:
    """Write the page whole or not at all; return its size in bytes."""
    measures = result.measures
    subtitle = f"{measures.tokens:,} tokens of {result.text}, loss {result.loss:.4f} in bf16"
    sections = [_plan(result), *_rankings(result), _operands(result), *_experts(result), _how(result)]
    return write_page(render_page(f"What MX formats do to {result.model}", subtitle, sections), path)


def _plan(result: Exploration) -> Section:
    plan, loss = result.plan, result.loss
    rows: list[list[Cell]] = []
    for name, total in result.totals.items():
        measured = result.measured.get(name.removeprefix("uniform "))
        here = None if measured is None else round(100 * (measured - loss) / loss, 6)
        expected = 100 * total.loss_change / loss
        rows.append([name, expected, here, 1e3 * total.seconds, float(f"{total.bytes / 1e6:.4g}")])
    time = f"ms per step on {plan.device} (estimate)"
    columns = ["", "expected change, %", "measured here, %", time, "weights, MB"]
    recipe = Table(["blocks", "precision"], list(plan.recipe.items()))
    parts: list[Part] = [
        f"The plan keeps the expected change of the loss below {100 * plan.limit / loss:.3g} % at the least time.",
        Table(columns, rows),
        recipe,
    ]
    if result.convert_plan is not None:
        recipe = Table(["blocks", "precision"], list(result.convert_plan.recipe.items()))
        parts += ["For a conversion, which stores frozen weights in MXFP4 too, at the least bytes:", recipe]
    parts += result.advice
    parts += [*result.folds, *result.not_folded]
    if result.folded:
        parts.append(_folded(result))
    return Section("Plan", parts)


def _folded(result: Exploration) -> Table:
    rows: list[list[Cell]] = [
        [precision, result.measured[precision], after] for precision, after in result.folded.items()
    ]
    return Table(["precision", "loss before folding", "loss after"], rows)


def _rankings(result: Exploration) -> list[Section]:
    sections = []
    for form, rows in result.ranking.items():
        percent = [100 * row.predicted / result.loss for row in rows]
        bars = bar_figure(
            short_blocks([row.block for row in rows]),
            {"predicted change of the loss, %": percent},
            title=f"Predicted change of the loss, one block in {form} at a time",
            alt=f"Bars of {len(rows)} blocks from {max(percent):.3g} % to {min(percent):.3g} %.",
        )
        words = Table(["block", "why", "remedy"], [[row.block, row.reason.text, row.reason.remedy] for row in rows])
        parts: list[Part] = [bars, *_measured(result, rows), words, _figures(result, rows)]
        sections.append(Section(f"Blocks in {form}, worst first", parts))
    return sections


def _measured(result: Exploration, rows: list[Ranked]) -> list[Part]:
    points = [
        (100 * row.predicted / result.loss, 100 * row.measured / result.loss, row.block)
        for row in rows
        if row.measured is not None
    ]
    if not points:
        return []
    known = not math.isnan(result.correlation)
    words = f"Rank correlation over {len(points)} blocks: {result.correlation:.2f}." if known else ""
    title, alt = "Predicted against measured", f"{len(points)} blocks beside the diagonal. {words}"
    axes = {"x": "predicted, %", "y": "measured, %"}
    return [
        scatter_figure({"blocks": points}, title=title, alt=alt, diagonal=True, **axes),
        *([words] if known else []),
    ]


def _figures(result: Exploration, rows: list[Ranked]) -> Table:
    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value / result.loss

    products = [product for product in PRODUCTS if product in rows[0].products]
    shares = [f"of it {product}, %" for product in products]
    columns = ["block", "predicted, %", *shares, "deviation, %", "measured, %", "±"]
    lines: list[list[Cell]] = []
    for row in rows:
        parts = [percent(row.products[product]) for product in products]
        measured = [percent(value) for value in (row.deviation, row.measured, row.measured_error)]
        lines.append([row.block, percent(row.predicted), *parts, *measured])
    return Table(columns, lines)


def _forward(blocks: dict[str, BlockMeasures]) -> dict[str, BlockMeasures]:
    """Blocks in the model's order: they were measured in that of a backward."""
    return dict(reversed(blocks.items()))


def _operands(result: Exploration) -> Section:
    blocks = _forward(result.measures.blocks)
    figures = {name: {key: each.figures() for key, each in block.operands.items()} for name, block in blocks.items()}

    keys = [*_COLUMNS.values(), *(key for key in _EXTRA.values() if key in next(iter(figures.values())))]

    def picture(measure: str, factor: float = 1.0) -> list[list[float | None]]:
        return [[factor * figures[name][key][measure] for key in keys] for name in blocks]

    limit = Threshold(POOR_DB, f"below {POOR_DB:g} dB")
    names, columns = short_blocks(list(blocks)), [_SHORT[key] for key in keys]
    maps: list[Figure] = [
        heat_map(
            names,
            columns,
            picture("sqnr_db"),
            title="Signal over quantization noise of every operand",
            alt="A heat map of blocks and operands in dB; the table below has the values.",
            unit="dB",
            thresholds=[limit],
        ),
        heat_map(
            names,
            columns,
            picture("flushed", 100.0),
            title="Values that become zero",
            alt="A heat map of blocks and operands in percent; the table below has the values.",
            unit="%",
            low=0.0,
        ),
        heat_map(
            names,
            columns,
            picture("channel_ratio"),
            title="Largest channel over the median channel",
            alt="A heat map of blocks and operands; large ratios are outlier channels.",
            unit="times",
        ),
    ]
    products = [
        [name, product, facts[0] and 10 * math.log10(facts[0] / facts[1]) if facts[1] else None]
        for name, block in blocks.items()
        for product, facts in block.products.items()
    ]
    saturated = 100 * max(each[key]["saturated"] for each in figures.values() for key in keys)
    text = (
        "Products read activations (x), weights (W) and gradients (dy) in blocks of 32 values with one scale. "
        f"{DX} is the gradient of a projection's input, {DW} that of its weights. W4 are weights in mxfp4, x saved are "
        f"activations that are saved in FP8. Scales leave room above the largest value: {saturated:.3g} % saturate."
    )
    facts = ("amax", "channel", "expert", "token")
    largest: list[list[Cell]] = [
        [name, key, *(None if figures[name][key][fact] == -1 else figures[name][key][fact] for fact in facts)]
        for name in blocks
        for key in keys
    ]
    return Section(
        "Operands",
        [
            text,
            *maps,
            "Where each operand is largest. A token is a place in the text; weights have none.",
            Table(["block", "operand", "largest magnitude", "channel", "expert", "token"], largest),
            "The products, on the first row of the text.",
            Table(["block", "product", "SQNR, dB"], products),
        ],
    )


def _experts(result: Exploration) -> list[Section]:
    routed = {name: block for name, block in _forward(result.measures.blocks).items() if block.experts > 1}
    if not routed:
        return []
    experts = [str(expert) for expert in range(max(block.experts for block in routed.values()))]

    def row(values: list[float]) -> list[float | None]:
        return [values[place] if place < len(values) else None for place in range(len(experts))]

    key = f"down {ACTIVATIONS}"
    maps: list[Part] = [
        heat_map(
            short_blocks(list(routed)),
            experts,
            [row([float(count) for count in block.tokens_E.tolist()]) for block in routed.values()],
            title="Tokens that each expert saw",
            alt="A heat map of blocks and experts; the table below has the values.",
            unit="tokens",
            low=0.0,
        ),
        heat_map(
            short_blocks(list(routed)),
            experts,
            [row(block.operands[key].sqnr_by_expert()) for block in routed.values()],
            title="SQNR of the down projection's input by expert",
            alt="A heat map of blocks and experts in dB; experts without tokens are empty.",
            unit="dB",
        ),
    ]
    return [Section("Experts", maps)]


def _how(result: Exploration) -> Section:
    error = standard_error(result.measures.losses)
    parts: list[Part] = [
        "Predicted is the gradient of the loss at a block's output times what the format changes there, plus half of "
        "its curvature, which gradients of labels drawn from the model estimate. One block at a time; blocks are taken "
        "to add up. The plan counts of the first order only what exceeds its deviation from row to row.",
        f"The standard error of the loss over rows is {error:.3g}." if math.isfinite(error) else "There is one row.",
        f"Times and bytes are estimates from published figures ({source_of(result.plan.device)}).",
        Table(["", ""], [[name, str(value)] for name, value in result.environment.items()]),
    ]
    return Section("How this was measured", parts)


def short_blocks(names: list[str]) -> list[str]:
    """Return names without the parts that all of them begin and end with, but for one: ``layers.3``."""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    first = next((place for place in range(shortest) if len({each[place] for each in parts}) > 1), shortest)
    last = next((place for place in range(1, shortest) if len({each[-place] for each in parts}) > 1), shortest)
    if first == shortest:  # one block, or several of one name
        return names
    return [".".join(each[max(first - 1, 0) : len(each) - last + 1]) for each in parts]
