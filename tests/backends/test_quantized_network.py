"""Networks of MX codes: every storage layout, forward without requantizing, backward exact for the codes' values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout, held_form
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats import (
    dequantize_moe_down,
    dequantize_moe_gate_up,
    fake_quantize_mx,
    pack_moe_scales,
    padded_intermediate,
    quantize_moe_down,
    quantize_moe_gate_up,
    quantize_mx,
    to_oversized,
    to_packed,
    unswizzle,
)
from hf_neuron_moe.modules import ops, quantized_ops
from hf_neuron_moe.modules.quantized_ops import quantized_network
from tests.backends.test_gates import GATES
from tests.quantized_oracle import oracle
from tests.refusals import refused

SCALES = {"compact": lambda scales: scales, "oversized": to_oversized, "packed": to_packed}
STORED = [("natural", "compact"), ("swizzled", "oversized"), ("swizzled", "packed"), ("swizzled", "compact")]


def wide(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values over 2^14 of magnitude: which values share a scale matters."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-14, 1, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * torch.exp2(exponent)).bfloat16()


def store(weight: Tensor, arrangement: str, scales: str, rule: str = "neuron") -> tuple[Tensor, Tensor]:
    """Quantize ``[F, K]`` or ``[E, F, K]`` and store it as asked."""
    if weight.ndim == 3:
        pairs = [store(matrix, arrangement, scales, rule) for matrix in weight]
        return torch.stack([codes for codes, _ in pairs]), torch.stack([bytes_ for _, bytes_ in pairs])
    mx = quantize_mx(weight, rule=rule)
    codes = mx.codes if arrangement == "swizzled" else unswizzle(mx.codes)
    return codes.view(torch.float8_e4m3fn), SCALES[scales](mx.scales)


def stack_of(gate_up: Tensor, down: Tensor, arrangement: str, scales: str, rule: str = "neuron") -> MXExpertStack:
    layout = MXLayout(arrangement=arrangement, scales=scales)
    first, second = (held_form(*store(w, arrangement, scales, rule), layout) for w in (gate_up, down))
    return MXExpertStack(first[0], first[1], second[0], second[1], first[2], second[2])


def words_of(
    gate_up: Tensor, down: Tensor, fmt: str, packed: bool, gate: Gate = SWIGLU
) -> tuple[MXExpertStack, Tensor, Tensor]:
    """moe_cte's words of ``[E, 2I, H]`` and ``[E, H, I]``, and the values they hold; `fmt` may name two formats."""
    E, rows, H = gate_up.shape
    halves = 2 if gate.gated else 1
    fmts = (fmt.split()[0], fmt.split()[-1])
    first = quantize_moe_gate_up(gate_up.view(E, halves, rows // halves, H).permute(0, 3, 1, 2), fmt=fmts[0])
    second = quantize_moe_down(down.transpose(1, 2), fmt=fmts[1])
    values = dequantize_moe_gate_up(first).permute(0, 2, 3, 1).reshape(gate_up.shape)
    down_values = dequantize_moe_down(second)[:, : down.shape[2]].transpose(1, 2)
    held = []
    for weight, scheme, fmt in zip((first, second), ("one_tile", "wrapX_single"), fmts, strict=True):
        layout = MXLayout(fmt, "words", scheme, "packed" if packed else "compact")
        scales = pack_moe_scales(weight.scales) if packed else weight.scales
        unsigned = torch.uint32 if weight.words.dtype == torch.int32 else torch.uint16
        held.append(held_form(weight.words.view(unsigned), scales, layout))
    (a, b, one), (c, d, two) = held
    return MXExpertStack(a, b, c, d, one, two, gate), values, down_values


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


# Against float64 there remain the roundings to bf16 of results, of pre-activations and of their gradients: each has a
# relative error of at most 2^-9, and where the rounded product crosses a border of the MXFP8 grid, a step of 2^-4 of
# one value among many.
BOUND = 2**-6


def products(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Let blocks multiply in bf16 or in fp32, whatever the processor; MX codes' values are multiplied in fp32."""
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: native)
    monkeypatch.setattr("hf_neuron_moe.backends.torch.generation.environment_option", lambda *_: "0")


@pytest.mark.parametrize(("arrangement", "scales"), STORED)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (256, 1344), (256, 2688), (512, 128)])
def test_dense_forward_is_the_patched_block_s(
    hidden: int, inner: int, arrangement: str, scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products(monkeypatch, native=False)
    gate_up, down, x = wide(2 * inner, hidden), wide(hidden, inner, seed=1), wide(37, hidden, seed=2)
    y = quantized_network(x, None, None, stack_of(gate_up, down, arrangement, scales), backend="torch")
    gate, up = gate_up.chunk(2)
    expected = ops.swiglu_mlp(x, gate, up, down, precision="mxfp8", backend="torch")
    if inner in (128, 256):
        assert torch.equal(y, expected), "products of the same shapes"
    # The block pads 1344 and does not split 2688: fp32 sums of another order, which may round to the next bf16 value.
    apart, size = (y.double() - expected.double()).abs(), expected.double().abs()
    assert (apart <= 2**-7 * size + 2**-18 * size.amax()).all(), "a bf16 rounding, and fp32 ones of large terms"
    assert (apart > 0).float().mean() < 2**-6, "most sums round alike"


UNGATED = GATES["squared_relu"]
HALVES = [pytest.param(SWIGLU, id="gated"), pytest.param(UNGATED, id="ungated")]


@pytest.mark.parametrize("gate", HALVES)
@pytest.mark.parametrize(("arrangement", "scales"), STORED)
def test_experts_forward_is_the_patched_block_s_bit_for_bit(
    arrangement: str, scales: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    products(monkeypatch, native=False)
    rows = 512 if gate.gated else 256
    gate_up, down, x = wide(4, rows, 128), wide(4, 128, 256, seed=1), wide(700, 128, seed=2)
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, 6, (700, 2), generator=generator)  # 4 and 5 belong to other ranks
    weights = torch.rand(700, 2, generator=generator)
    stack = replace(stack_of(gate_up, down, arrangement, scales), gate=gate)
    y = quantized_network(x, index, weights, stack, backend="torch")
    options = {"transposed": False, "precision": "mxfp8", "block_size": 512, "backend": "torch", "gate": gate}
    assert torch.equal(y, ops.experts(x, index, weights, gate_up, down, **options))


def test_blocks_with_bf16_products_differ_by_roundings_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums have 16 bits, so that few values are rounded differently afterwards."""
    products(monkeypatch, native=True)
    gate_up, down, x = wide(2 * 640, 256), wide(256, 640, seed=1), wide(300, 256, seed=2)
    y = quantized_network(x, None, None, stack_of(gate_up, down, "natural", "compact"), backend="torch")
    other = ops.swiglu_mlp(x, *gate_up.chunk(2), down, precision="mxfp8", backend="torch")
    assert relative(y, other.double()) < 2**-9  # half of what one more rounding to bf16 can cost


@settings(max_examples=25, deadline=None)
@given(
    hidden=st.integers(1, 20).map(lambda n: 32 * n),
    inner=st.integers(1, 20).map(lambda n: 32 * n),
    tokens=st.integers(0, 9),
    stored=st.sampled_from(STORED),
    rule=st.sampled_from(["neuron", "rceil", "floor"]),
)
def test_dense_backward_is_exact_for_the_codes_values(
    hidden: int, inner: int, tokens: int, stored: tuple[str, str], rule: str
) -> None:
    gate_up, down = wide(2 * inner, hidden), wide(hidden, inner, seed=1)
    x = wide(tokens, hidden, seed=2).requires_grad_()
    y = quantized_network(x, None, None, stack_of(gate_up, down, *stored, rule), backend="torch")
    dout = wide(tokens, hidden, seed=3)
    (dx,) = torch.autograd.grad(y, x, dout)
    exact = x.detach().double().requires_grad_()
    values = (fake_quantize_mx(weight, rule=rule) for weight in (gate_up, down))
    expected = oracle(exact, *values, ("wrapX", "wrapX"), inner)
    (d_expected,) = torch.autograd.grad(expected, exact, dout.double())
    assert y.shape == dx.shape == (tokens, hidden)
    if tokens:
        assert relative(y, expected.detach()) < BOUND
        assert relative(dx, d_expected) < BOUND


@pytest.mark.sampled(3)
@pytest.mark.thinned(4)
@pytest.mark.parametrize("gate", HALVES)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1", "e2m1 e4m3fn", "e4m3fn e2m1"])
@pytest.mark.parametrize(
    ("hidden", "inner", "packed"),
    [(512, 96, False), (512, 96, True), (1024, 640, False), (1024, 640, True), (512, 2592, True)],
)
def test_moe_words_forward_and_backward(fmt: str, hidden: int, inner: int, packed: bool, gate: Gate) -> None:
    gate_up, down = wide(3, 2 * inner if gate.gated else inner, hidden), wide(3, hidden, inner, seed=1)
    stack, gate_up_values, down_values = words_of(gate_up, down, fmt, packed, gate)
    assert (stack.hidden, stack.inner) == (hidden, inner)
    generator = torch.Generator().manual_seed(3)
    x, index = wide(11, hidden, seed=2).requires_grad_(), torch.randint(0, 3, (11, 2), generator=generator)
    weights = torch.rand(11, 2, generator=generator).requires_grad_()
    y, dout = quantized_network(x, index, weights, stack, backend="torch"), wide(11, hidden, seed=4)
    dx, dw = torch.autograd.grad(y, (x, weights), dout)
    x64, w64 = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    width = padded_intermediate(inner)
    rows = []
    for token in range(len(x64)):
        parts = [
            oracle(
                x64[token : token + 1],
                gate_up_values[expert],
                down_values[expert],
                ("one_tile", "wrapX_single"),
                width,
                w64[token, k : k + 1],
                after=True,
                gate=gate,
            )
            for k, expert in enumerate(index[token].tolist())
        ]
        rows.append(torch.cat(parts).sum(0))
    expected = torch.stack(rows)
    grads = torch.autograd.grad(expected, (x64, w64), dout.double())
    assert relative(y, expected.detach()) < BOUND
    assert relative(dx, grads[0]) < BOUND
    assert relative(dw, grads[1]) < BOUND


def test_the_codes_are_used_as_they_are() -> None:
    """Values of a scale rule that Neuron's would change: requantizing would show."""
    gate_up, down, x = wide(256, 128), wide(128, 128, seed=1), wide(9, 128, seed=2)
    kept = quantized_network(x, None, None, stack_of(gate_up, down, "natural", "compact", "floor"), backend="torch")
    values = [fake_quantize_mx(weight, rule="floor").bfloat16() for weight in (gate_up, down)]
    gate, up = values[0].chunk(2)
    requantized = ops.swiglu_mlp(x, gate, up, values[1], precision="mxfp8", backend="torch")
    assert not torch.equal(kept, requantized)
    expected = oracle(x.double(), *values, ("wrapX", "wrapX"), 128)
    assert relative(kept, expected) < BOUND


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("gate", HALVES)
@pytest.mark.parametrize("keep", ["minimal", "gate_pre", "fp8"])
def test_operators_obey_torch(keep: str, gate: Gate) -> None:
    stack = stack_of(wide(3, 256 if gate.gated else 128, 128), wide(3, 128, 128, seed=1), "swizzled", "packed")
    x, index = wide(5, 128, seed=2), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2], [0, 2]])
    tensors = (stack.gate_up_codes, stack.gate_up_scales, stack.down_codes, stack.down_scales)
    layouts = (stack.gate_up_layout, stack.down_layout)
    call = BlockCall(BlockSpec("bf16", gate=gate), parse_keep(keep), "torch", layouts=layouts).encode()
    weights = torch.rand(5, 2)
    routed = (x.requires_grad_(), index, weights.requires_grad_())
    torch.library.opcheck(quantized_ops.frozen_fwd, (*routed, *tensors, None, None, call))
    dense = stack_of(wide(256 if gate.gated else 128, 128), wide(128, 128, seed=1), "natural", "compact")
    dense_tensors = (dense.gate_up_codes, dense.gate_up_scales, dense.down_codes, dense.down_scales)
    torch.library.opcheck(
        quantized_ops.frozen_fwd, (x, None, None, *dense_tensors, None, None, call.replace("swizzled", "natural"))
    )
    saved = quantized_ops.frozen_fwd(*routed, *tensors, None, None, call)[1:]
    routed = (x.detach(), x.detach(), index, weights.detach())
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        quantized_ops.frozen_bwd, (*routed, *tensors, None, None, *saved, call, True, True), test_utils=checks
    )


def test_nothing_is_kept_without_gradients_and_weights_are_not_copied() -> None:
    stack = stack_of(wide(256, 128), wide(128, 128, seed=1), "natural", "compact")
    x = wide(5, 128, seed=2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        quantized_network(x, None, None, stack, backend="torch")
        assert not kept
        quantized_network(x.requires_grad_(), None, None, stack, backend="torch")
    own = {stack.gate_up_codes.data_ptr(), stack.gate_up_scales.data_ptr(), stack.down_codes.data_ptr()}
    own.add(stack.down_scales.data_ptr())
    fresh = [tensor for tensor in kept if tensor.data_ptr() not in own and tensor.numel()]
    assert [tuple(tensor.shape) for tensor in fresh] == [(5, 128), (5, 128)]
    assert all(tensor.dtype == torch.bfloat16 for tensor in fresh)


def test_what_does_not_fit_is_refused() -> None:
    stack = stack_of(wide(256, 128), wide(128, 128, seed=1), "natural", "compact")
    with refused(ShapeError, "x_TH"):
        quantized_network(wide(5, 64), None, None, stack, backend="torch")
    with refused(ConfigError, "scheme", got="'1x32'"):
        MXLayout(scheme="1x32")
    with refused(ConfigError, "arrangement"):
        MXLayout(arrangement="packed")


def test_a_hidden_size_of_384_follows_the_codes_groups() -> None:
    """The forward kernel groups raw operands of 384 as one tile; prepared ones, such as these, are 256 + 128."""
    gate_up, down, x = wide(256, 384), wide(384, 128, seed=1), wide(33, 384, seed=2)
    y = quantized_network(x, None, None, stack_of(gate_up, down, "swizzled", "packed"), backend="torch")
    gate, up = gate_up.chunk(2)
    assert not torch.equal(y, ops.swiglu_mlp(x, gate, up, down, precision="mxfp8", backend="torch"))
    values = [fake_quantize_mx(weight) for weight in (gate_up, down)]
    assert relative(y, oracle(x.double(), *values, ("wrapX", "wrapX"), 128)) < BOUND


GATED = [name for name, gate in GATES.items() if gate.gated]


def biased(stack: MXExpertStack, gate: Gate, *leading: int) -> MXExpertStack:
    rows = stack.gate_up.shape[0]
    biases = wide(*leading, rows, seed=8), wide(*leading, stack.hidden, seed=9)
    return replace(stack, gate=gate, gate_up_bias=biases[0], down_bias=biases[1])


@pytest.mark.parametrize("name", GATED)
def test_gates_and_biases_are_the_patched_block_s_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products(monkeypatch, native=False)
    gate, (gate_up, down, x) = GATES[name], (wide(512, 128), wide(128, 256, seed=1), 8 * wide(37, 128, seed=2))
    stack = biased(stack_of(gate_up, down, "natural", "compact"), gate)
    assert stack.gate_up_bias is not None
    biases = (*stack.gate_up_bias.chunk(2), stack.down_bias)
    options = {"precision": "mxfp8", "backend": "torch", "gate": gate, "biases": biases}
    y = quantized_network(x, None, None, stack, backend="torch")
    assert torch.equal(y, ops.swiglu_mlp(x, *gate_up.chunk(2), down, **options))
    assert not torch.equal(y, quantized_network(x, None, None, replace(stack, gate_up_bias=None), backend="torch"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("activations", ["minimal", "recompute", "gate_pre", "up", "fp8"])
def test_gradients_through_gates_and_biases(name: str, activations: str) -> None:
    gate, generator = GATES[name], torch.Generator().manual_seed(3)
    gate_up, down = wide(3, 512 if gate.gated else 256, 128), wide(3, 128, 256, seed=1)
    stack = biased(stack_of(gate_up, down, "swizzled", "compact"), gate, 3)
    values = [fake_quantize_mx(weight).double() for weight in (gate_up, down)]
    x, index = wide(11, 128, seed=2).requires_grad_(), torch.randint(0, 4, (11, 2), generator=generator)  # 3 is absent
    weights = torch.rand(11, 2, generator=generator).requires_grad_()
    y = quantized_network(x, index, weights, stack, backend="torch", activations=activations)
    dout = wide(11, 128, seed=4)
    found = torch.autograd.grad(y, (x, weights), dout)
    x64, w64 = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    assert stack.gate_up_bias is not None and stack.down_bias is not None
    rows = []
    for token in range(len(x64)):
        total = torch.zeros(1, 128, dtype=torch.float64)
        for slot, expert in enumerate(index[token].tolist()):
            if expert < 3:
                parts = (values[0][expert], values[1][expert], ("wrapX", "wrapX"), 256, w64[token, slot : slot + 1])
                biases = (stack.gate_up_bias[expert], stack.down_bias[expert])
                total = total + oracle(x64[token : token + 1], *parts, gate=gate, biases=biases)
        rows.append(total[0])
    expected = torch.stack(rows)
    exact = torch.autograd.grad(expected, (x64, w64), dout.double())
    # A value that rounds onto a limit has no gradient, and crosses borders of the MXFP8 grid together with others.
    bound = 2 * BOUND if gate.clamped else BOUND
    assert relative(y, expected.detach()) < bound
    for actual, wanted in zip(found, exact, strict=True):
        assert relative(actual, wanted) < (0.06 if activations == "fp8" else bound)


@pytest.mark.parametrize(
    ("kind", "change", "argument", "expected"),
    [
        (ShapeError, {"gate": UNGATED}, "down_codes", "at least 512 columns, as squared_relu, without gate"),
        (ShapeError, {"gate_up_bias": torch.zeros(3)}, "gate_up_bias", "512"),
        (
            ConfigError,
            {"down_bias": torch.zeros(128, requires_grad=True)},
            "down_bias",
            "a tensor that needs no gradient",
        ),
    ],
    ids=["ungated", "shape", "gradient"],
)
def test_gates_and_biases_that_codes_cannot_have(
    kind: type[NeuronMoEError], change: dict[str, object], argument: str, expected: str
) -> None:
    stack = replace(stack_of(wide(512, 128), wide(128, 256, seed=1), "natural", "compact"), **change)
    with refused(kind, argument, expected):
        quantized_network(wide(3, 128), None, None, stack, backend="torch")


@pytest.mark.sampled(4)
@pytest.mark.thinned(5, 5)
@pytest.mark.parametrize("stored", ["natural", "swizzled", "words", "packed words", "words of e2m1", "e2m1 e4m3fn"])
@pytest.mark.parametrize("activations", ["minimal", "recompute", "fp8"])
@pytest.mark.parametrize("name", GATES)
def test_experts_at_once(stored: str, activations: str, name: str) -> None:
    """The forward is that of one after the other, the backward but for a rounding of each expert's part."""
    gate = GATES[name]
    gate_up, down = wide(6, 512 if gate.gated else 256, 512), wide(6, 512, 256, seed=1)
    if stored == "e2m1 e4m3fn":
        stack = words_of(gate_up, down, stored, packed=False, gate=gate)[0]
    elif "words" in stored:
        stack = words_of(gate_up, down, "e2m1" if "e2m1" in stored else "e4m3fn", "packed" in stored, gate)[0]
    else:
        stack = stack_of(gate_up, down, stored, "compact")
    stack = biased(stack, gate, 6)
    draw = torch.Generator().manual_seed(3)
    index, dout = torch.randint(0, 8, (40, 2), generator=draw), wide(40, 512, seed=4)  # 6 and 7 are of other ranks
    results = {}
    for backend in ("torch", "torch-grouped"):
        x, weights = (
            wide(40, 512, seed=2).requires_grad_(),
            torch.rand(40, 2, generator=draw.manual_seed(5)).requires_grad_(),
        )
        y = quantized_network(x, index, weights, stack, backend=backend, activations=activations)
        results[backend] = [y.detach(), *torch.autograd.grad(y, (x, weights), dout)]
    for found, expected, bound in zip(results["torch-grouped"], results["torch"], (2**-12, 2**-8, 1e-5), strict=True):
        assert relative(found, expected.double()) <= bound


@pytest.mark.parametrize("words", [torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_words_are_held_as_signed_integers_of_their_width(words: torch.dtype) -> None:
    codes, scales = torch.zeros(4, dtype=words), torch.zeros(4, dtype=torch.uint8)
    held, *_ = held_form(codes, scales, MXLayout())
    assert held.dtype is (torch.int16 if words.itemsize == 2 else torch.int32) and held.shape == (4,)
