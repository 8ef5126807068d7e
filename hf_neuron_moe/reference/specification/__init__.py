"""The documented functions as data, one TOML file per family; rules, docs/kernels.md and tests are made from it.

A family's file holds title, intro, `document` (the upstream page), `source`, and:

* ``[arguments]`` and ``[[function]]``: each argument's support, shape, dtypes, note and the release that brought it;
* ``[function.kernel]``: the signature of a direct kernel of ``moe_cte`` as far as it is its own;
* ``[[constraint]]``: bounds that the page states (column "documented") or that the kernels need (column "kernel");
* ``[[unsupported]]``: documented values that are errors here, with the reason;
* ``[[fault]]``: known faults of the kernels.

``release_2_30.json`` and ``release_2_33.json`` hold the documented signatures.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from hf_neuron_moe.checks import Rule
from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError, not_one_of

FAMILIES = ("mlp_forward", "mlp_backward", "mxfp8_products", "moe_cte", "blockwise_backward", "coat", "router")
LIMITS = ("documented", "kernel")
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Constraint:
    """Bounds of one size, dtype or option: a row ``[[constraint]]``."""

    of: str  # what a message names: an argument, or "H of hidden_states"
    column: str  # one of LIMITS
    source: str  # where the figure comes from
    symbol: str = ""  # the letter of a size
    multiple_of: int = 1
    minimum: int = 1
    maximum: int | None = None
    one_of: tuple[object, ...] = ()
    dtypes: tuple[str, ...] = ()
    same_as: str = ""  # another argument, whose dtype this one has
    implementations: tuple[str, ...] = ()  # that the row is for; all if empty, as the next
    releases: tuple[str, ...] = ()
    when: str = ""  # the circumstance in which it holds; the code knows what each name means
    applies_from: int = 0  # sizes that the row is for
    applies_below: int | None = None
    expected: str = ""  # the rule in words, with {fields} of the row
    fix: str = ""  # what to do, where that is not the function's usual advice

    @property
    def is_size(self) -> bool:
        """Whether a number is bounded."""
        return bool(self.symbol)

    @property
    def error(self) -> type[NeuronMoEError]:
        """Class of the error."""
        return ShapeError if self.is_size else DTypeError if self.dtypes or self.same_as else ConfigError

    @property
    def words(self) -> str:
        """The bounds in words."""
        if self.one_of:
            return "one of " + ", ".join(map(str, self.one_of)) if len(self.one_of) > 1 else str(self.one_of[0])
        if self.dtypes or self.same_as:
            return " or ".join(self.dtypes) or f"the dtype of {self.same_as}"
        bounds = f"{self.minimum} to {self.maximum}" if self.minimum > 1 else f"at most {self.maximum}"
        multiple = f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else ""
        return ", ".join(part for part in (multiple, "" if self.maximum is None else bounds) if part)

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Return whether the value of this row's argument, among `values` by argument, is within the bounds."""
        value = values[self.of]
        if self.one_of:
            return value in self.one_of
        if self.dtypes or self.same_as:
            return value in (self.dtypes or (values[self.same_as],))
        if value < self.applies_from or (self.applies_below is not None and value >= self.applies_below):
            return True
        return value >= self.minimum and value % self.multiple_of == 0 and value <= (self.maximum or value)


@cache
def family(name: str) -> dict[str, Any]:
    """Return one family's file."""
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def described_function(name: str, function: str) -> dict[str, Any]:
    """Return the row of one function of a family."""
    found: dict[str, Any] = next(row for row in family(name)["function"] if row["name"] == function)
    return found


def entry_key(argument: str, entries: Mapping[str, Any]) -> str | None:
    """Return the key of an argument among entries by name: its own, or the first pattern that fits."""
    return next((key for key in (argument, *entries) if key in entries and fnmatchcase(argument, key)), None)


def note_of(entry: Mapping[str, Any]) -> str:
    """Join an argument's dtypes, shape, note and release."""
    dtypes = " or ".join(entry.get("dtypes", []))
    shape = " ".join(part for part in (dtypes, f"`{entry['shape']}`" if "shape" in entry else "") if part)
    note = ": ".join(part for part in (shape, entry.get("note", "")) if part)
    return f"{note}. Since {entry['since']}" if "since" in entry else note


def argument_notes(function: str, arguments: Iterable[str]) -> dict[str, str]:
    """Return what the specification says of the `arguments` of a function, by name."""
    name = next(name for name in FAMILIES if any(row["name"] == function for row in family(name)["function"]))
    own = described_function(name, function)["arguments"]
    entries = own | family(name).get("arguments", {}) | own  # its own first, and rather than the family's
    return {argument: note_of(entries[entry_key(argument, entries) or argument]) for argument in arguments}


def dtype_name(value: object) -> str:
    """Return the name of a dtype, or of a tensor's, without ``torch.``."""
    return str(getattr(value, "dtype", value)).removeprefix("torch.")


@cache
def signatures(release: str) -> dict[str, Any]:
    """Return the documented signatures of a release, "2_30" or "2_33": name -> document, release, arguments."""
    found: dict[str, Any] = json.loads((_FOLDER / f"release_{release}.json").read_text(encoding="utf-8"))
    return found


@cache
def constraints(name: str) -> tuple[Constraint, ...]:
    """Return the rows of one family, in the order in which they are checked."""
    found: list[Constraint] = []
    for row in family(name).get("constraint", []):
        values: dict[str, Any] = {key: tuple(value) if type(value) is list else value for key, value in row.items()}
        found.append(Constraint(**values))
    return tuple(found)


def multiples(name: str, when: str = "") -> dict[str, int]:
    """Return what each size of a family's kernels is a multiple of, by letter."""
    return {row.symbol: row.multiple_of for row in constraints(name) if row.is_size and row.when == when}


def selected(name: str, column: str, implementation: str = "", release: str = "") -> tuple[Constraint, ...]:
    """Return the rows of one family and column that are for an implementation or a release."""
    return tuple(
        row
        for row in constraints(name)
        if row.column == column
        and implementation in (row.implementations or (implementation,))
        and release in (row.releases or (release,))
    )


def broken(
    rows: Iterable[Constraint], values: Mapping[str, Any], fix: str, *, active: Set[str] = frozenset(), **words: str
) -> Iterator[Rule]:
    """Yield the rules of `rows` that a call breaks, of its values by argument and the circumstances that are `active`.

    `words` are for the rows' texts.
    """
    for row in rows:
        if (row.when and row.when not in active) or row.allows(values):
            continue
        names = ", ".join(map(str, row.one_of))
        expected = (row.expected or row.words).format(**vars(row), names=names, **words)
        yield Rule(False, row.of, expected, values[row.of], row.fix or fix, row.error)


def check_limits(limits: object, device_limits: bool | None) -> None:
    """Raise ConfigError for unknown `limits`, and for limits that `device_limits` switches off."""
    if limits not in (None, *LIMITS):
        raise not_one_of("limits", limits, LIMITS)
    if limits is not None and device_limits is False:
        fix = "Leave one of the two out."
        raise ConfigError.about("device_limits", f"left out or True with limits={limits!r}", "False", fix)


def unsupported(name: str) -> list[dict[str, str]]:
    """Return the rows of documented values that are errors here."""
    found: list[dict[str, str]] = family(name).get("unsupported", [])
    return found


def check_documented_values(name: str, given: Mapping[str, Any]) -> None:
    """Raise for a value among `given`, arguments by name, that is unsupported in a family, with the row's reason."""
    for row in unsupported(name):
        value = given.get(row["argument"])
        if dtype_name(value) == row["value"]:
            error = ConfigError if value == row["value"] else DTypeError
            raise error.about(row["argument"], row["expected"], row["value"], row["reason"])
