"""Gates other than SwiGLU, and biases, through the mock of nkilib: arguments, results, gradients, and what is refused.

The reference is the torch backend. Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.neuron import fp8_checkpoints
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, Routing
from hf_neuron_moe.device.emulation import emulated
from hf_neuron_moe.modules import ops
from tests.neuron.gate_runs import (
    BF16,
    CAPPED,
    CLAMPED,
    SHIFTED,
    SQUARED,
    B,
    E,
    H,
    I,
    K,
    T,
    compared,
    deviations,
    network,
    neuron,
    normal,
    results,
    routing,
    stack,
)

Start = Callable[..., SimpleNamespace]
RELEASES = [(2, 29), (2, 30), (2, 31), (2, 33)]


def test_a_limit_that_bf16_does_not_hold_is_refused(machine: Start) -> None:
    """The kernels compare bf16 values with it to know what was clamped."""
    machine(target="trn2")
    shape, kernels = BlockShape("experts", H, I, E, K), get_backend("neuron")
    for limit, reason in ((7.0, None), (7.01, "gate_clamp_upper_limit 7.01 is no number of bf16")):
        found = kernels.support(shape, BlockSpec("bf16", B, gate=Gate(gate_max=limit))).reason
        assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("release", RELEASES)
def test_shifted_limits_and_biases_reach_the_kernels(machine: Start, release: tuple[int, int]) -> None:
    double = machine(release=release, target="trn2").double
    torch.manual_seed(0)
    spec = BlockSpec("bf16", B, True, SHIFTED, interleaved=True)
    weights = stack(spec)
    assert max(compared(spec, routing(), weights, "minimal", "recompute")) <= BF16
    forward, backward = (call.arguments for call in double.calls[:2])
    limits = [forward[f"{side}_clamp_{end}_limit"] for side in ("gate", "up") for end in ("upper", "lower")]
    assert limits == [1.0, None, 2.0, 0.0] and forward["activation_function"].name == "Swish"
    bias_E2I, down_EH = forward["gate_and_up_proj_bias"].data, forward["down_proj_bias"].data
    assert torch.equal(bias_E2I[:, 0, :I], weights.gate_up_bias[:, ::2])
    assert torch.equal(bias_E2I[:, 1, :I], weights.gate_up_bias[:, 1::2] + 1)
    assert torch.equal(down_EH[:, :H], weights.down_bias) and not down_EH[:, H:].any()
    assert torch.equal(forward["gate_up_proj_weight"].data[:, :H, 1, :I], weights.gate_up[..., 1::2].bfloat16())
    shared = vars(backward["clamp_limits"])
    assert list(shared.values()) == [2.0, 0.0, 1.0, None]  # linear is up
    assert backward["bias"] is True and backward["activation_type"].name == "Swish"


def test_the_router_gradient_has_the_part_of_the_down_bias(machine: Start) -> None:
    """Against float64 autograd; without ``dO . bd`` the difference is as large as the gradient."""
    machine(target="trn2")
    torch.manual_seed(2)
    spec, given, x = BlockSpec("bf16", B, gate=SHIFTED), routing(), normal(T, H, dtype=torch.bfloat16)
    weights = stack(spec)
    found = results(neuron(), x, given, weights, spec, "minimal")[2]
    gate_up, down = weights.gate_up.bfloat16().double(), weights.down.bfloat16().double()
    expected = torch.zeros(T, K, dtype=torch.float64)
    for t, k in given.index_TK.lt(E).nonzero().tolist():
        e = int(given.index_TK[t, k])
        g, u = (gate_up[e] @ x[t].double() + weights.gate_up_bias[e].double()).chunk(2)
        g, u = g.clamp(max=1), u.clamp(-1, 1) + 1
        y = down[e] @ (g * torch.sigmoid(1.702 * g) * u) + weights.down_bias[e].double()
        expected[t, k] = torch.roll(x, 1, 0)[t].double() @ y
    assert deviations([found.double()], [expected])[0] <= BF16


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_without_a_gate_projection_run_on_the_release_that_has_them(machine: Start, transposed: bool) -> None:
    double = machine(target="trn2").double
    torch.manual_seed(3)
    spec = BlockSpec("bf16", B, transposed, SQUARED)
    for biased in (False, True):
        assert max(compared(spec, routing(), stack(spec, biased=biased), "minimal", "recompute")) <= BF16
    forward, backward = (call.arguments for call in double.calls[:2])
    for arguments, name in ((forward, "activation_function"), (backward, "activation_type")):
        assert arguments["skip_gate_proj"] is True and arguments[name].name == "SquaredReLU"
        assert not arguments["gate_up_proj_weight"].data[:, :, 0].any()
    assert forward["spec"].shard_on_I.expert_affinity_multiply_on_I, "upstream tests it there only"


@pytest.mark.parametrize("gate", [SWIGLU, SHIFTED, CLAMPED], ids=["plain", "shifted", "clamped"])
def test_fp8_loses_no_more_with_limits(machine: Start, gate: Gate) -> None:
    """Clamp masks are exact: read off values in FP8 they would differ in every tenth value near a limit."""
    double = machine(target="trn2").double
    torch.manual_seed(5)
    spec, x, given = BlockSpec("bf16", B, gate=gate), normal(T, H, dtype=torch.bfloat16), routing()
    weights = stack(spec, biased=gate.clamped)
    found = results(neuron(), x, given, weights, spec, "fp8")
    assert double.names == ["moe_cte", "blockwise_mm_bwd"]
    exact = results(neuron(), x, given, weights, spec, "minimal")
    assert torch.equal(found[0], exact[0])
    relative = [float((f - e).float().norm() / e.float().norm()) for f, e in zip(found[1:], exact[1:]) if e.numel()]
    assert max(relative) <= 0.06


def test_packed_values_stay_on_their_side_of_a_limit() -> None:
    limits = ((7.0, None), (8.0, -6.0))
    torch.manual_seed(6)
    rows = normal(2, 2, 3, 256, scale=8.0, dtype=torch.bfloat16)
    rows[:, 0] = rows[:, 0].clamp(max=7)
    rows[:, 1] = rows[:, 1].clamp(-6, 8)
    rows[0, 0, 0, :4] = torch.tensor([6.96875, 7.0, -448.0, 3.0])
    rows[1, 0, 1, 3] = torch.nan
    found = fp8_checkpoints.unpack_clamped(*fp8_checkpoints.pack_clamped(rows, limits), limits)
    whole = ~torch.isnan(found)
    assert (~whole).sum() == 64 and torch.isnan(found[1, 0, 1, :64]).all(), "a group with NaN"
    for half, bounds in enumerate(limits):
        for limit in bounds:
            if limit is not None:
                assert torch.equal(
                    (found[:, half] == limit) & whole[:, half], (rows[:, half] == limit) & whole[:, half]
                )
    assert found[:, 0][whole[:, 0]].max() == 7 and found[:, 1].min() == -6 and found[:, 1].max() == 8


@pytest.mark.parametrize("options", [{"release": (2, 32)}, {"config_pair": True}])
@pytest.mark.parametrize("gate", [CLAMPED, CAPPED])
def test_the_mxfp8_pair_takes_limits(machine: Start, options: dict[str, Any], gate: Gate) -> None:
    double = machine(**options).double
    torch.manual_seed(6)
    spec, x, given = BlockSpec("mxfp8", 128, gate=gate), normal(T, H, dtype=torch.bfloat16), routing()
    weights = stack(spec, biased=False)
    found, again = (results(neuron(), x, given, weights, spec, keep) for keep in ("minimal", "recompute"))
    limit = gate.gate_max if gate.act_max is None else float(torch.tensor(1.02035).bfloat16())  # silu(1.02035) = 0.75
    plain = BlockSpec("mxfp8", 128, gate=Gate(gate_max=limit, up_max=gate.up_max, up_min=gate.up_min))
    expected = results(get_backend("torch"), x, given, weights, plain, "minimal")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, again, strict=True))
    for call in double.calls[:2]:
        record = call.arguments.get("clamp_limits") or call.arguments["config"].clamp_limits
        assert list(vars(record).values()) == [gate.up_max, gate.up_min, limit, None]


def test_gated_bodies_trace_without_looking_at_values(machine: Start) -> None:
    """As under ``torch.compile``: biases, limits and saved FP8 are made from shapes and constants."""
    double = machine(target="trn2").double
    torch.manual_seed(7)
    spec, given = BlockSpec("bf16", B, True, SHIFTED, interleaved=True), routing()
    x = normal(T, H, dtype=torch.bfloat16)
    weights = stack(spec)
    real = results(neuron(), x, given, weights, spec, "fp8")
    double.clear()

    def body(*tensors: Tensor) -> list[Tensor]:
        row, index, weight, *parts = tensors
        return results(neuron(), row, Routing(index, weight), ExpertWeights(*parts), spec, "fp8")

    with FakeTensorMode() as mode:
        traced = body(*[mode.from_tensor(tensor) for tensor in (x, *given, *weights)])
    assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in real]
    assert len(double.traced) == 2 and not double.launches
    graph = make_fx(body, tracing_mode="fake")(x, *given, *weights)
    names = {str(node.target) for node in graph.graph.nodes}
    assert not names & {"aten._local_scalar_dense.default", "aten.nonzero.default"}


@pytest.mark.parametrize(("gate", "release"), [(SHIFTED, (2, 29)), (SHIFTED, (2, 33)), (SQUARED, (2, 33))])
def test_verify_device_computes_gates_as_the_kernels_do(machine: Start, gate: Gate, release: tuple[int, int]) -> None:
    machine(release=release, target="trn2")
    torch.manual_seed(10)
    spec, given, x = BlockSpec("bf16", B, gate=gate), routing(), normal(T, H, dtype=torch.bfloat16)
    weights = stack(spec)
    found = results(neuron(), x, given, weights, spec, "minimal")
    with emulated():
        expected = results(neuron(), x, given, weights, spec, "minimal")
    assert max(deviations(found, expected)) <= 8e-3  # sums in another order, as in verify-device


def test_interleaved_weights_are_copied_and_counted(machine: Start) -> None:
    """In the kernels' order ``[E, H, 2I]`` nothing is copied, but where gate and up alternate gate_up is."""
    machine(target="trn2")
    torch.manual_seed(8)
    shape = BlockShape("experts", 512, 64, E, K, ordered=True)
    counted = [neuron().support(shape, BlockSpec("bf16", B, True, SHIFTED, mixed)) for mixed in (False, True)]
    assert [found.weight_copy_bytes for found in counted] == [0, E * 512 * 128 * 2]
    weights = ExpertWeights(normal(E, 512, 128, dtype=torch.bfloat16), normal(E, 64, 512, dtype=torch.bfloat16))
    spec, x = BlockSpec("bf16", B, True, SHIFTED, interleaved=True), normal(T, 512, dtype=torch.bfloat16)
    neuron().experts_forward(x, routing(), weights, spec, parse_keep("minimal"))
    assert neuron().prepared_bytes == E * 512 * 128 * 2


def test_the_operators_give_every_gradient(machine: Start) -> None:
    machine(target="trn2")
    torch.manual_seed(9)
    index, weight = routing()
    spec = BlockSpec("bf16", B, gate=SHIFTED)
    (gate_up, down, *biases), mlp, x = stack(spec), network(False, True, True), normal(T, H)
    options: dict[str, Any] = {"precision": "bf16", "gate": SHIFTED}
    routed = {"transposed": False, "block_size": B, "biases": tuple(biases), **options}
    for leaves, run in (
        (
            (x, weight, gate_up, down, *biases),
            lambda backend: ops.experts(x, index, weight, gate_up, down, backend=backend, **routed),
        ),
        (
            (x, *mlp[:3], *mlp[4:]),
            lambda backend: ops.swiglu_mlp(x, *mlp[:3], backend=backend, biases=mlp[3:], **options),
        ),
    ):
        for leaf in leaves:
            leaf.requires_grad_()
        found, expected = (
            torch.autograd.grad(run(name).square().sum(), leaves) for name in (neuron().name, get_backend("torch").name)
        )
        assert max(deviations(list(found), list(expected))) <= BF16


def test_the_report_says_how_a_limit_on_the_activation_is_passed(machine: Start) -> None:
    machine(target="trn2")
    shape = BlockShape("experts", 512, 64, E, K)
    *_, note = neuron().support(shape, BlockSpec("bf16", B, gate=Gate(act_max=7.0, up_max=7.0, up_min=-7.0))).notes
    assert "the limit 7 on the activation is passed as the limit 7 on the gate (bf16)" in note and "6.9936" in note
