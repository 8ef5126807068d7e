"""Networks of MX codes follow the activation policy: what is kept, and the same gradients whatever that is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import keep_strings
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout, held_form
from hf_neuron_moe.errors import ConfigError, GradientError
from hf_neuron_moe.formats import quantize_mx, unswizzle
from hf_neuron_moe.modules.quantized_ops import quantized_network
from hf_neuron_moe.modules.saved_bytes import SavedBlock, saved_bytes
from tests.refusals import refused

HIDDEN = 128
UNGATED = Gate("squared_relu", gated=False)
LOSSLESS = ("full", *sorted(keep_strings("bf16") - {"fp8"}))


def stack_of(inner: int, experts: int | None, gate: Gate = SWIGLU) -> MXExpertStack:
    """A natural arrangement of random codes."""
    generator, held = torch.Generator().manual_seed(0), []
    for rows, columns in ((2 * inner if gate.gated else inner, HIDDEN), (HIDDEN, inner)):
        pairs = []
        for _ in range(experts or 1):
            mx = quantize_mx((torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16())
            pairs.append((unswizzle(mx.codes).view(torch.float8_e4m3fn), mx.scales))
        tensors = [torch.stack(part) if experts else part[0] for part in zip(*pairs, strict=True)]
        held.append(held_form(*tensors, MXLayout()))
    (a, b, one), (c, d, two) = held
    return MXExpertStack(a, b, c, d, one, two, gate)


def run(stack: MXExpertStack, routed: bool, tokens: int, keep: str) -> tuple[list[Tensor], int]:
    """Output, the gradients of input and routing weights, and the bytes that autograd kept beside the weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().requires_grad_()
    index = torch.randint(0, 4, (tokens, 2), generator=generator) if routed else None  # 3 belongs to another rank
    weights = torch.rand(tokens, 2, generator=generator).requires_grad_() if routed else None
    codes = (stack.gate_up_codes, stack.gate_up_scales, stack.down_codes, stack.down_scales)
    own, kept = {t.untyped_storage().data_ptr() for t in codes}, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = quantized_network(x, index, weights, stack, backend="torch", activations=keep)
    dout = torch.randn(y.shape, generator=generator).bfloat16()
    leaves = [leaf for leaf in (x, weights) if leaf is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)], sum(kept.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("inner", "tokens"), [(256, 700), (2688, 30)])
@pytest.mark.parametrize(
    ("routed", "gate"), [(False, SWIGLU), (True, SWIGLU), (True, UNGATED)], ids=["dense", "experts", "ungated"]
)
def test_same_bits_and_the_bytes_foretold(routed: bool, gate: Gate, inner: int, tokens: int) -> None:
    """Several chunks of rows, and several tiles of the intermediate axis."""
    stack = stack_of(inner, 3 if routed else None, gate)
    shape = SavedBlock("bf16", HIDDEN, inner, 2 if routed else None, quantized=True, gate=gate)
    expected, _ = run(stack, routed, tokens, "full")
    for keep in LOSSLESS:
        results, kept = run(stack, routed, tokens, keep)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), keep
        if keep != "full":
            assert kept / tokens == saved_bytes(shape, keep), keep
    rough, kept = run(stack, routed, tokens, "fp8")
    assert kept / tokens == saved_bytes(shape, "fp8") < 0.55 * saved_bytes(shape, "minimal")
    assert torch.equal(rough[0], expected[0])
    for a, b in zip(rough[1:], expected[1:], strict=True):
        # As for weights that are not frozen: up to three factors with an rms rounding error of 2.7 % each.
        assert 0 < (a.float() - b.float()).norm() < 0.06 * b.float().norm()


def test_there_is_no_second_derivative() -> None:
    x = torch.randn(4, HIDDEN, requires_grad=True)
    y = quantized_network(x, None, None, stack_of(128, None), backend="torch")
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with refused(GradientError, "the backward itself"):
        first.square().sum().backward()


def test_checkpoints_of_the_mxfp8_backward_are_refused() -> None:
    with refused(ConfigError, "activations", got="gate_act"):
        run(stack_of(128, None), False, 4, "gate_act")
