"""A page of sections: HTML that loads nothing and works offline, Markdown, or JSON; written whole or not at all.

    sections = [Section("Saved for backward", ["A paragraph.", Table(["policy", "KiB"], [["full", 9.5]]), figure])]
    write_page(render_page("Title", "Subtitle", sections), Path("page.html"))

Parts are paragraphs (plain text, escaped here), `Missing` ones, and `Table` and `Figure` of plots.py. Every figure gets
its legend as buttons, its values as a table, and a CSV to download. Only `render_page` needs plotly and jinja2.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hf_neuron_moe._version import __version__
from hf_neuron_moe.errors import ReportError, public
from hf_neuron_moe.output_files import replacing
from hf_neuron_moe.report.plots import Cell, Figure, Table

NAME_PAGE = "Name a file (-o FILE.html) in a folder that exists."
_HERE = Path(__file__).parent
_MARKDOWN = re.compile(r"([\\`*\[\]<>|&#~$])")
_FORMULA = re.compile(r"[=+\-@\t\r]")
MOST_MARKDOWN_ROWS = 12


class Missing(str):
    """A paragraph about what is not there, and why."""

    __slots__ = ()


Part = str | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    heading: str
    parts: Sequence[Part]

    @property
    def groups(self) -> list[tuple[str, list[Part]]]:
        """The parts with their kind; figures that follow each other stand beside each other."""
        return [(kind, list(parts)) for kind, parts in groupby(self.parts, key=lambda part: type(part).__name__)]


@public("report")
def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return one HTML document without references to other files; plotly.js in it takes about 4.8 MB."""
    try:
        from jinja2 import Environment, FileSystemLoader
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        expected, remedy = "made with plotly and jinja2", "Install them: pip install plotly jinja2."
        remedy += " Markdown and JSON (--format) need neither."
        raise ReportError.about("the HTML page", expected, f"no module {error.name}", remedy) from error
    environment = Environment(autoescape=True, loader=FileSystemLoader(_HERE), trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters |= {"cell": _shown, "csv": _csv}
    scripts = [get_plotlyjs(), (_HERE / "page.js").read_text(encoding="utf-8")] if _figures(sections) else []
    # Nothing but these scripts runs, and nothing is fetched, whatever a name in a run's files would like.
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    facts = {"title": title, "subtitle": subtitle, "sections": sections, "style": style, "policy": policy}
    return environment.get_template("page.html.j2").render(facts, scripts=scripts, version=__version__)


def render_markdown(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page's texts and tables, of a figure's table at most twelve rows."""
    lines = [f"# {_marked(title)}", "", f"{_marked(subtitle)}; hf-neuron-moe {__version__}"]
    for section in sections:
        lines += ["", f"## {_marked(section.heading)}"]
        for part in section.parts:
            if isinstance(part, str):
                lines += ["", _marked(part)]
                continue
            rows = part.rows if isinstance(part, Table) else _spread(part.table.rows)
            table = part if isinstance(part, Table) else part.table
            if isinstance(part, Figure):
                shown = f" ({len(rows)} of {len(table.rows)} rows)" if len(rows) < len(table.rows) else ""
                lines += ["", f"**{_marked(part.title)}**{shown}"]
            cells = [[_marked(_shown(cell)) for cell in row] for row in [table.columns, *rows]]
            cells.insert(1, ["---"] * len(table.columns))
            lines += ["", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines) + "\n"


def render_json(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page's texts and all rows of all tables as one JSON object; NaN and infinities are null."""
    content = []
    for section in sections:
        texts = [part for part in section.parts if isinstance(part, str)]
        figures = [
            {"title": part.title, "alt": part.alt, **_object(part.table)}
            for part in section.parts
            if isinstance(part, Figure)
        ]
        tables = [_object(part) for part in section.parts if isinstance(part, Table)]
        content.append({"heading": section.heading, "text": texts, "tables": tables, "figures": figures})
    facts = {"title": title, "subtitle": subtitle, "version": __version__, "sections": content}
    return json.dumps(facts, indent=1, allow_nan=False) + "\n"


@public("report")
def write_page(text: str, path: Path) -> int:
    """Write a page whole or not at all; return its size in bytes."""
    page = text.encode(errors="replace")  # names of files may hold bytes that are no text
    with replacing(path, NAME_PAGE) as partial:
        partial.write_bytes(page)
    return len(page)


def _figures(sections: Sequence[Section]) -> bool:
    return any(isinstance(part, Figure) for section in sections for part in section.parts)


def _shown(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _marked(text: str) -> str:
    """Escape a text for Markdown and its tables."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _spread(rows: Sequence[Any]) -> list[Any]:
    """At most a dozen rows, evenly spaced, with the first and the last."""
    if len(rows) <= MOST_MARKDOWN_ROWS:
        return list(rows)
    last = MOST_MARKDOWN_ROWS - 1
    return [rows[round(index * (len(rows) - 1) / last)] for index in range(MOST_MARKDOWN_ROWS)]


def _object(table: Table) -> dict[str, Any]:
    rows = [
        [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row] for row in table.rows
    ]
    return {"columns": list(table.columns), "rows": rows}


def _csv(table: Table) -> str:
    """A data address with the table; a text that a spreadsheet would compute gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out)
    for row in [table.columns, *table.rows]:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell for cell in row])
    return "data:text/csv;charset=utf-8," + quote(out.getvalue())
