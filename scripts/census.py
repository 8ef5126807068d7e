"""Census of the installed transformers: what patch_model does with each of its experts and MLP classes.

    python scripts/census.py                     # every class, a summary and what is not patched
    python scripts/census.py --only 'Gemma*'     # classes or families by name
    python scripts/census.py --json rows.json    # the rows as JSON
    python scripts/census.py --update-docs       # writes the tables of docs/supported.md

Each class is built small, in a process of its own. Where the class can be patched, the patched block computes in fp32,
and its output and all gradients are compared with the class's own forward. Exit status 1 says that a class differs,
that a process died, or that a gated class could not be built.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import multiprocessing
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from census_classes import KINDS, UNGATED, Listed, library_classes
from census_judge import DIED, DIFFERENT, NO_GATE, NOT_BUILT, RESULTS, Row, judge

PAGE = Path(__file__).resolve().parent.parent / "docs" / "supported.md"
BEGIN, END = "<!-- census: begin -->\n", "<!-- census: end -->\n"
PRELOADED = (
    "hf_neuron_moe.patching.api",
    "hf_neuron_moe.backends.torch.backend",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.integrations.moe",
    "torch._dynamo",
    "census_judge",
)
"""Modules that are imported once for all processes."""
TIMEOUT = 120.0
"""Seconds for one class, on a busy machine too."""


class Running(NamedTuple):
    """A class whose process has not answered yet."""

    listed: Listed
    process: multiprocessing.process.BaseProcess
    deadline: float


def _answer(listed: Listed, sender: Connection) -> None:
    import torch

    gc.disable()  # this process ends soon, and its collections would go through all that is preloaded
    torch.set_num_threads(1)
    sender.send(judge(listed))


Answer = Callable[[Listed, Connection], None]


def census(classes: Sequence[Listed], jobs: int, timeout: float = TIMEOUT, answer: Answer = _answer) -> Iterator[Row]:
    """Yield the row of each class as it is done, from at most `jobs` processes at a time.

    `answer` runs in a process of its own and sends the row of a class; a process without an answer within `timeout`
    seconds is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    waiting, running = deque(classes), dict[Connection, Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            listed = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=answer, args=(listed, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = Running(listed, process, time.monotonic() + timeout)
        ready = wait(list(running), timeout=1.0)
        for receiver, each in list(running.items()):
            if receiver in ready or time.monotonic() > each.deadline:
                del running[receiver]
                yield _collected(receiver, each, timeout)


def _collected(receiver: Connection, each: Running, timeout: float) -> Row:
    """The answer of a process that has ended, or of one that is ended here because it takes too long."""
    row = Row(*each.listed, DIED, reason=f"no answer within {timeout:g} s")
    if receiver.poll():
        try:
            row = receiver.recv()
        except EOFError:
            each.process.join(timeout=10)
            row = row._replace(reason=f"its process ended with exit code {each.process.exitcode}")
    each.process.kill()
    each.process.join()
    receiver.close()
    return row


def chosen(patterns: Sequence[str]) -> list[Listed]:
    """The classes whose name or family matches a glob; all without globs."""
    return [
        each
        for each in library_classes()
        if not patterns
        or any(fnmatch.fnmatchcase(name, glob) for glob in patterns for name in (each.name, each.family))
    ]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table: how many classes of each kind have which result."""
    counts = Counter((row.kind, row.result) for row in rows)
    results = [result for result in RESULTS if any(counts[kind, result] for kind in KINDS)]
    lines = [_line("kind", *results, "total"), _line(*["---"] * (len(results) + 2))]
    for kind in KINDS:
        if total := sum(counts[kind, result] for result in RESULTS):
            lines.append(_line(kind, *(str(counts[kind, result] or "") for result in results), str(total)))
    return "".join(lines)


def tables(rows: Sequence[Row], release: str) -> str:
    """The generated part of the page."""
    parts = [f"transformers {release}, {len(rows)} classes.\n", summary(rows)]
    for kind in KINDS:
        if kind != UNGATED and (found := [row for row in rows if row.kind == kind]):
            head = _line("family", "class", "result", "gate", "reason") + _line(*["---"] * 5)
            body = (_line(row.family, f"`{row.name}`", row.result, _code(row.gate), _cell(row.reason)) for row in found)
            parts.append(f"## {kind[0].upper()}{kind[1:]}\n\n{head}{''.join(body)}")
    return "\n".join([*parts, *ungated([row for row in rows if row.kind == UNGATED])])


def ungated(rows: Sequence[Row]) -> Iterator[str]:
    """A heading and a paragraph for each reason, with the names of all classes that have it."""
    if rows:
        yield f"## {UNGATED}\n\n`patch_model` leaves these stock, and its option `strict` does not count them.\n"
    names: dict[str, list[str]] = {}
    for row in rows:
        reason = row.reason if row.result == NO_GATE else row.result
        names.setdefault(reason or "its parts are not named as those of an MLP", []).append(f"`{row.name}`")
    for reason, found in sorted(names.items(), key=lambda item: -len(item[1])):
        text = f"* {_cell(reason)} ({len(found)}): {', '.join(sorted(set(found), key=str.lower))}"
        yield textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def with_tables(page: str, generated: str) -> str:
    """Return the page with its generated part exchanged."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{generated}\n{END}{rest.split(END)[1]}"


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows that say that something is wrong: with the package, or with the census."""
    return [row for row in rows if row.result in (DIFFERENT, DIED) or (row.result == NOT_BUILT and row.kind != UNGATED)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="class or family names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--update-docs", action="store_true", help=f"write the tables of {PAGE.name}; not with --only")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    options = parser.parse_args(arguments)
    if options.update_docs and options.only:
        parser.error("--update-docs writes the whole table; leave out --only")
    classes = chosen(options.only)
    if not classes:
        parser.error(f"no class matches {', '.join(options.only)}")
    rows = sorted(census(classes, options.jobs))
    for row in rows:
        if (row.result not in RESULTS[:1] or options.only) and row.kind != UNGATED:
            print(f"{row.result:12} {row.family}.{row.name}{': ' if row.reason else ''}{row.reason}")
    print(f"\n{summary(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n", encoding="utf-8")
    if options.update_docs:
        import transformers

        page = with_tables(PAGE.read_text(encoding="utf-8"), tables(rows, transformers.__version__))
        PAGE.write_text(page, encoding="utf-8")
    for row in failed(rows):
        print(f"failed: {row.family}.{row.name} {row.result}: {row.reason}", file=sys.stderr)
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
