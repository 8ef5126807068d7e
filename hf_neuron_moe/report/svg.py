"""Figures as inline SVG: lines with bands, bars, heat maps. Colours come from the page's style, light or dark.

All figures are drawn on a narrow canvas, so that their text stays readable at a phone's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LINE_HEIGHT = 400, 250
COLORS = 6  # Classes ``c0`` to ``c5`` of the page's style

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 36
_BAR, _LABELLED_CELLS, _TITLED_CELLS = 26, 14, 1500
_CHARACTER = 6.2  # Width of a character of the labels, at their size, about

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve: points, and around it a band between `low` and `high` at the same x; empty for none."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values inside of ``low`` to ``high``, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for a label: four significant digits at most, two where it needs a power of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.4g}"


def line_chart(lines: Sequence[Line], *, alt: str, x_label: str, y_label: str) -> str:
    """Draw curves over one pair of axes."""
    ys = [y for line in lines for y in (*(y for _, y in line.points), *line.low, *line.high)]
    x_low, x_high = _range([x for line in lines for x, _ in line.points])
    y_low, y_high = _range(ys, pad=0.04)

    def place(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        left = _LEFT + across * (WIDTH - _LEFT - _RIGHT)
        return left, LINE_HEIGHT - _BOTTOM - up * (LINE_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for value in ticks(y_low, y_high):
        left, y = place(x_low, value)
        parts.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{WIDTH - _RIGHT:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("end", _LEFT - 5, y + 4, short(value)))
    for value in ticks(x_low, x_high):
        x, bottom = place(value, y_low)
        parts.append(_text("cell", x, bottom + 14, short(value)))
    parts.append(_text("cell", (_LEFT + WIDTH - _RIGHT) / 2, LINE_HEIGHT - 3, x_label))
    turned = f' transform="translate(10,{(LINE_HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)"'
    parts.append(_text("cell", 0, 0, y_label, turned))
    for index, line in enumerate(lines):
        if line.low:
            xs = [x for x, _ in line.points]
            outline = [*zip(xs, line.low), *reversed(list(zip(xs, line.high)))]
            parts.append(f'<polygon class="band c{index % COLORS}" points="{_path(place, outline)}"/>')
    for index, line in enumerate(lines):
        if len(line.points) == 1:  # of which no line can be seen
            across, down = place(*line.points[0])
            parts.append(f'<circle class="bar c{index % COLORS}" cx="{across:.1f}" cy="{down:.1f}" r="3.5"/>')
            continue
        dashes = " dashed" if index % 2 else ""
        curve = _path(place, line.points)
        parts.append(f'<polyline class="curve{dashes} c{index % COLORS}" points="{curve}"/>')
    return _figure(parts, LINE_HEIGHT, alt) + legend([line.name for line in lines])


def legend(names: Sequence[str]) -> str:
    """Return the list of curves; HTML, so that it wraps."""
    items = "".join(f'<li><span class="key c{i % COLORS}"></span>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def bar_chart(values: Mapping[str, float], *, alt: str, unit: str) -> str:
    """Draw one horizontal bar per name, with its value."""
    longest = max(values.values(), default=0.0) or 1.0
    parts = []
    for row, (name, value) in enumerate(values.items()):
        top = _TOP + row * (_BAR + 16)
        width = max(1.0, value / longest * (WIDTH - 110))
        bar = f'x="0" y="{top + 15}" width="{width:.1f}" height="{_BAR - 8}"'
        parts += [_text("", 0, top + 10, name), f'<rect class="bar c{row % COLORS}" {bar}/>']
        parts.append(_text("", width + 6, top + 28, f"{short(value)} {unit}"))
    return _figure(parts, 2 * _TOP + len(values) * (_BAR + 16), alt)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    *,
    alt: str,
    unit: str,
    low: float | None = None,
    least_range: float = 0.0,
) -> str:
    """Draw a value per row and column as colour, with the number in it where there is room; None is left empty.

    The colours reach from `low` (the least value, if None) to the greatest value, and at least over `least_range`.
    """
    found = [value for line in cells for value in line if value is not None]
    high = max(found, default=1.0)
    low = min(min(found, default=0.0), high - least_range) if low is None else low
    left = min(170.0, 8 + _CHARACTER * max((len(row) for row in rows), default=0))
    width = (WIDTH - left) / max(1, len(columns))
    height = 18.0 if len(rows) <= 40 else 11.0
    labelled = len(columns) <= _LABELLED_CELLS and width >= 25
    parts = []
    for index, (row, line) in enumerate(zip(rows, cells)):
        top = _TOP + 14 + index * height
        parts.append(_text("small", 0, top + height / 2 + 4, row))
        for column, value in enumerate(line):
            if value is None:
                continue
            x = left + column * width
            share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5
            title = ""
            if len(found) <= _TITLED_CELLS:
                title = f"<title>{escape(f'{row}, {columns[column]}: {short(value)} {unit}')}</title>"
            box = f'x="{x:.1f}" y="{top:.1f}" width="{width:.2f}" height="{height}" fill="{shade(share)}"'
            parts.append(f"<rect {box}>{title}</rect>")
            if labelled:
                ink = f' fill="{"#fff" if share < 0.6 else "#111"}"'
                parts.append(_text("cell", x + width / 2, top + height / 2 + 4, f"{value:.3g}", ink))
    # As many of the columns' names as fit beside each other.
    room = max((_CHARACTER * len(name) + 6 for name in columns), default=1.0)
    for column in range(0, len(columns), max(1, math.ceil(room / width))):
        parts.append(_text("cell small", left + (column + 0.5) * width, _TOP + 8, columns[column]))
    colors = ", ".join(shade(index / 8) for index in range(9))
    ends = f"<span>{escape(short(low))}</span><span>{escape(f'{short(high)} {unit}')}</span>"
    scale = f'<div class="scale"><div style="background:linear-gradient(90deg,{colors})"></div>{ends}</div>'
    return _figure(parts, _TOP + 20 + len(rows) * height, alt) + scale


def shade(share: float) -> str:
    """A colour from dark violet over teal to light yellow, readable on light and dark ground."""
    stops = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
    place = share * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    part = place - index
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(stops[index], stops[index + 1]))


def _range(values: Sequence[float], pad: float = 0.0) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * pad if high > low else max(abs(low), 1.0) * 0.05
    return low - margin, high + margin


def _path(place: Callable[[float, float], Point], points: Iterable[Point]) -> str:
    return " ".join(f"{left:.1f},{top:.1f}" for left, top in (place(x, y) for x, y in points))


def _text(kind: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _figure(parts: Sequence[str], height: float, alt: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(alt)}"'
    return f"<svg {size}><title>{escape(alt)}</title>{''.join(parts)}</svg>"
