"""Functions that take a record's fields as arguments show them: types, notes, and what a call leaves out."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from hf_neuron_moe import kernels
from hf_neuron_moe.reference.moe_types import MoECTESpec
from hf_neuron_moe.reference.specification import argument_notes

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


def test_the_lines_are_the_notes_of_the_specification() -> None:
    assert typing.get_type_hints(kernels.moe_cte)["spec"] is MoECTESpec
    text = str(inspect.getdoc(kernels.moe_cte))
    assert "\n    down_proj_bias: `[E, H]`: only together with the other. Added once" in text
    assert max(map(len, text.splitlines())) <= 116


def test_a_functions_own_note_goes_before_its_familys() -> None:
    own = "bfloat16 `[T', H]`: fp32 and float16 are refused; a sink row has to be zero"
    assert argument_notes("blockwise_mm_fwd_mxfp8", ["hidden_states", "down_proj_scale"]) == {
        "hidden_states": own,
        "down_proj_scale": "the layout of pre-quantized weights is not documented",
    }


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_call_without_arguments_names_all_that_are_required(function: Callable[..., Any]) -> None:
    required = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    with pytest.raises(TypeError) as raised:
        function()
    assert str(raised.value) == f"{function.__name__}() missing required arguments: {str(required)[1:-1]}"
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'x_y'"):
        function(**dict.fromkeys(required), x_y=1)
