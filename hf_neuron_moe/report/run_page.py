"""What is on the page about training runs, in which order, and in which form it is written."""

from __future__ import annotations

from pathlib import Path

from hf_neuron_moe.report.alarms import guard_section
from hf_neuron_moe.report.page import Section, render_json, render_markdown, render_page, write_page
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

FORMATS = {"html": render_page, "md": render_markdown, "json": render_json}


def render(contents: Contents, form: str = "html") -> str:
    """Return everything about the runs and studies of a folder, as ``html``, ``md`` or ``json``."""
    counts = (len(contents.runs), "run", "runs"), (len(contents.studies), "parity study", "parity studies")
    found = ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts if count)
    return FORMATS[form](f"Training report: {contents.title}", found, _sections(contents))


def write_report(contents: Contents, path: Path, form: str = "html") -> int:
    """Write the report whole or not at all; return its size in bytes."""
    return write_page(render(contents, form), path)


def _sections(contents: Contents) -> list[Section]:
    runs = contents.runs
    sections = [section for study in contents.studies for section in study_sections(study)]
    if runs:
        sections += [runs_table(runs), losses_section(runs), progress_section(runs), map_section(runs)]
        sections.append(bytes_section(runs))
    for run in runs:
        sections += [health_section(run), guard_section(run), load_section(run)]
    return sections + [environment_section(f"Environment: {name}", found) for name, found in _environments(contents)]


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
