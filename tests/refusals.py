"""Calls with one rule broken: each must be refused under the called function's name, with the rule."""

from __future__ import annotations

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
"""The error's class, a pattern of its message, and the arguments that break the rule."""

Suite = tuple[Callable[..., Any], Callable[[], Arguments], list[Case]]
"""A function, what makes arguments that it accepts, and how each of its rules is broken."""


@dataclass(frozen=True)
class BrokenCall:
    """A call that must be refused."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    kind: type[NeuronMoEError]
    message: str
    change: Arguments

    def check(self) -> None:
        """Make the call, and look at the error."""
        with pytest.raises(self.kind, match=self.message) as caught:
            self.function(**(self.arguments() | self.change))
        assert str(caught.value).startswith(f"{self.function.__name__}: ")


def broken_calls(suites: Iterable[Suite]) -> list[Any]:
    """Return a parameter of a test for every case."""
    return [
        pytest.param(BrokenCall(function, arguments, *case), id=f"{function.__name__}-{case[1]}")
        for function, arguments, cases in suites
        for case in cases
    ]


def bf16(*shape: int, device: str = "cpu") -> Tensor:
    """Ones."""
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def x4(F: int, K: int) -> Tensor:
    """The codes of quantised ones ``[F, K]``, four in a word."""
    return pack_x4(quantize_mx(bf16(F, K)).codes)
