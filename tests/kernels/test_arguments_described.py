"""Functions that take a record's fields as arguments show them: types, comments, and what a call leaves out."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from hf_neuron_moe import kernels
from hf_neuron_moe.reference.moe_types import MoECTESpec
from hf_neuron_moe.reference.record_fields import described_fields

FUNCTIONS = [
    kernels.moe_cte,
    kernels.blockwise_mm_bwd,
    kernels.blockwise_mm_fwd_mxfp8,
    kernels.blockwise_mm_bwd_mxfp8,
    kernels.router_topk,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_has_a_type_and_a_line(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(typing.get_type_hints(function)) == [*parameters, "return"]
    described = str(inspect.getdoc(function)).split("\nArgs:\n")[1]
    assert [line.split(":")[0].strip() for line in described.splitlines() if line[4] != " "] == list(parameters)


def test_the_lines_are_the_comments_of_the_record() -> None:
    assert typing.get_type_hints(kernels.moe_cte)["spec"] is MoECTESpec
    text = str(inspect.getdoc(kernels.moe_cte))
    assert "\n    down_proj_bias: [E, H]\n" in text
    assert "up_bias + 1 and shifts\n        both up limits by 1." in text


def test_a_record_without_a_file_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.getlines", lambda name: [])
    assert described_fields(MoECTESpec) == {}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_call_without_arguments_names_all_that_are_required(function: Callable[..., Any]) -> None:
    required = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    with pytest.raises(TypeError) as raised:
        function()
    assert str(raised.value) == f"{function.__name__}() missing required arguments: {str(required)[1:-1]}"
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'x_y'"):
        function(**dict.fromkeys(required), x_y=1)
