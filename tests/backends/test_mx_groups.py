"""Which values share an MX scale in the products of patched blocks, seen in their bits.

Operands of one magnitude hide the groups: every scale is the same. Here the rows of a contraction axis have magnitudes
over ten binades, and those of the other operand the inverse, so that each term of a sum counts the same and a wrong
group loses whole terms. Operands are small integers times powers of two: all sums but those of the last product are
exact in fp32, in any order.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_neuron_moe import patch_model
from hf_neuron_moe.formats import fake_quantize_mx

S, H = 128, 128


@dataclasses.dataclass(frozen=True)
class Operands:
    """bf16 operands of a dense block."""

    x_SH: Tensor
    dout_SH: Tensor
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor


@pytest.fixture(params=[False, True], ids=["fp32_products", "bf16_products"], autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: request.param)


def operands(inner: int, seed: int) -> Operands:
    """Integers from -3 to 3; column i of d_gate has the magnitude 2**-a[i], row i of gate 2**a[i], so for up and b."""
    g = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=g).float()

    a_I1, b_I1 = (torch.randint(-18, -7, (inner, 1), generator=g).float() for _ in range(2))
    values = (
        integers(S, H),
        integers(S, H),
        integers(inner, H) * torch.exp2(a_I1),
        integers(inner, H) * torch.exp2(b_I1),
        integers(H, inner) * torch.exp2(-a_I1 - b_I1).T,
    )
    return Operands(*(value.bfloat16() for value in values))


def q(values: Tensor, axis: int) -> Tensor:
    """What a matmul sees that contracts over `axis`, zero padded to a multiple of 128."""
    size = values.shape[axis]
    padded = F.pad(values, (0, 0, 0, -size % 128) if axis == 0 else (0, -size % 128))
    return fake_quantize_mx(padded.bfloat16(), axis=axis).double()


def bf16(values: Tensor) -> Tensor:
    return values.float().bfloat16().float()


def gradients(o: Operands) -> dict[str, Tensor]:
    """The backward as ``mlp_bwd_mxfp8`` of release 2.31 rounds it; float64 sums of the last products."""
    inner, x_SH, dout_SH = len(o.gate_IH), o.x_SH, o.dout_SH
    gate, up = (bf16(q(x_SH, 1) @ q(weight, 1).T) for weight in (o.gate_IH, o.up_IH))
    d_int = (q(dout_SH, 1) @ q(o.down_HI, 0))[:, :inner].float()
    slope = bf16(torch.ops.aten.silu_backward(torch.ones(()).expand(gate.shape), gate))
    act = bf16(F.silu(gate))
    d_gate, d_up, product = bf16(bf16(slope * up) * d_int), bf16(act * d_int), bf16(act * up)
    joined, weights = (
        torch.cat([F.pad(half, (0, -inner % 128)) for half in halves], dim=1)
        for halves in ((d_gate, d_up), (o.gate_IH.T, o.up_IH.T))
    )
    return {
        "x": q(joined, 1) @ q(weights, 1).T,
        "gate": q(d_gate, 0).T @ q(x_SH, 0),
        "up": q(d_up, 0).T @ q(x_SH, 0),
        "down": q(dout_SH, 0).T @ q(product, 0),
    }


def dense(o: Operands) -> dict[str, Tensor]:
    """The same of a patched Llama block."""
    inner = len(o.gate_IH)
    block = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=inner)).bfloat16()
    model = nn.ModuleDict({"block": block})
    with torch.no_grad():
        for name, value in (("gate", o.gate_IH), ("up", o.up_IH), ("down", o.down_HI)):
            getattr(block, f"{name}_proj").weight.copy_(value)
    patch_model(model, {"precision": "mxfp8"})
    x = o.x_SH.clone().requires_grad_()
    model["block"](x).backward(o.dout_SH)
    weights = {name: getattr(block, f"{name}_proj").weight.grad for name in ("gate", "up", "down")}
    return {"x": x.grad, **weights}


def experts(o: Operands) -> dict[str, Tensor]:
    """The same of the second of two patched Mixtral experts, which gets every token with a weight of 1."""
    inner = len(o.gate_IH)
    config = MixtralConfig(hidden_size=H, intermediate_size=inner, num_local_experts=2, num_experts_per_tok=1)
    block = MixtralExperts(config).bfloat16()
    model = nn.ModuleDict({"block": block})
    with torch.no_grad():
        block.gate_up_proj.fill_(1)[1].copy_(torch.cat([o.gate_IH, o.up_IH]))
        block.down_proj.fill_(1)[1].copy_(o.down_HI)
    patch_model(model, {"precision": "mxfp8", "block_size": S})
    x = o.x_SH.clone().requires_grad_()
    index, weight = torch.ones(S, 1, dtype=torch.int64), torch.ones(S, 1)
    model["block"](x, index, weight).backward(o.dout_SH)
    d_gate, d_up = block.gate_up_proj.grad[1].chunk(2)
    return {"x": x.grad, "gate": d_gate, "up": d_up, "down": block.down_proj.grad[1]}


@pytest.mark.parametrize("inner", [128, 320, 512, 640])
@pytest.mark.parametrize("block", [dense, experts], ids=["dense", "experts"])
def test_gradients_have_the_bits_of_the_contract(block: object, inner: int) -> None:
    assert callable(block)
    given = operands(inner, seed=inner)
    expected, found = gradients(given), block(given)
    for name, value in found.items():
        reference = expected[name][tuple(slice(0, size) for size in value.shape)]
        # One rounding of a sum: where the fp32 sum and the exact one lie on both sides of a tie, a neighbor is right.
        same = value == reference.float().bfloat16()
        assert same.float().mean() > 0.995, f"{name}: {same.float().mean():.2%} equal"
        assert ((value.double() - reference).abs() <= reference.abs() * 2.0**-7 + 1e-6 * reference.abs().max()).all()


def test_groups_of_the_two_halves_show_in_the_input_gradient() -> None:
    """The oracle itself: with gate and up quantized apart dX is another one, unless I is a multiple of 512."""
    for inner, alike in ((128, False), (320, False), (512, True), (640, False)):
        o = operands(inner, seed=inner)
        gate, up = (bf16(q(o.x_SH, 1) @ q(weight, 1).T) for weight in (o.gate_IH, o.up_IH))
        halves = [F.pad(half, (0, -inner % 128)) for half in (gate, up)]
        apart = torch.cat([q(half, 1) for half in halves], dim=1)
        assert torch.equal(apart, q(torch.cat(halves, dim=1), 1)) is alike
