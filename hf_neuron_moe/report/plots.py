"""Figures as data: what plotly.js draws, its values as a table, and words instead of the picture. Imports no plotly.

    line_figure([Line("mxfp8", [(1, 3.2), (2, 3.1)])], title="Loss", alt="Loss over the steps", x="step", y="nats")
    bar_figure(["minimal", "full"], {"KiB/token": [4.0, 9.5]}, title="Saved bytes", alt="...")
    heat_map(blocks, products, values, title="SQNR", alt="...", unit="dB", thresholds=[Threshold(24.0, "below 24 dB")])
    scatter_figure({"blocks": [(0.1, 0.12, "model.layers.0.mlp")]}, title="...", alt="...", x="predicted", y="measured")

Each returns a `Figure` for a part of a `page.Section`. Texts may come from strangers: they are escaped here for plotly,
which reads tags in names, and by the page's template. NaN and infinity are gaps in a picture and stay in the table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from textwrap import wrap
from typing import Any

COLORS = 6  # ``--c0`` to ``--c5`` of the page's style, and ``--t0`` to ``--t5`` for bands
MOST_CELLS_WITH_TEXT = 14  # columns of a heat map whose values are written into the cells
LONGEST_NAME = 22  # characters of a row's name beside a heat map or bar; the whole name is in hover and table
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

Point = tuple[float, float]
Cell = str | float | None
Cells = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Line:
    """One curve: points, a band between `low` and `high` at the same x, and the values it was averaged from."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    raw: Mapping[str, Sequence[Point]] = field(default_factory=dict)  # by run; drawn on demand


@dataclass(frozen=True)
class Threshold:
    """A value that is drawn as a line; in a heat map, cells beyond it get a frame."""

    value: float
    text: str  # such as "below 24 dB"
    below: bool = True  # which side is bad

    def framed(self, picture: str, row: int, column: int, cell: float | None) -> bool:
        """Whether a cell of a heat map is beyond the value."""
        return cell is not None and (cell < self.value if self.below else cell > self.value)


@dataclass(frozen=True)
class Marks:
    """Cells of a heat map that get a frame, by the picture's name: rows and columns."""

    text: str
    cells: Mapping[str, Collection[tuple[int, int]]]

    def framed(self, picture: str, row: int, column: int, cell: float | None) -> bool:
        """Whether a cell is one of them."""
        return (row, column) in self.cells.get(picture, ())


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; None is an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Figure:
    """A picture, the table of its values, and what a reader can switch."""

    title: str
    alt: str
    table: Table
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    keys: Sequence[str] = ()  # the legend: names of the groups of traces, which can be switched off
    limits: Sequence[str] = ()  # what a frame or a dashed line means
    frames: Sequence[Mapping[str, Any]] = ()  # of a heat map: label, z and shapes
    first: int = 0  # which of them is shown at first
    log: bool = False  # all values are positive
    raw: bool = False  # there are traces of raw values

    @property
    def drawing(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {"data": self.data, "layout": self.layout, "frames": list(self.frames)}


def plain(text: str) -> str:
    """Escape a text for plotly, which understands some tags and entities."""
    return escape(" ".join(text.split()), quote=False)


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out what all module names begin with, up to a dot: ``model.layers.3.mlp`` -> ``3.mlp``."""
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split) and len({parts[shared] for parts in split}) == 1:
        shared += 1
    return [".".join(parts[shared:]) for parts in split]


def labels(names: Sequence[str]) -> list[str]:
    """Shorten names beside a picture: what they share at either end goes first, then the middle of what is long."""
    texts = list(names)
    for turn in (1, -1):  # what all begin with, then what all end with
        if len(set(texts)) > 1 and max(map(len, texts)) > LONGEST_NAME:
            ends = short_names([".".join(text.split(".")[::turn]) for text in texts])
            texts = [".".join(end.split(".")[::turn]) for end in ends]
    cut = LONGEST_NAME // 2
    return [text if len(text) <= LONGEST_NAME else f"{text[: cut - 1]}…{text[-cut:]}" for text in texts]


def finite(value: float | None) -> float | None:
    """Return a number of eight digits for a picture; None for NaN and infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.8g}")


def line_figure(
    lines: Sequence[Line], *, title: str, alt: str, x: str = "step", y: str, thresholds: Sequence[Threshold] = ()
) -> Figure:
    """Return curves over one pair of axes, with bands, raw values on demand, and thresholds as dashed lines."""
    data: list[dict[str, Any]] = []
    columns: dict[str, dict[float, float]] = {}
    for index, line in enumerate(lines):
        color, xs = f"var(--c{index % COLORS})", [place for place, _ in line.points]
        columns[line.name] = dict(line.points)
        for name, values in (("lowest", line.low), ("highest", line.high)):
            if values:
                columns[f"{line.name}, {name}"] = dict(zip(xs, values))
                edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
                fill = {"fill": "tonexty" if name == "highest" else "none", "fillcolor": f"var(--t{index % COLORS})"}
                data.append(_curve(index, plain(line.name), zip(xs, values)) | edge | fill)
        for run, points in line.raw.items():
            columns[f"{line.name}, raw{f', {run}' if run else ''}"] = dict(points)
            thin = {"mode": "lines", "line": {"color": color, "width": 1}, "opacity": 0.55}
            data.append(_curve(index, plain(run or line.name), points) | thin | {"visible": False, "meta": "raw"})
        # Of a single point no line can be seen.
        mode = {"mode": "lines" if len(line.points) > 1 else "markers", "marker": {"color": color}}
        style = {"line": {"color": color, "width": 2, "dash": _DASHES[index % COLORS]}}
        data.append(_curve(index, plain(line.name), line.points) | mode | style)
    places = sorted({place for column in columns.values() for place in column})
    table = Table([x, *columns], [[place, *(column.get(place) for column in columns.values())] for place in places])
    known = [value for column in columns.values() for value in column.values()]
    layout = _axes(x, y, 300) | {"shapes": [_threshold_line(each) for each in thresholds]}
    if len({finite(value) for value in known}) == 1:  # plotly would draw it in the middle of -1 to 1 around it
        layout["yaxis"] |= {"rangemode": "tozero"}
    return Figure(
        title,
        alt,
        table,
        data,
        layout,
        [line.name for line in lines],
        [each.text for each in thresholds],
        log=bool(known) and all(value > 0 for value in known),
        raw=any(line.raw for line in lines),
    )


def bar_figure(names: Sequence[str], series: Mapping[str, Sequence[float]], *, title: str, alt: str) -> Figure:
    """Return horizontal bars: one per name, or a group of one per series; the name of a series is its unit."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(unit),
            "legendgroup": str(index),
            "x": [finite(value) for value in values],
            "y": [plain(name) for name in names],
            "marker": {"color": f"var(--c{index % COLORS})"},
            "texttemplate": "%{x:.4~g}",
            "hovertemplate": "%{y}: %{x:.5g}<extra>%{fullData.name}</extra>",
        }
        for index, (unit, values) in enumerate(series.items())
    ]
    layout = _axes(next(iter(series)) if len(series) == 1 else "", "", 90 + 30 * len(names) * max(1, len(series)))
    layout["yaxis"] |= _names(names) | {"autorange": "reversed"}
    ends = [value for values in series.values() for value in values if math.isfinite(value)]
    if min(ends, default=0.0) < 0:  # room for the values of short bars
        span = max(*ends, 0.0) - min(ends)
        layout["xaxis"]["range"] = [min(ends) - 0.35 * span, max(*ends, 0.0) + 0.2 * span]
        for each in data:
            each["texttemplate"] = "%{x:.2~g}"
    table = Table(["", *series], list(zip(names, *series.values())))
    return Figure(title, alt, table, data, layout, list(series) if len(series) > 1 else ())


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Cells | Mapping[str, Cells],
    *,
    title: str,
    alt: str,
    unit: str,
    low: float | None = None,
    least_range: float = 0.0,
    thresholds: Sequence[Threshold | Marks] = (),
    first: str | None = None,
) -> Figure:
    """Return a value per row and column as colour, and as text where there is room; None is left empty.

    Names of rows and of columns are unique. `values` by name (of steps, say) are pictures of which a slider shows one,
    at first the one named `first`, or the last. The colours reach from `low` (None: the least value) to the greatest
    value, and at least over `least_range`.
    """
    pictures = values if isinstance(values, Mapping) else {"": values}
    found = (finite(cell) for cells in pictures.values() for line in cells for cell in line)
    known = [cell for cell in found if cell is not None]
    high = max(known, default=1.0)
    low = min(min(known, default=0.0), high - least_range) if low is None else low
    frames = [
        {
            "label": name,
            "z": [[finite(cell) for cell in line] for line in cells],
            "shapes": [frame for each in thresholds for frame in _frames(name, cells, each)],
        }
        for name, cells in pictures.items()
    ]
    shown = len(frames) - 1 if first is None else list(pictures).index(first)
    drawn: dict[str, Any] = {
        "type": "heatmap",
        "x": [plain(column) for column in columns],
        "y": [plain(row) for row in rows],
        "z": frames[shown]["z"],
        "zmin": low,
        "zmax": high,
        "colorscale": "Viridis",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": plain(unit), "side": "right"}},
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}, %{{x}}: %{{z:.4g}} {plain(unit)}<extra></extra>",
    }
    if len(columns) <= MOST_CELLS_WITH_TEXT:
        drawn["texttemplate"] = f"%{{z:{_format(known, unit)}}}"
    top = 7 * max(map(len, labels(columns)), default=0)  # of names, which are turned where they do not fit a phone
    height = (22 if len(rows) <= 40 else 12) * len(rows) + 80 + (top if top * len(columns) > 240 else 0)
    layout = _axes("", "", height) | {"shapes": frames[shown]["shapes"]}
    layout["xaxis"] |= _names(columns, MOST_CELLS_WITH_TEXT) | {"side": "top", "autotickangles": [0, 90]}
    layout["yaxis"] |= _names(rows) | {"autorange": "reversed"}
    lines = [[name, row, *line] for name, cells in pictures.items() for row, line in zip(rows, cells)]
    table, limits = Table(["step", "", *columns], lines), [each.text for each in thresholds]
    if len(frames) > 1:
        return Figure(title, alt, table, [drawn], layout, (), limits, frames, shown)
    return Figure(title, alt, Table(["", *columns], [line[1:] for line in lines]), [drawn], layout, (), limits)


def _format(values: Sequence[float], unit: str) -> str:
    """How values are written into the cells of a heat map: counts whole, others short."""
    if all(value == int(value) for value in values):
        return ",d"
    return ".2~f" if unit == "%" else ".3~g"


def scatter_figure(
    groups: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    title: str,
    alt: str,
    x: str,
    y: str,
    diagonal: bool = False,
) -> Figure:
    """Return points (x, y, name) by group, and with `diagonal` the line y = x."""
    data = [
        _curve(index, plain(group), [(point[0], point[1]) for point in points])
        | {
            "mode": "markers",
            "marker": {"color": f"var(--c{index % COLORS})", "symbol": index, "size": 9},
            "text": [plain(name) for *_, name in points],
            "hovertemplate": f"%{{text}}<br>{plain(x)} %{{x:.4g}}, {plain(y)} %{{y:.4g}}<extra></extra>",
        }
        for index, (group, points) in enumerate(groups.items())
    ]
    ends = [value for points in groups.values() for point in points for value in point[:2] if math.isfinite(value)]
    layout = _axes(x, y, 340)
    if diagonal and ends:
        line = {"color": "var(--soft)", "width": 1, "dash": "dot"}
        low, high = min(ends), max(ends)
        layout["shapes"] = [{"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "line": line}]
    rows = [(group, name, across, up) for group, points in groups.items() for across, up, name in points]
    table = Table(["group", "name", x, y], rows)
    return Figure(title, alt, table, data, layout, list(groups) if len(groups) > 1 else ())


def _curve(index: int, name: str, points: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """What all traces of one key have in common."""
    placed = [(finite(across), finite(up)) for across, up in points]
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": str(index),
        "x": [across for across, _ in placed],
        "y": [up for _, up in placed],
        "hovertemplate": "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>",
    }


def _axes(x: str, y: str, height: int) -> dict[str, Any]:
    """The layout of all figures: as wide as there is room."""
    numbers = {"exponentformat": "e", "minexponent": 4}  # 1e-5 and not 10µ: axes have units of their own
    axis = numbers | {"automargin": True, "gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False}
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 12, "b": 8},
        "xaxis": axis | {"title": _title(x)},
        "yaxis": axis | {"title": _title(y)},
        "font": {"color": "var(--ink)", "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"namelength": 30, "font": {"color": "var(--ink)"}, "bgcolor": "var(--panel)"},
        "showlegend": False,
    }


def _names(names: Sequence[str], most: int = 40) -> dict[str, Any]:
    """An axis of names: shortened and all of them written, unless they are many."""
    axis: dict[str, Any] = {"type": "category", "showgrid": False}
    if len(names) <= most:
        texts = [plain(label) for label in labels(names)]
        axis |= {"tickmode": "array", "tickvals": [plain(name) for name in names], "ticktext": texts}
    return axis


def _title(text: str) -> dict[str, str]:
    """The title of an axis, in lines that fit a phone."""
    return {"text": "<br>".join(map(plain, wrap(text, 26)))}


def _threshold_line(threshold: Threshold) -> dict[str, Any]:
    line = {"color": "var(--bad)", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line} | dict.fromkeys(
        ("y0", "y1"), threshold.value
    )


def _frames(picture: str, cells: Cells, marking: Threshold | Marks) -> list[dict[str, Any]]:
    """A frame around every run of cells of a row that are marked."""
    shapes = []
    for row, line in enumerate(cells):
        marked = [marking.framed(picture, row, column, cell) for column, cell in enumerate(line)]
        for beyond, run in groupby(range(len(line)), key=marked.__getitem__):
            if beyond:
                places = list(run)
                box = {"x0": places[0] - 0.5, "x1": places[-1] + 0.5, "y0": row - 0.5, "y1": row + 0.5}
                shapes.append({"type": "rect", **box, "line": {"color": "var(--bad)", "width": 2}})
    return shapes
