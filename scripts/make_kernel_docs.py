"""Write docs/kernels.md: every argument of every kernel function, and what becomes of it.

    python scripts/make_kernel_docs.py            # writes docs/kernels.md
    python scripts/make_kernel_docs.py --check    # fails if it would change

Arguments and defaults come from the signatures, words and limits from hf_neuron_moe/reference/specification. An
argument without an entry is an error, and so is an entry that no signature has.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import inspect
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe import kernels
from hf_neuron_moe.reference.specification import (
    FAMILIES,
    LIMITS,
    Constraint,
    constraints,
    entry_key,
    family,
    note_of,
    unsupported,
)
from hf_neuron_moe.reference.upstream_bugs import BACKWARD, FORWARD

DOCS = Path(__file__).resolve().parent.parent / "docs"
STATUSES = {
    "yes": "supported",
    "partly": "supported in part",
    "no effect": "accepted, no effect on values",
    "refused": "refused",
}

LIMITS_HEAD = ["size, dtype or option", "documented", "kernel"]
UNSUPPORTED_HEAD = ["argument", "value", "reason"]
KEYS = {"support", "shape", "dtypes", "note", "since", "refused", "accepted", "given"}
BUGS = {"moe_cte": FORWARD, "blockwise_backward": BACKWARD}
BUGS_HEAD = ["name", "release and fault"]
ARGUMENT_HEAD = ["argument", "default", "support", "note"]
OVERVIEW_HEAD = ["system", "function", "supported", "in part", "no effect on values", "refused"]


class DocumentationError(Exception):
    """The declarative file and the signatures disagree."""


def load() -> dict[str, Any]:
    """Read the declarative files: the page's own texts, and all families under ``system``."""
    return {**copy.deepcopy(family("page")), "system": [{"name": name, **family(name)} for name in FAMILIES]}


def render(declared: dict[str, Any], package: Any = kernels) -> str:
    """Return the whole page.

    Raises:
        DocumentationError: a function or an argument is missing, or something declared does not exist.
    """
    functions, types = public_names(package)
    described = [function["name"] for system in declared["system"] for function in system["function"]]
    disagree("functions", described, functions)
    disagree("types", list(declared["types"]), types)
    blocks, overview = [], []
    for number, system in enumerate(declared["system"], start=1):
        texts = {
            "{limits}": table(LIMITS_HEAD, limit_rows(constraints(system["name"]))),
            "{unsupported}": table(UNSUPPORTED_HEAD, unsupported_rows(system["name"])),
            "{bugs}": table(BUGS_HEAD, ([f"`{bug}`", text] for bug, text in BUGS.get(system["name"], {}).items())),
        }
        intro = system["intro"].strip()
        for mark, text in texts.items():
            intro = intro.replace(mark, text)
        blocks += [f"## {number}. {system['title']}", intro]
        unused = set(system.get("arguments", {}))
        for function in system["function"]:
            rows = argument_rows(function, system.get("arguments", {}), getattr(package, function["name"]), unused)
            if not function.get("returns", "").strip():
                raise DocumentationError(f"{function['name']}: what it returns is not described")
            returns = f"**Returns** {function['returns'].strip()}"
            blocks += [f"### `{function['name']}`", function["text"].strip(), returns]
            blocks += [table(ARGUMENT_HEAD, rows)] if rows else []
            overview.append(summary(number, function["name"], rows))
        if unused:
            raise DocumentationError(f"{system['title']}: no function has the arguments {sorted(unused)}")
    blocks += ["## Types", declared["types_intro"].strip()]
    blocks.append(table(["type", "members or fields", ""], type_rows(declared["types"], package)))
    head = [declared["intro"].strip(), status_list(), "## Overview", declared["overview_intro"].strip()]
    return "\n\n".join([*head, table(OVERVIEW_HEAD, overview), *blocks]) + "\n"


def limit_rows(rows: tuple[Constraint, ...]) -> Iterator[list[str]]:
    """One row per size, dtype and option: what the page states, what the kernels take."""
    for of in dict.fromkeys(row.of for row in rows):
        own = [row for row in rows if row.of == of]
        letter = next((f"{row.symbol}: " for row in own if row.symbol), "")
        columns = [[row for row in own if row.column == column] for column in LIMITS]
        yield [f"{letter}`{of}`", *("<br>".join(dict.fromkeys(map(bounds, column))) for column in columns)]


def unsupported_rows(name: str) -> Iterator[list[str]]:
    """One row per documented value that is an error."""
    for row in unsupported(name):
        yield [f"`{row['argument']}`", row["value"], row["reason"]]


def bounds(row: Constraint) -> str:
    """One row's bounds, then what they are for."""
    sizes = f"from {row.applies_from} on" if row.applies_from else ""
    sizes = f"below {row.applies_below}" if row.applies_below is not None else sizes
    releases = f"release {', '.join(row.releases)}" if row.releases else ""
    parts = [part for part in (sizes, row.when, releases, ", ".join(row.implementations)) if part]
    return f"{row.words} ({'; '.join(parts)})" if parts else row.words


def public_names(package: Any) -> tuple[list[str], list[str]]:
    """Split the package's public names into functions and types."""
    values = {name: getattr(package, name) for name in package.__all__}
    return [name for name in values if not inspect.isclass(values[name])], [
        name for name in values if inspect.isclass(values[name])
    ]


def disagree(kind: str, described: list[str], existing: list[str]) -> None:
    """Raise if the two lists of names are not the same."""
    missing, unknown = sorted(set(existing) - set(described)), sorted(set(described) - set(existing))
    if missing or unknown or len(described) != len(set(described)):
        raise DocumentationError(f"{kind}: not described {missing}, described but not public {unknown}, or twice")


def argument_rows(function: dict[str, Any], shared: dict[str, Any], value: Any, unused: set[str]) -> list[list[str]]:
    """Return the argument table's rows of one function; takes the shared entries it uses out of `unused`."""
    name, own = function["name"], dict(function.get("arguments", {}))
    rows = []
    parameters = inspect.signature(value).parameters.values()
    for parameter in parameters:
        key = entry_key(parameter.name, own) or entry_key(parameter.name, shared)
        if key is None:
            raise DocumentationError(f"{name}: argument {parameter.name} is not described")
        entry = own.get(key) or shared[key]
        if key not in own:
            unused.discard(key)
        keyword = " (keyword)" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        if entry.get("support") not in STATUSES or not entry.keys() & {"note", "shape"} or entry.keys() - KEYS:
            raise DocumentationError(f"{name}: {parameter.name} is {entry!r}, not support with a shape or a note")
        support, note = STATUSES[entry["support"]], note_of(entry)
        any_name = parameter.kind is inspect.Parameter.VAR_KEYWORD
        written = f"`{'**' if any_name else ''}{parameter.name}`{keyword}"
        rows.append([written, "" if any_name else shown(parameter.default), support, note])
    extra = [key for key in own if not any(fnmatchcase(parameter.name, key) for parameter in parameters)]
    if extra:
        raise DocumentationError(f"{name}: no such argument {extra}")
    return rows


def summary(system: int, name: str, rows: list[list[str]]) -> list[str]:
    """One line of the overview: how many arguments are plainly supported, and which are not."""

    def names(status: str) -> str:
        return ", ".join(row[0].removesuffix(" (keyword)") for row in rows if row[2] == STATUSES[status])

    supported = sum(row[2] == STATUSES["yes"] for row in rows)
    return [f"{system}", f"[`{name}`](#{name})", str(supported), names("partly"), names("no effect"), names("refused")]


def shown(default: Any) -> str:
    """Spell a default as it would be written in a call."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, enum.Enum):
        return f"`{type(default).__name__}.{default.name}`"
    if isinstance(default, torch.dtype):
        return f"`{default}`"
    return f"`{default!r}`"


def type_rows(declared: dict[str, str], package: Any) -> Iterator[list[str]]:
    """One row per public type, with what it consists of."""
    for name in sorted(declared):
        yield [f"`{name}`", ", ".join(parts(getattr(package, name))), declared[name]]


def parts(kind: type) -> list[str]:
    """Members of an enum, fields of a record with their defaults, fields of a named tuple."""
    if issubclass(kind, enum.Enum):
        return [f"`{member.name}`={member.value}" for member in kind]
    if dataclasses.is_dataclass(kind):
        return [f"`{field.name}`{'' if field.default is dataclasses.MISSING else '=' + plain(field.default)}"
                for field in dataclasses.fields(kind) if field.init]  # fmt: skip
    return [f"`{field}`" for field in getattr(kind, "_fields", ())]


def plain(default: Any) -> str:
    """Spell a field's default without further markup."""
    return shown(default).strip("`")


def status_list() -> str:
    """Explain the words of the support column."""
    meanings = {
        "yes": "does what its documentation says",
        "partly": "the note says which values are refused or act differently",
        "no effect": "checked where upstream documents a rule; it schedules work on the device",
        "refused": "any value but the default raises",
    }
    return "\n".join(f"* **{STATUSES[status]}**: {text}." for status, text in meanings.items())


def table(head: list[str], rows: Any) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if docs/kernels.md is out of date")
    check = parser.parse_args().check
    page, target = render(load()), DOCS / "kernels.md"
    if check:
        current = target.read_text(encoding="utf-8") if target.exists() else ""
        if current != page:
            print("docs/kernels.md is out of date: run python scripts/make_kernel_docs.py")
        return int(current != page)
    target.write_text(page, encoding="utf-8")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
