"""Every kind of gate in the operators against float64 autograd of its formula: output and all gradients.

Legend: T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch.activation_rows import ACTIVATIONS
from hf_neuron_moe.backends.torch.gating import gating_of
from hf_neuron_moe.modules import ops

T, K, E, H, I = 40, 2, 3, 32, 24  # noqa: E741

GATES = {
    "silu": Gate(),
    "clamped": Gate(gate_max=1.0, up_max=1.0, up_min=-1.0),
    "swish_offset": Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0),
    "gelu_tanh": Gate("gelu_tanh"),
    "gelu": Gate("gelu"),
    "squared_relu": Gate("squared_relu", gated=False),
    "softcapped": Gate(gate_softcap=1.0, up_softcap=2.0),
    "clamped_after": Gate(act_max=0.5, up_max=1.0, up_min=-1.0),
}
"""Limits near the spread of the drawn values, so that about a third of them lie beyond."""
BOUND = {"fp32": 1e-5, "bf16": 2.0**-6, "mxfp8": 0.12}
"""Norm of the deviation over that of the whole, as in ``test_block_operators``."""


def formula(gate: Gate, g: Tensor, u: Tensor) -> Tensor:
    """The intermediate as the families' own code writes it."""
    g = g if gate.gate_max is None else g.clamp(max=gate.gate_max)
    u = u if gate.up_max is None else u.clamp(gate.up_min, gate.up_max)
    activations: dict[str, Any] = {
        "silu": F.silu,
        "swish": lambda x: x * torch.sigmoid(x * gate.alpha),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "squared_relu": lambda x: F.relu(x).square(),
    }
    act = activations[gate.act]
    if not gate.gated:
        return act(u)
    if gate.gate_softcap is not None and gate.up_softcap is not None:
        capped = gate.gate_softcap * torch.tanh(g / gate.gate_softcap) * torch.sigmoid(g)
        return capped * gate.up_softcap * torch.tanh(u / gate.up_softcap)
    value = act(g) if gate.act_max is None else act(g).clamp(max=gate.act_max)
    return value * (u + gate.up_offset)


class Drawn(NamedTuple):
    x: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def drawn(gate: Gate, *, biased: bool, transposed: bool) -> tuple[Drawn, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = (2 if gate.gated else 1) * I

    def draw(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().float()

    gate_up, down = draw(E, rows, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (draw(E, rows, scale=1.0), draw(E, H, scale=1.0)) if biased else (None, None)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return Drawn(draw(T, H, scale=1.0), draw(T, K, scale=1.0).abs(), gate_up, down, *biases), index


def reference(gate: Gate, given: Drawn, index: Tensor, *, transposed: bool, interleaved: bool) -> Tensor:
    """Loop over the pairs."""
    gate_up, down = given.gate_up, given.down
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = []
    for token in range(T):
        total = torch.zeros(H, dtype=given.x.dtype)
        for slot in range(K):
            expert = int(index[token, slot])
            z = gate_up[expert] @ given.x[token]
            z = z if given.gate_up_bias is None else z + given.gate_up_bias[expert]
            halves = (z, z) if not gate.gated else (z[::2], z[1::2]) if interleaved else z.chunk(2)
            y = down[expert] @ formula(gate, *halves)
            y = y if given.down_bias is None else y + given.down_bias[expert]
            total = total + given.weight[token, slot] * y
        out.append(total)
    return torch.stack(out)


def leaves(given: Drawn, dtype: torch.dtype) -> Drawn:
    return Drawn(*(None if each is None else each.detach().to(dtype).requires_grad_() for each in given))  # type: ignore[arg-type]


def masked_otherwise(gate: Gate, precision: str, name: str) -> bool:
    """Whether a gradient passes masks that a rounding near a limit can turn over; the rounding oracle has those."""
    return gate.clamped and precision != "fp32" and name not in ("weight", "down", "down_bias", "bd")


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.sampled(4)
@pytest.mark.thinned(4, 4)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["stock", "transposed", "interleaved", "both"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_experts(name: str, biased: bool, layout: str, precision: str) -> None:
    gate, transposed = GATES[name], layout in ("transposed", "both")
    interleaved = layout in ("interleaved", "both") and gate.gated
    given, index = drawn(gate, biased=biased, transposed=transposed)
    exact = leaves(given, torch.float64)
    dout = torch.randn((T, H), generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = reference(gate, exact, index, transposed=transposed, interleaved=interleaved)
    expected.backward(dout.double())
    found = leaves(given, torch.float32)
    y = ops.experts(
        found.x,
        index,
        found.weight,
        found.gate_up,
        found.down,
        transposed=transposed,
        precision=precision,
        block_size=128,
        backend="torch",
        activations="full",
        training=True,
        gate=gate,
        interleaved=interleaved,
        biases=(found.gate_up_bias, found.down_bias),
    )
    assert relative(y, expected) < BOUND[precision]
    y.backward(dout.float())
    for field, mine, theirs in zip(Drawn._fields, found, exact, strict=True):
        if mine is not None and theirs is not None:
            assert mine.grad is not None and theirs.grad is not None
            if masked_otherwise(gate, precision, field):
                continue
            assert relative(mine.grad, theirs.grad) < BOUND[precision], field


@pytest.mark.parametrize("name", [name for name, gate in GATES.items() if gate.gated])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize(("backend", "stored"), [("torch", torch.float32), ("torch-grouped", torch.bfloat16)])
def test_dense(name: str, precision: str, backend: str, stored: torch.dtype) -> None:
    gate, dtype = GATES[name], torch.float32 if precision == "fp32" else stored
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (T, H), "gate": (I, H), "up": (I, H), "down": (H, I), "bg": (I,), "bu": (I,), "bd": (H,)}
    scales = {"gate": H**-0.5, "up": H**-0.5, "down": I**-0.5}
    values = {
        key: (torch.randn(shape, generator=generator) * scales.get(key, 1.0)).bfloat16()
        for key, shape in shapes.items()
    }
    exact = {key: value.double().requires_grad_() for key, value in values.items()}
    found = {key: value.to(dtype).requires_grad_() for key, value in values.items()}
    g, u = (exact["x"] @ exact[part].t() + exact[bias] for part, bias in (("gate", "bg"), ("up", "bu")))
    expected = formula(gate, g, u) @ exact["down"].t() + exact["bd"]
    y = ops.swiglu_mlp(
        *(found[key] for key in ("x", "gate", "up", "down")),
        precision=precision,
        backend=backend,
        training=True,
        gate=gate,
        biases=(found["bg"], found["bu"], found["bd"]),
    )
    assert relative(y, expected) < BOUND[precision]
    dout = torch.randn((T, H), generator=generator).bfloat16()
    expected.backward(dout.double())
    y.backward(dout.to(dtype))
    for key in shapes:
        actual, wanted = found[key].grad, exact[key].grad
        assert actual is not None and wanted is not None
        if masked_otherwise(gate, precision, key):
            continue
        assert relative(actual, wanted) < BOUND[precision], key


@pytest.mark.parametrize("backend", ["torch", "torch-grouped"])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("act", ["silu", "swish", "gelu", "gelu_tanh"])
def test_an_activation_without_a_gate_reads_up_alone(act: str, precision: str, backend: str) -> None:
    generator, dtype = torch.Generator().manual_seed(0), torch.float32 if precision == "fp32" else torch.bfloat16
    shapes = ((T, H), (E, I, H), (E, H, I))
    x, up, down = ((torch.randn(shape, generator=generator) * 0.3).to(dtype).requires_grad_() for shape in shapes)
    index = torch.arange(T * K).view(T, K).remainder(E)
    scores = torch.rand(T, K, generator=generator).requires_grad_()
    gate = Gate(act, 1.702 if act == "swish" else 1.0, gated=False)
    y = ops.experts(
        x, index, scores, up, down,
        transposed=False, precision=precision, block_size=512, backend=backend, activations="minimal", gate=gate,
    )  # fmt: skip
    found = torch.autograd.grad(y, [x, scores, up, down], torch.ones_like(y))
    exact = [part.detach().double().requires_grad_() for part in (x, scores, up, down)]
    inter = ACTIVATIONS[act].value(torch.einsum("th,tkih->tki", exact[0], exact[2][index]))
    wanted = torch.einsum("tk,tki,tkhi->th", exact[1], inter, exact[3][index])
    assert relative(y, wanted.detach()) < BOUND[precision]
    for actual, right in zip(found, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert relative(actual, right) < BOUND[precision]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_the_text_of_a_gate_gives_it_back(gate: Gate) -> None:
    assert Gate.parse(gate.text) == gate and "|" not in gate.text


def test_gelu_by_tanh_keeps_the_digits_of_small_values() -> None:
    # Both have the roundings of 2q, times 2q where s is small. The slope is finite times whatever the factor is.
    activation, generator = ACTIVATIONS["gelu_tanh"], torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-40, 30, (20_000,), generator=generator)
    values = torch.cat([torch.randn(20_000, generator=generator) * scales, torch.linspace(-12, 12, 20_001)])
    factor, exact = torch.randn(len(values), generator=generator), values.double().requires_grad_()
    wanted = F.gelu(exact, approximate="tanh")
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    error = (activation.value_(values.clone()).double() - wanted).abs()
    assert (error <= 2.0**-20 * (wanted.abs() + 1e-3)).all()
    found = activation.slope(values, factor, torch.empty_like(values)).double()
    assert ((found - factor * slope).abs() <= 2.0**-20 * factor.abs() * (slope.abs() + 0.1)).all()
    act, both, gating = torch.empty_like(values), torch.empty_like(values), gating_of(Gate("gelu_tanh"))
    assert gating.act_and_slope is not None
    both = gating.act_and_slope(values, act, both)(factor)
    assert torch.equal(act, activation.value_(values.clone())) and torch.equal(act, activation.value(values))
    assert torch.equal(both, activation.slope(values, factor, torch.empty_like(values)))
    rounded = gating_of(Gate("gelu_tanh"), rounded=True)  # of a rounding to bf16 it may be wrong by a 512th
    assert rounded.act_and_slope is not None
    found = rounded.act_and_slope(values, torch.empty_like(act), torch.empty_like(act))(factor).double()
    assert ((found - factor * slope).abs() <= 2.0**-18 * factor.abs() * (slope.abs() + 0.1)).all()
    alias = values.clone()
    assert torch.equal(activation.slope(alias, factor, alias), both)
    huge = activation.slope(torch.tensor([1e12, 1e6, 100.0]), torch.tensor([1e4, 1e30, torch.inf]), torch.empty(3))
    assert torch.equal(huge, torch.tensor([1e4, 1e30, torch.inf]))


@pytest.mark.parametrize("limits", [{}, {"gate_max": 7.0, "gate_min": -7.0}])
def test_swish_comes_times_alpha_and_its_slope_at_once(limits: dict[str, float]) -> None:
    # A few roundings of fp32, and those of an exponent of small values. A limit times alpha is what values at the limit
    # become, so both ways have the same bits.
    gating, generator = gating_of(Gate("swish", alpha=1.702, **limits)), torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-40, 6, (20_000,), generator=generator)
    values = torch.cat([torch.randn(20_000, generator=generator) * scales, torch.tensor([7.0, -7.0, 6.9999995, 0.0])])
    factor, act, rest = (
        torch.randn(len(values), generator=generator),
        torch.empty_like(values),
        torch.empty_like(values),
    )
    assert gating.act_and_slope is not None and gating.gain == 1.702
    slope = gating.act_and_slope(values, act, rest)(factor)
    clamped = values.double().clamp(limits.get("gate_min"), limits.get("gate_max")) if limits else values.double()
    exact = values.double().requires_grad_()
    (wanted_slope,) = torch.autograd.grad((exact * torch.sigmoid(1.702 * exact)).sum(), exact)
    wanted, ones = clamped * torch.sigmoid(1.702 * clamped), torch.ones_like(values)
    found = gating.times(act, ones, torch.empty_like(values)).double()
    assert ((found - wanted).abs() <= 1e-6 * (1 + clamped.abs()) * wanted.abs() + 1e-37).all()
    assert ((slope.double() - factor * wanted_slope).abs() <= 1e-6 * factor.abs()).all()
    assert torch.equal(slope, gating.slope(values, factor, torch.empty_like(values)))
    assert torch.equal(act.div_(gating.gain), gating.activate_(values.clone()))
    assert torch.equal(gating.intermediate_(values.clone(), ones), found.float())
