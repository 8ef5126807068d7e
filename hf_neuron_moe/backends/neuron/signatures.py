"""What the installed nkilib's functions and records take, read off them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WRAPPED = ("func", "__wrapped__", "fn", "kernel", "function", "_func", "_fn", "_kernel", "_function")
"""Attributes under which a decorator's object keeps the function that it decorates."""


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of an nkilib function, ``@nki.jit`` or not; None if it hides its arguments."""
    inner = [value for value in getattr(function, "__dict__", {}).values() if inspect.isfunction(value)]
    only = inner if len(inner) == 1 and not inspect.isfunction(function) else []
    for candidate in (*(getattr(function, name, None) for name in _WRAPPED), function, *only):
        signature = _signature(candidate)
        if signature is not None and not _hides_positions(signature):
            return signature
    return None


def record_fields(kind: Any) -> frozenset[str] | None:
    """Return what a record of nkilib is made from, by keyword; None if it takes any keyword or does not tell.

    Args:
        kind: a dataclass, a named tuple or a class with an ``__init__``.
    """
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind) if field.init)
    signature = _signature(kind)
    if signature is None or any(found.kind is found.VAR_KEYWORD for found in signature.parameters.values()):
        return None
    return frozenset(name for name, found in signature.parameters.items() if found.kind not in _VARIABLE)


UNKNOWN: Any = inspect.Parameter.empty
"""In the place of a default that is not there or cannot be read."""


def field_defaults(kind: Any) -> dict[str, Any] | None:
    """Return the fields of a record of nkilib, with their defaults or, of an instance, their values.

    Args:
        kind: the record or an instance of it; None for a record that does not exist.

    Returns:
        By name; nothing for None; None if the record does not tell its fields.
    """
    if kind is None:
        return {}
    names = record_fields(kind if inspect.isclass(kind) else type(kind))
    if names is None:
        return None
    if not inspect.isclass(kind):
        return {name: getattr(kind, name, UNKNOWN) for name in names}
    if dataclasses.is_dataclass(kind):
        return {field.name: _made(field) for field in dataclasses.fields(kind) if field.init}
    signature = _signature(kind)
    return {name: signature.parameters[name].default for name in names} if signature is not None else None


def _made(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return UNKNOWN if field.default is dataclasses.MISSING else field.default


def accepted(function: Any, **wanted: Any) -> dict[str, Any]:
    """Return those of `wanted` that an nkilib function or record takes; all where it does not tell."""
    if inspect.isclass(function):
        known = record_fields(function)
    else:
        signature = signature_of(function)
        known = None if signature is None or _takes_any(signature) else frozenset(signature.parameters)
    return {name: value for name, value in wanted.items() if known is None or name in known}


def takes(function: Any, argument: str) -> bool:
    """Return whether an nkilib function names `argument` in its signature."""
    signature = signature_of(function)
    return signature is not None and argument in signature.parameters


def has_field(kind: Any, field: str) -> bool:
    """Return whether a record of nkilib names `field`."""
    return field in (record_fields(kind) or ())


def other_default(parameters: Mapping[str, inspect.Parameter], expected: Mapping[str, bool | str]) -> str | None:
    """Return which parameter has another default than documented, or None.

    Args:
        parameters: of the installed function.
        expected: documented defaults: a truth value (of a flag; of a record, whether any field is set), or the name of
            an enum's member. Defaults of other kinds, None among them, say nothing and are left alone.
    """
    for name, wanted in expected.items():
        found = parameters[name].default if name in parameters else None
        if isinstance(wanted, str):
            differs = isinstance(found, Enum) and found.name != wanted
        else:
            differs = (isinstance(found, bool) and found is not wanted) or (not wanted and _any_set(found))
        if differs:
            return f"{name} defaults to {found.name if isinstance(found, Enum) else found!r}"
    return None


def _signature(candidate: Any) -> inspect.Signature | None:
    if not callable(candidate):
        return None
    try:
        return inspect.signature(candidate)
    except (TypeError, ValueError):
        return None


def _hides_positions(signature: inspect.Signature) -> bool:
    return any(found.kind is found.VAR_POSITIONAL for found in signature.parameters.values())


def _takes_any(signature: inspect.Signature) -> bool:
    return any(found.kind is found.VAR_KEYWORD for found in signature.parameters.values())


def _any_set(record: Any) -> bool:
    """Whether a SkipMode or the like has a flag set."""
    return any(getattr(record, name, False) is True for name in ("skip_token", "skip_weight"))
