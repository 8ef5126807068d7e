"""The package's exceptions: what is refused, where, what came instead, and what to do about it.

Every class also derives from the built-in exception a caller would expect (``ValueError``, ``TypeError``, ...), so
code that does not know this package still catches it. Raise them as ``raise
ShapeError.about(argument, expected, got, fix)``, which keeps the four parts of a message in one order.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ParamSpec, Self, TypeVar, overload

_NUMBER = re.compile(r"\d+")
_AN = re.compile(r"[aeioAEIO]|[Uu]n(?!i)|[MNL](?:[A-Z]|lp)|ndarray")
_NEAR = 0.71
"""Share of characters that a misspelling has in common with its name; at 0.7 `batch_size` was near `tp_size`."""

MESSAGE_PART = 600
"""Characters of one part of a message: what a file says may be megabytes, what a reader needs is its beginning."""


class NeuronMoEError(Exception):
    """Base class of everything this package raises on purpose.

    Attributes:
        where: public function or module that raised it; empty where the message alone says it.
        argument: name of the offending argument, option or module; likewise.
    """

    where: str = ""
    argument: str = ""

    @classmethod
    def about(cls, argument: str, expected: str, got: object, fix: str) -> Self:
        """Build an error with the parts of its message in their fixed order; :func:`public` adds whose it is.

        Args:
            argument: name of the offending argument, option or module.
            expected: the rule, in words.
            got: what came instead.
            fix: what the caller can do.

        Returns:
            The error; the caller raises it.
        """
        gap = "" if fix.startswith("\n") else " "
        argument, expected, came = (printable(text) for text in (argument, expected, str(got)))
        error = cls(f"{argument} must be {expected}, got {came}.{gap}{printable(fix)}")
        error.argument = argument
        return error

    def named(self, where: str) -> Self:
        """Say whose error this is, where no :func:`public` function around it does; return the error."""
        self.where = where
        return self

    def prefixed(self, prefix: str) -> Self:
        """Put `prefix` before the argument's name, where the caller knows it by that; return the error."""
        if self.argument and str(self.args[0]).startswith(self.argument):
            self.argument, self.args = prefix + self.argument, (f"{prefix}{self.args[0]}",)
        return self

    def __str__(self) -> str:
        return f"{self.where}: {super().__str__()}" if self.where else super().__str__()


class ConfigError(NeuronMoEError, ValueError):
    """An option has an unknown name or a value outside its documented set."""


class ShapeError(NeuronMoEError, ValueError):
    """A tensor's shape (or a size derived from it) breaks a documented rule."""


class DTypeError(NeuronMoEError, TypeError):
    """A tensor's dtype is not one the operation is defined for."""


class DeviceError(NeuronMoEError, ValueError):
    """Operands of one operation live on different devices, or on one the operation cannot use."""


class BackendUnavailableError(NeuronMoEError, RuntimeError):
    """The requested backend cannot run in this environment."""


class GradientError(NeuronMoEError, RuntimeError):
    """A derivative was asked for that the kernels do not have."""


class PatchError(NeuronMoEError, RuntimeError):
    """A model could not be patched or unpatched; the model is left exactly as it was."""


class NothingToPatchError(PatchError):
    """No module of the model can be patched."""


class UnsupportedModelError(PatchError):
    """The model as a whole is in a state that cannot be patched (quantized, sharded, already patched differently)."""


class RankError(NeuronMoEError, RuntimeError):
    """The ranks of a job are not alike, or one of them failed or does not answer; no rank goes on."""


class RoutingReplayError(NeuronMoEError, RuntimeError):
    """A recomputation makes other routing decisions than the run it repeats."""


class IncompleteCheckpointError(NeuronMoEError, ValueError):
    """A training checkpoint was not written to its end, or none was."""


class NonFiniteWeightsError(NeuronMoEError, FloatingPointError):
    """Weights that are to be saved hold NaN or infinity."""


class NonFiniteLossError(NeuronMoEError, FloatingPointError):
    """A loss is NaN or infinite."""


class GuardError(NeuronMoEError, RuntimeError):
    """The guard stopped a training: a figure of a product left its band."""


class ConversionError(NeuronMoEError, RuntimeError):
    """A checkpoint cannot be converted; the destination is left exactly as it was."""


class SourceDamageError(ConversionError):
    """A checkpoint's files contradict themselves or each other: cut off, altered, missing, or leading elsewhere."""


class DestinationError(ConversionError):
    """A destination is taken, missing its parent, overlaps the source, or holds what is not ours."""


class DiskError(ConversionError):
    """The operating system refused a call: no space, no permission, a failing disk."""


class ReportError(NeuronMoEError, ValueError):
    """A directory holds no run to report on, or a run's files are damaged."""


class NeuronMoEWarning(UserWarning):
    """Something works, but not in the way a reader of the configuration would assume."""


P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")


@overload
def public(function: Callable[P, ReturnT], /) -> Callable[P, ReturnT]: ...
@overload
def public(name: str, /) -> Callable[[Callable[P, ReturnT]], Callable[P, ReturnT]]: ...
def public(named: Any, /) -> Any:
    """Put a function's name, or another one, in front of the messages of errors that leave it.

    An error keeps the first name that it gets: the innermost decorated function names itself. Only errors of
    :meth:`NeuronMoEError.about` are named.
    """
    if isinstance(named, str):
        return lambda function: _naming(function, named)
    return _naming(named, named.__name__)


def _naming(function: Callable[P, ReturnT], name: str) -> Callable[P, ReturnT]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ReturnT:
        try:
            return function(*args, **kwargs)
        except NeuronMoEError as error:
            error.where = error.where or (name if error.argument else "")
            raise

    return call


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Do what :func:`public` does for a block of code, with a name that is known only when it runs."""
    try:
        yield
    except NeuronMoEError as error:
        error.where = error.where or (name if error.argument else "")
        raise


def printable(text: str, limit: int = MESSAGE_PART) -> str:
    """Return `text` as it may go to a terminal or a log.

    Control characters, invisible ones and lone surrogates become escapes (line ends stay), and the middle of a line
    with more than `limit` characters is left out.
    """
    return "\n".join(_printable_line(line, limit) for line in text.split("\n"))


def _printable_line(line: str, limit: int) -> str:
    if len(line) > limit:
        head, tail = line[: limit * 2 // 3], line[-limit // 4 :]
        line = f"{head} ... {len(line) - len(head) - len(tail):,} characters ... {tail}"
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def with_article(noun: str) -> str:
    """Return ``"an object"`` for ``"object"``, by how a name is read: ``"an MlpBwdConfig"``."""
    return f"{'an' if _AN.match(noun) else 'a'} {noun}"


def nearest(name: str, known: list[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to `name`, or an empty string if none is near it.

    Near are names that share 71 % of their characters with `name` and are less than twice as long:
    ``auto_find_batch_size`` is not what ``batch_size`` stands for.
    """
    import difflib

    match = difflib.get_close_matches(name, [other for other in known if len(other) < 2 * len(name)], 1, _NEAR)
    return f" Did you mean {match[0]!r}?" if match else ""


def pattern_of(name: str) -> str:
    """Return `name` with every number replaced by ``*``: names that may share a line have this in common."""
    return _NUMBER.sub("*", name)


def counted(count: int, noun: str) -> str:
    """A number of things in words: ``1 file``, ``1,234 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def spelled_together(names: Sequence[str]) -> str:
    """Return ``model.layers.0-31.mlp`` for names of one pattern that differ in one number; else the first and the last.

    Args:
        names: at least one name, in order, all with the same :func:`pattern_of`.
    """
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.findall(name) for name in names]
    varying = [place for place, column in enumerate(zip(*numbers)) if len(set(column)) > 1]
    if len(varying) != 1:
        return f"{names[0]} ... {names[-1]}"
    place = varying[0]
    before = list(_NUMBER.finditer(names[0]))[place]
    ranges = _ranges([int(found[place]) for found in numbers])
    return f"{names[0][: before.start()]}{ranges}{names[0][before.end() :]}"


def _ranges(numbers: list[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3 and 7."""
    breaks = [0, *(place for place, (one, two) in enumerate(pairwise(numbers), 1) if two != one + 1), len(numbers)]
    runs = [(numbers[start], numbers[end - 1]) for start, end in pairwise(breaks)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def known_names(where: str, options: Sequence[str] = ()) -> Callable[[Callable[P, ReturnT]], Callable[P, ReturnT]]:
    """Answer keywords that a function does not have with a ConfigError that names the nearest; keep the signature.

    Args:
        where: the function's name in messages.
        options: names that belong into its argument `config`, where a message says so.
    """

    def decorate(function: Callable[P, ReturnT]) -> Callable[P, ReturnT]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> ReturnT:
            for name in named:
                if name not in known:
                    raise _unknown(where, name, named[name], known, options)
            return function(*args, **named)

        return call

    return decorate


def _unknown(where: str, name: str, value: object, known: list[str], options: Sequence[str]) -> ConfigError:
    shown = [option for option in known if option not in ("self", "model")]
    hint = nearest(name, [*shown, *options])
    if name in options:
        hint = f" It is an option of the configuration: {where}(model, {{{name!r}: {value!r}}})."
    elif any(repr(option) in hint for option in options):
        hint += f" That is an option of the configuration, which is passed as config={{...}} to {where}."
    expected = f"one of {', '.join(shown)}" if len(shown) < 20 else f"a field of {where}"
    return ConfigError.about("argument name", expected, repr(name), f"Remove or rename it.{hint}").named(where)


def not_one_of(argument: str, value: object, known: Iterable[str], hint: str | None = None) -> ConfigError:
    """Return the error for a name that is not among the `known` ones, with `hint` or the nearest of them."""
    names = list(known)
    hint = nearest(str(value), names) if hint is None else hint
    return ConfigError.about(argument, f"one of {', '.join(names)}", repr(value), f"Choose one of these.{hint}")
