"""Gates, limits, biases and layouts round where the contract rounds and nowhere else, as in ``test_rounding_contract``.

Limits bite: rows lie over many binades, so that some of every expert's values are beyond each limit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import keep_strings
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch import backend, compute
from hf_neuron_moe.modules import ops
from tests.backends.rounding_oracle import NETWORKS, draw, elementwise, exact_experts, run_experts, times_one_rounding
from tests.backends.test_gates import GATES

ONE_ROUNDING = 1.15
SCATTER = 1.25
"""Sums of experts' rounded parts: few large rows carry the norm, so that it scatters about its expectation."""
IN_FP32 = 0.1
"""As in ``test_rounding_contract``: router's gradients and sums over rows are fp32."""
PRODUCTS = pytest.mark.parametrize("native", [False, True], ids=["fp32_products", "bf16_products"])
WAYS = pytest.mark.parametrize(
    ("native", "at_once"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["fp32_products", "bf16_products", "fp32_products_at_once", "bf16_products_at_once"],
)
"""Experts are also computed all at once, without a value on the host (``"torch-grouped"``)."""
GATED = [name for name, gate in GATES.items() if gate.gated]
LAYOUTS = {"stock": (False, False), "transposed": (True, False), "interleaved": (False, True), "both": (True, True)}
POLICIES = pytest.mark.parametrize(
    "policies", [["minimal", "recompute"], pytest.param(None, marks=pytest.mark.slow)], ids=["presets", "every"]
)


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    native = request.node.callspec.params["native"]
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: native)
    at_once = request.node.callspec.params.get("at_once", False)
    monkeypatch.setattr(backend, "computes_at_once", lambda *_: at_once)


def dense_operands(tokens: int, hidden: int, inner: int, *, biased: bool) -> tuple[list[Tensor], Tensor]:
    """x, gate, up and down, biases of these three, and the output's gradient."""
    g = torch.Generator().manual_seed(tokens)
    # Beside biases products are small, so that what is lost of a bias shows.
    x, dout = draw(g, tokens, hidden, scale=2.0**-5 if biased else 1.0), draw(g, tokens, hidden)
    weights = [draw(g, *shape, scale=shape[1] ** -0.5) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
    biases = [draw(g, size, binades=2) for size in (inner, inner, hidden)] if biased else []
    return [x, *weights, *biases], dout


def run_dense(leaves: list[Tensor], dout: Tensor, gate: Gate, **options: str) -> list[Tensor]:
    """The output, then the gradients of `leaves`."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    biases = (leaves[4], leaves[5], leaves[6]) if len(leaves) > 4 else (None, None, None)
    y = ops.swiglu_mlp(*leaves[:4], gate=gate, biases=biases, backend="torch", **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)]


@PRODUCTS
@pytest.mark.parametrize("precision", NETWORKS)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "biased"),
    [(60, 96, 200, True), pytest.param(9, 96, 2100, False, marks=pytest.mark.slow)],
)
def test_dense(native: bool, precision: str, name: str, tokens: int, hidden: int, inner: int, biased: bool) -> None:
    gate = GATES[name]
    leaves, dout = dense_operands(tokens, hidden, inner, biased=biased)
    found = run_dense(leaves, dout, gate, precision=precision)
    wide = [t.double() for t in leaves]
    biases = (wide[4], wide[5], wide[6]) if biased else (None, None, None)
    factors = torch.ones(tokens).double()
    exact = NETWORKS[precision](wide[0], tuple(wide[1:4]), dout.double(), factors, None, gate, biases)
    expected = [*exact[:5], *(exact[6:] if biased else ())]
    for actual, wanted in zip(found, expected, strict=True):
        assert times_one_rounding(actual, wanted) <= ONE_ROUNDING


def expert_operands(gate: Gate, tokens: int, hidden: int, inner: int, biased: bool) -> tuple[dict[str, Tensor], Tensor]:
    g, experts = torch.Generator().manual_seed(tokens), 4
    rows = (2 if gate.gated else 1) * inner
    operands = {
        "x": draw(g, tokens, hidden, binades=4),  # fewer: where few rows carry the sum, its error scatters
        "index": torch.rand(tokens, experts, generator=g).topk(2).indices,
        "weights": torch.rand(tokens, 2, generator=g),
        "gate_up": draw(g, experts, rows, hidden, scale=hidden**-0.5, binades=0),
        "down": draw(g, experts, hidden, inner, scale=inner**-0.5, binades=0),
    }
    if biased:
        operands |= {"gate_up_bias": draw(g, experts, rows), "down_bias": draw(g, experts, hidden)}
    return operands, draw(g, tokens, hidden, binades=4)


@pytest.mark.sampled(4)
@pytest.mark.thinned(6, 3)
@WAYS
@pytest.mark.parametrize("precision", NETWORKS)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("layout", "biased"), [("stock", True), ("both", True), ("interleaved", False)])
def test_experts(native: bool, at_once: bool, precision: str, name: str, layout: str, biased: bool) -> None:
    gate, (transposed, interleaved) = GATES[name], LAYOUTS[layout]
    operands, dout = expert_operands(gate, 150, 96, 200, biased)
    interleaved = interleaved and gate.gated
    exact, per_expert = exact_experts(precision, operands, dout, 128, gate, interleaved=interleaved)
    options = {"precision": precision, "block_size": 128, "gate": gate, "interleaved": interleaved}
    found = run_experts(operands, dout, transposed, **options)
    bounds = {"y": SCATTER * per_expert["y"], "x": SCATTER * per_expert["x"], "weights": IN_FP32}
    for key, actual in found.items():
        assert times_one_rounding(actual, exact[key]) <= bounds.get(key, ONE_ROUNDING), key


@pytest.mark.sampled(4)
@pytest.mark.thinned(6, 3)
@WAYS
@pytest.mark.parametrize("precision", ["fp32", *NETWORKS])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("layout", ["stock", "both"])
@POLICIES
def test_every_policy_gives_the_same_bits(
    native: bool, at_once: bool, precision: str, name: str, layout: str, policies: list[str] | None
) -> None:
    gate, (transposed, interleaved) = GATES[name], LAYOUTS[layout]
    operands, dout = expert_operands(gate, 40, 64, 200, True)
    options = {"precision": precision, "block_size": 128, "gate": gate, "interleaved": interleaved and gate.gated}
    first = run_experts(operands, dout, transposed, activations="full", **options)
    for keep in policies or sorted(keep_strings(precision) - {"fp8"}):
        again = run_experts(operands, dout, transposed, activations=keep, **options)
        assert all(torch.equal(again[key], value) for key, value in first.items()), keep
    in_fp8 = run_experts(operands, dout, transposed, activations="fp8", **options)
    assert torch.equal(in_fp8["y"], first["y"])


@pytest.mark.sampled(3)
@pytest.mark.thinned(3)
@WAYS
@pytest.mark.parametrize("precision", ["fp32", *NETWORKS])
@pytest.mark.parametrize("name", GATED)
@POLICIES
def test_every_policy_of_a_dense_network_gives_the_same_bits(
    native: bool, at_once: bool, precision: str, name: str, policies: list[str] | None
) -> None:
    leaves, dout = dense_operands(9, 64, 300 if policies else 2100, biased=True)
    first = run_dense(leaves, dout, GATES[name], precision=precision, activations="full")
    for keep in policies or sorted(keep_strings(precision) - {"fp8"}):
        again = run_dense(leaves, dout, GATES[name], precision=precision, activations=keep)
        assert all(map(torch.equal, again, first)), keep
    assert torch.equal(run_dense(leaves, dout, GATES[name], precision=precision, activations="fp8")[0], first[0])


def one_row(values: Tensor, gate: Gate, precision: str, keep: str) -> list[Tensor]:
    """Output and gradients of x, gate, up, down and biases where gate and up are `values` ``[I]``, before offsets."""
    size = len(values)
    x, zeros = torch.ones(1, 1), torch.zeros(size, 1)
    leaves = [x, zeros, zeros, torch.ones(1, size), values, values, torch.zeros(1)]
    return run_dense(leaves, torch.ones(1, 1), gate, precision=precision, activations=keep)


def near_limits(gate: Gate) -> Tensor:
    """Limits, their bf16 neighbours on both sides, and zeros, small and large values of both signs."""
    limits = [gate.gate_max, gate.up_max, gate.up_min, 0.5, 7.0]
    centers = torch.tensor([limit for limit in limits if limit is not None]).bfloat16().view(torch.int16)
    around = (centers[:, None] + torch.arange(-20, 21, dtype=torch.int16)).view(torch.bfloat16).float().flatten()
    return torch.cat([around, torch.tensor([0.0, -0.0, 100.0, -100.0, 2.0**-40, -(2.0**-40), 1e30, -1e30])])


@PRODUCTS
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", [name for name in GATED if GATES[name].clamped])
def test_fp8_masks_what_the_values_themselves_mask(native: bool, precision: str, name: str) -> None:
    values = near_limits(GATES[name])
    values = values[(values.abs() > 2**-6) & (values.abs() < 50)]  # others are 0 in FP8 beside these
    exact, rough = (one_row(values, GATES[name], precision, keep) for keep in ("full", "fp8"))
    for place in (5, 6):  # gradients of the biases of gate and up, those of the pre-activations themselves
        assert torch.equal(exact[place] == 0, rough[place] == 0)
        assert (exact[place] == 0).any() and (exact[place] != 0).any()


@PRODUCTS
@pytest.mark.parametrize("name", GATED)
def test_extreme_values(native: bool, name: str) -> None:
    """Large values, zeros of both signs and values on a limit; a limit that is met gives no gradient."""
    gate, values = GATES[name], near_limits(GATES[name])
    values = values[values.abs() <= 100]
    found = one_row(values, gate, "fp32", "full")
    exact = elementwise(gate, values.double(), values.double() + gate.up_offset)
    torch.testing.assert_close(found[5].double(), exact.slope * exact.up, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[6].double(), exact.act * exact.up_slope, rtol=2e-5, atol=1e-6)
    for limit, place in ((gate.gate_max, 5), (gate.up_max, 6), (gate.up_min, 6)):
        if limit is not None:
            assert not found[place][values == limit].any()


@pytest.mark.thinned(3, 3)
@PRODUCTS
@pytest.mark.parametrize("precision", ["fp32", *NETWORKS])
@pytest.mark.parametrize("keep", ["full", "recompute", "fp8"])
@pytest.mark.parametrize("name", GATED)
def test_a_row_of_nan_stays_nan_and_alone(native: bool, precision: str, keep: str, name: str) -> None:
    leaves, dout = dense_operands(9, 96, 130, biased=True)
    leaves[0][4] = torch.nan
    y, dx, *_ = run_dense(leaves, dout, GATES[name], precision=precision, activations=keep)
    for result in (y, dx):
        assert result[4].isnan().all() and not result[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()
