"""What a frozen MXFP8 base costs and what it does not: bytes per weight, matrix products of the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from tests.quantized_oracle import oracle
from tests.quantizers.conftest import Converted, Source, load, patched

SIZES = {"hidden_size": 256, "intermediate_size": 512}


def blocks(model: nn.Module) -> list[QuantizedBlock]:
    return [module for module in model.modules() if isinstance(module, QuantizedBlock)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["fused", "kernel"])
@pytest.mark.parametrize(("family", "experts"), [("llama", 1), ("mixtral", 4)])
def test_weights_take_one_byte_and_a_scale_per_32(converted: Converted, family: str, experts: int, layout: str) -> None:
    model = load(converted(family, SIZES, precision="mxfp8", layout=layout))
    weights = experts * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    found = blocks(model)
    assert len(found) == 2
    for block in found:
        assert not list(block.parameters())
        # The swizzled layout's codes and compact scales have no padding at these sizes.
        assert sum(buffer.nbytes for buffer in block.buffers()) == weights * 33 // 32
    # Nothing else of the model keeps a float copy.
    floats = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    assert floats == sum(param.numel() for param in model.parameters())


def products(call: Any) -> int:
    """Multiplications of the matrix products that `call` runs, inside custom operators too."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        call()
    operands = [
        [shape for shape in event.input_shapes if len(shape) == 2]
        for event in seen.events()
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_")
    ]
    # mm(A, B, out) and addmm(C, A, B): whichever two fit together are the factors.
    pairs = [shapes[:2] if len(shapes) < 3 or shapes[0][1] == shapes[1][0] else shapes[1:] for shapes in operands]
    return sum(left[0] * left[1] * right[1] for left, right in pairs)


def test_the_backward_multiplies_for_the_input_only(source: Source, converted: Converted) -> None:
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(1), requires_grad=True)
    once = 64 * 3 * hidden * inner  # as many as the forward has: for the input's gradient, and again for the weights'
    counts = []
    trained = patched(source("llama", SIZES), "mxfp8", dtype=torch.float32)
    frozen = load(converted("llama", SIZES, precision="mxfp8"), dtype=torch.float32)
    for model in (frozen, trained):
        y = model.model.layers[0].mlp(x)
        counts.append(products(lambda y=y: y.sum().backward()))
    assert counts[0] == once
    assert counts[1] >= 2 * once


@pytest.mark.parametrize("layout", ["fused", "kernel"])
def test_experts_gradients_are_those_of_the_dequantized_weights_in_float64(
    source: Source, converted: Converted, layout: str
) -> None:
    frozen = load(converted("mixtral", SIZES, precision="mxfp8", layout=layout)).model.layers[0].mlp.experts
    stock = load(source("mixtral", SIZES)).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, SIZES["hidden_size"], generator=generator).bfloat16().requires_grad_()
    index = torch.rand(9, 4, generator=generator).topk(2).indices
    weights = torch.rand(9, 2, generator=generator).requires_grad_()
    dout = torch.randn(9, SIZES["hidden_size"], generator=generator).bfloat16()
    y = frozen(x, index, weights)
    grads = torch.autograd.grad(y, (x, weights), dout)

    x64, w64 = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
    pairs = [
        tuple(map(fake_quantize_mx, pair))
        for pair in zip(stock.gate_up_proj.detach(), stock.down_proj.detach(), strict=True)
    ]
    rows: list[Tensor] = []
    for token, chosen in enumerate(index.tolist()):
        row = x64[token : token + 1]
        parts = [
            oracle(row, *pairs[expert], ("wrapX", "wrapX"), SIZES["intermediate_size"], w64[token, k : k + 1])
            for k, expert in enumerate(chosen)
        ]
        rows.append(torch.cat(parts).sum(0))
    expected = torch.stack(rows)
    wanted = torch.autograd.grad(expected, (x64, w64), dout.double())
    for actual, exact in zip((y, *grads), (expected, *wanted), strict=True):
        # Results, pre-activations and their gradients are rounded to bf16 (2^-9 each); see test_quantized_network.
        assert (actual.double() - exact).norm() < 2**-6 * exact.norm()
