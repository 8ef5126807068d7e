"""What the installed nkilib's functions and records take, read off them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

_WRAPPED = ("func", "__wrapped__", "fn", "kernel", "function", "_func", "_fn", "_kernel", "_function")
"""Attributes under which a decorator's object keeps the function that it decorates."""

UNKNOWN: Any = inspect.Parameter.empty
"""In the place of a default that is not there or cannot be read."""


def signature_of(function: object) -> inspect.Signature | None:
    """Return the signature of an nkilib function, ``@nki.jit`` or not; None if it hides its arguments."""
    inner = [value for value in getattr(function, "__dict__", {}).values() if inspect.isfunction(value)]
    only = inner if len(inner) == 1 and not inspect.isfunction(function) else []
    for candidate in (*(getattr(function, name, None) for name in _WRAPPED), function, *only):
        signature = _signature(candidate)
        if signature is not None and not _has_kind(signature, inspect.Parameter.VAR_POSITIONAL):
            return signature
    return None


def keywords(taker: object) -> frozenset[str] | None:
    """Return what an nkilib function or record takes by keyword; None if it takes any keyword or does not tell.

    A record is a dataclass, a named tuple or a class with an ``__init__``.
    """
    if dataclasses.is_dataclass(taker):
        return frozenset(field.name for field in dataclasses.fields(taker) if field.init)
    signature = _signature(taker) if inspect.isclass(taker) else signature_of(taker)
    if signature is None or _has_kind(signature, inspect.Parameter.VAR_KEYWORD):
        return None
    return frozenset(name for name, found in signature.parameters.items() if found.kind is not found.VAR_POSITIONAL)


def field_defaults(kind: object) -> dict[str, Any] | None:
    """Return the fields of a record of nkilib with their defaults or, of an instance, their values.

    There are none for None, a record that does not exist; None if the record does not tell its fields.
    """
    if kind is None:
        return {}
    names = keywords(kind if inspect.isclass(kind) else type(kind))
    if names is None:
        return None
    if not inspect.isclass(kind):
        return {name: getattr(kind, name, UNKNOWN) for name in names}
    if not dataclasses.is_dataclass(kind):
        return {name: inspect.signature(kind).parameters[name].default for name in names}
    missing, fields = dataclasses.MISSING, [found for found in dataclasses.fields(kind) if found.init]
    plain = {found.name: UNKNOWN if found.default is missing else found.default for found in fields}
    return plain | {found.name: found.default_factory() for found in fields if found.default_factory is not missing}


def other_default(parameters: Mapping[str, inspect.Parameter], expected: Mapping[str, bool | str]) -> str | None:
    """Return which parameter of the installed function has another default than the `expected` one, or None.

    Expected are truth values (of a flag; of a record, whether any field is set) or names of an enum's members. Defaults
    of other kinds, None among them, say nothing.
    """
    for name, wanted in expected.items():
        found = parameters[name].default if name in parameters else None
        if isinstance(wanted, str):
            differs = isinstance(found, Enum) and found.name != wanted
        else:
            # A SkipMode or the like has flags of its own.
            any_set = any(getattr(found, flag, False) is True for flag in ("skip_token", "skip_weight"))
            differs = (isinstance(found, bool) and found is not wanted) or (not wanted and any_set)
        if differs:
            return f"{name} defaults to {found.name if isinstance(found, Enum) else found!r}"
    return None


def _signature(candidate: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(candidate)
    except (TypeError, ValueError):  # not callable, or its arguments are hidden
        return None


def _has_kind(signature: inspect.Signature, kind: object) -> bool:
    return any(found.kind is kind for found in signature.parameters.values())
