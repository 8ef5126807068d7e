"""Misspelt names of arguments, answered with the nearest that exists instead of Python's plain TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, nearest

P = ParamSpec("P")
T = TypeVar("T")
Class = TypeVar("Class", bound=type)

_CONFIG = "config"


def with_checked_names(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that an unknown keyword is a ConfigError with a hint; the signature stays what it was.

    Where `function` takes a `config`, options of :class:`NeuronMoEConfig` that stand beside it are told where they go.
    """
    return _checked(function, function.__name__, list(inspect.signature(function).parameters))


def with_checked_fields(cls: Class) -> Class:
    """Do the same for the constructor of the dataclass `cls`, in place; classes derived from it make their own."""
    names = [field.name for field in fields(cls) if field.init]
    made: Any = cls  # a type checker refuses to exchange the constructor of what may be a subclass
    made.__init__ = _checked(made.__init__, cls.__name__, names)
    return cls


def _checked(function: Callable[P, T], where: str, known: list[str]) -> Callable[P, T]:
    allowed = frozenset(known)

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in allowed:
                raise _unknown(where, name, options[name], known).named(where)
        return function(*args, **options)

    return checked


def _unknown(where: str, name: str, value: Any, known: list[str]) -> ConfigError:
    inner = [field.name for field in fields(NeuronMoEConfig)] if _CONFIG in known else []
    shown = [option for option in known if option != "model"]
    hint = nearest(name, [*shown, *inner])
    if name in inner:
        hint = f" It is an option of the configuration: {where}(model, {{{name!r}: {value!r}}})."
    elif any(repr(option) in hint for option in inner):
        hint += f" That is an option of the configuration, which is passed as config={{...}} to {where}."
    return ConfigError.about(
        "argument name",
        f"one of {', '.join(shown)}" if len(shown) < 20 else f"a field of {where}",
        repr(name),
        f"Remove or rename it.{hint}",
    )
