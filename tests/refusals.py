"""Calls with one rule broken: each must raise an error of its class under the function's name, about its argument.

The words are free: tests/messages.json has all messages, for a reader of a change. After one of them changed:

    python -m pytest tests/kernels/test_messages.py --update-messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
        return refused(self.kind, self.argument, self.function, **(self.arguments() | self.change))


def refused(kind: type[NeuronMoEError], argument: str, function: Callable[..., Any], /, **arguments: Any) -> str:
    """Call `function` in vain and return the message; class, place and argument of the error must be the expected."""
    with pytest.raises(kind) as caught:
        function(**arguments)
    found = caught.value
    assert (found.where, found.argument) == (function.__name__, argument), str(found)
    message = str(found)
    assert message.startswith(f"{found.where}: {argument} must be ")
    return message


def named(calls: Iterable[BrokenCall]) -> list[Any]:
    """Return a parameter of a test for every call; its name goes by function and argument."""
    count: Counter[str] = Counter()
    parameters = []
    for call in calls:
        name = f"{call.function.__name__}-{call.argument}"
        count[name] += 1
        parameters.append(pytest.param(call, id=f"{name}-{count[name]}"))
    return parameters


def broken_calls(suites: Iterable[Suite]) -> list[Any]:
    """Return a parameter of a test for every case."""
    return named(BrokenCall(function, arguments, *case) for function, arguments, cases in suites for case in cases)


def bf16(*shape: int, device: str = "cpu") -> Tensor:
    """Ones."""
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def x4(F: int, K: int) -> Tensor:
    """The codes of quantised ones ``[F, K]``, four in a word."""
    return pack_x4(quantize_mx(bf16(F, K)).codes)
