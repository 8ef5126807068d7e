"""The stub file of the direct kernels says what their signatures say."""

from __future__ import annotations

import ast
import inspect

import pytest
from make_kernel_stubs import STUB, render

from hf_neuron_moe.reference import moe_cte_direct


def test_the_stub_is_up_to_date() -> None:
    assert STUB.read_text(encoding="utf-8") == render(), "run python scripts/make_kernel_stubs.py"


@pytest.mark.parametrize("name", moe_cte_direct.__all__)
def test_every_kernel_has_a_stub_with_its_parameters(name: str) -> None:
    """Read the stub itself, without the generator's code."""
    functions = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}
    found = functions[name].args
    parameters = inspect.signature(getattr(moe_cte_direct, name)).parameters.values()
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert [each.arg for each in found.args] == [each.name for each in parameters if each.name not in keywords]
    assert [each.arg for each in found.kwonlyargs] == keywords
    optional = [default is not None for default in found.kw_defaults]
    required = [each.name for each in parameters if each.default is each.empty]
    assert len(found.args) - len(found.defaults) == len(required)
    assert all(optional)


def test_a_wrong_call_names_the_kernel() -> None:
    with pytest.raises(TypeError, match=r"bwmm_shard_on_block\(\) missing required arguments: 'hidden_states', 'exp"):
        moe_cte_direct.bwmm_shard_on_block()  # type: ignore[call-arg]
