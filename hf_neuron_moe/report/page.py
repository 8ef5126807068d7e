"""The page: style, sections in their order, one file. Nothing in it is loaded from anywhere."""

from __future__ import annotations

import contextlib
import os
from html import escape
from pathlib import Path

from hf_neuron_moe._version import __version__
from hf_neuron_moe.errors import DestinationError, DiskError, public
from hf_neuron_moe.report.run_data import Contents
from hf_neuron_moe.report.runs import losses_section, progress_section, runs_table
from hf_neuron_moe.report.sections import (
    bytes_section,
    environment_section,
    health_section,
    load_section,
    map_section,
    study_sections,
)

_WRITABLE = "a file that can be written"


def render(contents: Contents) -> str:
    """Return the page as one HTML document without references to other files."""
    body = [study_sections(study) for study in contents.studies]
    if contents.runs:
        body += [runs_table(contents.runs), losses_section(contents.runs), progress_section(contents.runs)]
        body += [map_section(contents.runs), bytes_section(contents.runs)]
        for run in contents.runs:
            body += [health_section(run), load_section(run)]
    for name, environment in _environments(contents):
        body.append(environment_section(f"Environment: {name}", environment))
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = escape(f"Training report: {contents.title}")
    counts = (len(contents.runs), "run", "runs"), (len(contents.studies), "parity study", "parity studies")
    found = ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts if count)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{style}</style></head><body><main><h1>{title}</h1>"
        f'<p class="soft">{escape(found)}; hf-neuron-moe {escape(__version__)}</p>{"".join(body)}'
        "</main></body></html>\n"
    )


def _environments(contents: Contents) -> list[tuple[str, dict[str, object]]]:
    """What was recorded about machines, once where runs share it but for the date."""
    named = [(study.name, study.content) for study in contents.studies] + [(run.name, run.run) for run in contents.runs]
    distinct: list[tuple[list[str], dict[str, object]]] = []
    for name, content in named:
        environment = dict(content.get("environment") or {})
        same = (names for names, known in distinct if environment | {"date": None} == known | {"date": None})
        if (names := next(same, None)) is not None:
            names.append(name)
        else:
            distinct.append(([name], environment))
    return [(", ".join(names), environment) for names, environment in distinct]


@public("report")
def write_report(contents: Contents, path: Path) -> int:
    """Write the page whole or not at all; return its size in bytes."""
    remedy = "Name another file: -o FILE.html."
    if path.is_dir() or not path.parent.is_dir():
        got = "a folder" if path.is_dir() else f"a name in {path.parent}, which is no folder"
        remedy = "Name a file (-o FILE.html) in a folder that exists."
        raise DestinationError.about(str(path), _WRITABLE, got, remedy)
    page = render(contents).encode()
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(page)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            partial.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError):  # what /proc and the like say of every new file
            got = f"a name in {path.parent}, where no file can be created"
            raise DestinationError.about(str(path), _WRITABLE, got, remedy) from error
        raise DiskError.about(str(path), _WRITABLE, error.strerror, remedy) from error
    return len(page)
