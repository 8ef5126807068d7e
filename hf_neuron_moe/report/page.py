"""The page: style, sections in their order, one file. Nothing in it is loaded from anywhere."""

from __future__ import annotations

import contextlib
import os
from html import escape
from pathlib import Path

from hf_neuron_moe._version import __version__
from hf_neuron_moe.errors import ConversionError, DestinationError, DiskError, public
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

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--ground:#fff;--line:#d8dee4;--panel:#f6f8fa;
--c0:#0550ae;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#7d6608}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--ground:#0d1117;--line:#30363d;--panel:#161b22;
--c0:#58a6ff;--c1:#f0883e;--c2:#56d364;--c3:#bc8cff;--c4:#f778ba;--c5:#e3c34a}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1.2rem 0 .2rem}h2,h3{overflow-wrap:anywhere}
p{margin:.4rem 0}.soft,figcaption,.missing{color:var(--soft);font-size:.9rem}
.missing{border-left:3px solid var(--line);padding-left:.6rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem;align-items:start}
figure{margin:0;padding:.6rem;background:var(--panel);border:1px solid var(--line);border-radius:8px;max-width:40rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .small{font-size:11px}
svg .cell{text-anchor:middle}svg .end{text-anchor:end}svg text[fill]{font-size:10.5px}
svg text[fill="#fff"]{fill:#fff}svg text[fill="#111"]{fill:#111}
.grid{stroke:var(--line);stroke-width:1}.curve{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.dashed{stroke-dasharray:6 3}.band{fill:var(--c);opacity:.16}.bar{fill:var(--c)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.4rem 0 0;padding:0;font-size:.85rem}
.key{display:inline-block;width:1.1em;height:.28em;margin-right:.4em;vertical-align:middle;background:var(--c)}
.scale{display:grid;grid-template-columns:1fr 1fr;font-size:.8rem;color:var(--soft);margin-top:.4rem}
.scale div{grid-column:1/3;height:.5rem;border-radius:3px}.scale span:last-child{text-align:right}
.scroll{overflow-x:auto;margin:.8rem 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;font-size:.85rem;white-space:nowrap;width:100%}
th,td{padding:.35rem .6rem;text-align:left;border-bottom:1px solid var(--line)}th{background:var(--panel)}
tr:last-child td{border-bottom:0}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:7rem;max-width:20rem}
.strip{display:flex;flex-wrap:wrap;gap:3px;margin:.4rem 0}.strip i{width:14px;height:14px;border-radius:3px}
.ok{background:var(--c2)}.skipped{background:var(--line)}.bad{background:var(--c1)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0;font-size:.9rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media (max-width:30rem){main{padding:.6rem}dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}}
"""


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
    title = escape(f"Training report: {contents.title}")
    found = ", ".join(
        f"{count} {kind}{'s' if count != 1 else ''}"
        for count, kind in ((len(contents.runs), "run"), (len(contents.studies), "parity study"))
        if count
    ).replace("studys", "studies")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f'<p class="soft">{escape(found)}; hf-neuron-moe {escape(__version__)}</p>{"".join(body)}'
        "</main></body></html>\n"
    )


def _environments(contents: Contents) -> list[tuple[str, dict[str, object]]]:
    """What was recorded about machines, once where runs share it but for the date."""
    named = [(study.name, dict(study.content.get("environment") or {})) for study in contents.studies]
    named += [(run.name, dict(run.run.get("environment") or {})) for run in contents.runs]
    distinct: list[tuple[str, dict[str, object]]] = []
    for name, environment in named:
        for index, (names, known) in enumerate(distinct):
            if environment | {"date": None} == known | {"date": None}:
                distinct[index] = (f"{names}, {name}", known)
                break
        else:
            distinct.append((name, environment))
    return distinct


@public("report")
def write_report(contents: Contents, path: Path) -> int:
    """Write the page whole or not at all; return its size in bytes."""
    if path.is_dir() or not path.parent.is_dir():
        got = "a folder" if path.is_dir() else f"a name in {path.parent}, which is no folder"
        raise _unwritable(DestinationError, path, got, "Name a file (-o FILE.html) in a folder that exists.")
    page = render(contents).encode()
    partial = path.with_name(path.name + ".partial")
    remedy = "Name another file: -o FILE.html."
    try:
        partial.write_bytes(page)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            partial.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError):  # what /proc and the like say of every new file
            got = f"a name in {path.parent}, where no file can be created"
            raise _unwritable(DestinationError, path, got, remedy) from error
        raise _unwritable(DiskError, path, error.strerror, remedy) from error
    return len(page)


def _unwritable(kind: type[ConversionError], path: Path, got: str | None, remedy: str) -> ConversionError:
    expected = "a file that can be written"
    return kind.about(str(path), expected, got, remedy)
