"""Every kind of block of every family in bf16 and mxfp8, against the stock block in fp32 on the same inputs.

Blocks are compared one by one and experts under a fixed routing: through a whole model a rounding can move a token to
another expert, and then no bound on the arithmetic holds.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from tests.tiny_models import FAMILIES, WEIGHT_LAYOUTS, tiny_model

BOUND = {
    # Operands carry a relative rounding error of up to 2^-9 each; three products deep this stays below 2^-6.
    "bf16": 2**-6,
    # e4m3 keeps 3 mantissa bits: an rms rounding error of 2.7 % per operand, two operands per product, three deep.
    "mxfp8": 0.12,
}


def block_inputs(block: nn.Module, hidden: int) -> tuple[Tensor, ...]:
    x_TH = torch.randn(40, hidden)
    if not hasattr(block, "num_experts") or not hasattr(block, "gate_up_proj"):
        return (x_TH,)
    index_TK = torch.rand(40, block.num_experts).topk(2).indices
    return x_TH, index_TK, torch.rand(40, 2).softmax(-1)


def gradients(block: nn.Module, inputs: tuple[Tensor, ...], dout: Tensor) -> dict[str, Tensor]:
    """Return the output, the input gradient, and parameter gradients under stock names and layouts."""
    x = inputs[0].clone().requires_grad_()
    out = block(x, *inputs[1:])
    out.backward(dout)
    assert x.grad is not None
    result = {"output": out.detach(), "input": x.grad}
    with torch.no_grad():
        for parameter in block.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return result | {name: value.clone() for name, value in block.state_dict().items()}


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_within_the_bound(family: str, precision: str, home: str) -> None:
    stock = tiny_model(family)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, {"precision": precision, "weights": home})
    assert report.patched
    for entry in report.patched:
        original, replacement = stock.get_submodule(entry.name), patched.get_submodule(entry.name)
        inputs = block_inputs(original, 32)
        dout = torch.randn(40, 32)
        expected, actual = (gradients(block, inputs, dout) for block in (original, replacement))
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            error = (actual[name] - value).norm() / value.norm()
            assert 0 < error <= BOUND[precision], f"{entry.name} {name}: {error:.4f}"


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fp32_parameters_are_read_in_bf16(
    family: str, precision: str, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the parameters' dtype is, blocks compute with their bf16 values, on processors of either kind."""
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: instructions)
    whole = tiny_model(family)
    rounded = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    for model in (whole, rounded):
        report = patch_model(model, {"precision": precision})
    for entry in report.patched:
        one, other = whole.get_submodule(entry.name), rounded.get_submodule(entry.name)
        inputs, dout = block_inputs(one, 32), torch.randn(40, 32)
        expected, actual = (gradients(block, inputs, dout) for block in (other, one))
        assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
