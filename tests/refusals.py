"""Calls with one rule broken: each must raise an error of its class under the function's name, about its argument.

The words are free: tests/messages.json has messages for a reader of a change. After a change of words:

    python -m pytest tests/kernels/test_messages.py --update-messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import NeuronMoEError
from hf_neuron_moe.formats import pack_x4, quantize_mx

Arguments = dict[str, Any]
Case = tuple[type[NeuronMoEError], str, Arguments]
"""The error's class, the argument that it names, and the arguments that break the rule."""

Suite = tuple[Callable[..., Any], Callable[[], Arguments], list[Case]]
"""A function, what makes arguments that it accepts, and how each of its rules is broken."""


RAISED: list[NeuronMoEError] = []
"""Errors that :func:`refused` has met since somebody cleared this list, for the snapshot of messages."""


@dataclass(frozen=True)
class BrokenCall:
    """A call that must raise."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    kind: type[NeuronMoEError]
    argument: str
    change: Arguments

    def check(self) -> str:
        """Make the call, look at the error and return its message."""
        return message_of(self.kind, self.argument, self.function, **(self.arguments() | self.change))


@contextmanager
def refused(
    kind: type[NeuronMoEError], argument: str | Path, says: str = "", *, got: str = "", where: str = ""
) -> Iterator[pytest.ExceptionInfo[NeuronMoEError]]:
    """Expect an error of exactly this class about exactly this argument.

    Args:
        kind: class of the error, not one of its bases.
        argument: what the error blames.
        says: expression that the message must contain; only for what a test is about, such as a hint.
        got: beginning of the value that the message reports, where several rules blame one argument.
        where: function or module that raises, where several might.
    """
    with pytest.raises(kind, match=says or None) as caught:
        yield caught
    found, message = caught.value, str(caught.value)
    assert (type(found), found.argument) == (kind, str(argument)), f"{type(found).__name__}: {message}"
    assert where in ("", found.where), message
    assert message.startswith(f"{found.where}: {argument} must be "), message
    assert f", got {got}" in message, message
    RAISED.append(found)


def message_of(kind: type[NeuronMoEError], argument: str, function: Callable[..., Any], /, **arguments: Any) -> str:
    """Call `function` in vain and return the message; class, place and argument of the error must be the expected."""
    with refused(kind, argument, where=function.__name__) as caught:
        function(**arguments)
    return str(caught.value)


def numbered(names: Iterable[str]) -> list[str]:
    """Return ``["a-1", "b-1", "a-2"]`` for ``["a", "b", "a"]``."""
    count: Counter[str] = Counter()
    found = []
    for name in names:
        count[name] += 1
        found.append(f"{name}-{count[name]}")
    return found


def named(calls: Iterable[BrokenCall]) -> list[Any]:
    """Return a parameter of a test for every call; its name goes by function and argument."""
    calls = list(calls)
    names = numbered(f"{call.function.__name__}-{call.argument}" for call in calls)
    return [pytest.param(call, id=name) for call, name in zip(calls, names, strict=True)]


def broken_calls(suites: Iterable[Suite]) -> list[Any]:
    """Return a parameter of a test for every case."""
    return named(BrokenCall(function, arguments, *case) for function, arguments, cases in suites for case in cases)


def bf16(*shape: int, device: str = "cpu") -> Tensor:
    """Ones."""
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def x4(F: int, K: int) -> Tensor:
    """The codes of quantized ones ``[F, K]``, four in a word."""
    return pack_x4(quantize_mx(bf16(F, K)).codes)
