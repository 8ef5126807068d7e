"""Gates other than SwiGLU, and biases, through the mock of nkilib: arguments, results, gradients, and what is refused.

The reference is the torch backend. Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_neuron_moe import patch_model
from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.neuron import fp8_checkpoints
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants
from hf_neuron_moe.device.emulation import emulated
from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning, ShapeError
from hf_neuron_moe.modules import ops
from tests.refusals import refused
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]
T, H, I, E, K, B = 37, 96, 160, 3, 2, 256  # noqa: E741
BF16 = 2e-2  # of the largest value: nki-library's own tolerance of its bf16 kernels
CLAMPED = Gate(gate_max=1.0, up_max=1.0, up_min=-1.0)
SHIFTED = Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0)
OFFSET = Gate(up_offset=1.0)
CAPPED = Gate(act_max=0.75, up_max=0.75, up_min=-0.75)
SQUARED = Gate("squared_relu", gated=False)
RELEASES = [(2, 29), (2, 30), (2, 31), (2, 33)]


def neuron() -> Any:
    return get_backend(resolve_backend("neuron", torch.device("cpu")))


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def routing() -> Routing:
    index = torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)])  # some pairs belong to another rank
    return Routing(index, torch.rand(T, K))


def stack(spec: BlockSpec, *, biased: bool = True) -> ExpertWeights:
    """Experts whose biases are as large as their products."""
    rows = 2 * I if spec.gate.gated else I
    gate_up, down = normal(E, rows, H, scale=0.1), normal(E, H, I, scale=0.1)
    if spec.transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    return ExpertWeights(gate_up, down, *((normal(E, rows), normal(E, H)) if biased else ()))


def network(*biased: bool) -> FFNWeights:
    """A dense MLP with biases of gate, up and down where asked for."""
    biases = [normal(size) if there else None for size, there in zip((I, I, H), biased or (False,) * 3, strict=True)]
    return FFNWeights(normal(I, H, scale=0.1), normal(I, H, scale=0.1), normal(H, I, scale=0.1), *biases)


def results(backend: Any, x: Tensor, given: Any, weights: Any, spec: BlockSpec, keep: str) -> list[Tensor]:
    """Output and every gradient of experts, or of a dense MLP where no routing is `given`."""
    dout, policy = torch.roll(x, 1, 0), parse_keep(keep)
    call = BackwardCall(spec, policy, Wants())
    source = x.new_empty(0) if policy.fp8 else x
    if given is None:
        y, saved = backend.mlp_forward(x, weights, spec, policy)
        shape = BlockShape("mlp", H, I)
        grads = backend.mlp_backward(dout, source, weights, saved, call)
    else:
        y, saved = backend.experts_forward(x, given, weights, spec, policy)
        shape = BlockShape("experts", H, I, E, K)
        grads = backend.experts_backward(dout, source, given, weights, saved, call)
    if backend.name == "neuron":
        fakes = backend.fake_saved(x, shape, spec, policy)
        assert [(t.shape, t.dtype) for t in fakes] == [(t.shape, t.dtype) for t in saved]
    return [y, *grads]


def deviations(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Largest difference of each pair, in parts of the largest value; 0 for gradients of what is not there."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and mine.is_contiguous()
    pairs = [(mine.float(), theirs.float()) for mine, theirs in zip(found, expected, strict=True) if theirs.numel()]
    return [float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs]


def compared(spec: BlockSpec, given: Any, weights: Any, *keeps: str) -> list[float]:
    """Deviations of a block from the torch backend with the first policy; others must give the same gradients."""
    x = normal(T, H, dtype=torch.bfloat16)
    first, *others = (results(neuron(), x, given, weights, spec, keep) for keep in keeps)
    for found in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[1:], first[1:])), "policies differ"
    return deviations(first, results(get_backend("torch"), x, given, weights, spec, keeps[0]))


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


@pytest.mark.parametrize(
    ("gate", "biased"),
    [(CLAMPED, False), (CLAMPED, True), (SWIGLU, True), (OFFSET, False), (CAPPED, False), (SHIFTED, False)],
    ids=["clamped", "clamped biased", "biased", "offset", "capped", "shifted"],
)
@pytest.mark.parametrize("release", [(2, 29), (2, 33)])
def test_every_gate_equals_the_torch_backend(
    machine: Start, gate: Gate, biased: bool, release: tuple[int, int]
) -> None:
    machine(release=release, target="trn2")
    torch.manual_seed(1)
    spec = BlockSpec("bf16", B, gate=gate)
    assert max(compared(spec, routing(), stack(spec, biased=biased), "minimal", "recompute")) <= BF16


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


@pytest.mark.parametrize("release", [(2, 29), (2, 33)])
@pytest.mark.parametrize(
    ("gate", "biased"),
    [(SWIGLU, ()), (SWIGLU, (True, True, True)), (CLAMPED, (False, True, False)), (SHIFTED, (False, False, True))],
)
def test_dense_blocks_in_bf16_are_one_expert(
    machine: Start, gate: Gate, biased: tuple[bool, ...], release: tuple[int, int]
) -> None:
    machine(release=release, target="trn2")
    torch.manual_seed(4)
    spec, weights = BlockSpec("bf16", gate=gate), network(*biased)
    assert max(compared(spec, None, weights, "minimal", "recompute", "gate_pre")) <= BF16
    x = normal(T, H, dtype=torch.bfloat16)
    y, saved = neuron().mlp_forward(x[:0], weights, spec, parse_keep("minimal"))
    call = BackwardCall(spec, parse_keep("minimal"), Wants())
    grads = neuron().mlp_backward(x[:0], x[:0], weights, saved, call)
    there = [x[:0], *weights[:3], *[bias for bias in weights[3:] if bias is not None]]
    assert y.shape == (0, H) and sum(grad.numel() for grad in grads) == sum(each.numel() for each in there)


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


ONLY = {"target": "trn2"}
NO = {
    "gelu": (ONLY, "bf16", Gate("gelu_tanh"), False, "leave the intermediate of a GELU unwritten"),
    "gelu in mxfp8": ({}, "mxfp8", Gate("gelu"), False, "the MXFP8 kernels compute SiLU only"),
    "alpha": (ONLY, "bf16", Gate("swish", 1.5), False, "Swish has alpha 1.702, and the block's is 1.5"),
    "swish in mxfp8": ({}, "mxfp8", Gate("swish", 1.702), False, "compute SiLU only"),
    "bias in mxfp8": ({}, "mxfp8", SWIGLU, True, "the MXFP8 kernels of experts take no biases"),
    "offset in mxfp8": ({}, "mxfp8", OFFSET, False, "take no biases, so up has no offset"),
    "softcap": (ONLY, "bf16", Gate(up_softcap=25.0), False, "softcapped, which no kernel computes"),
    "limit": (ONLY, "bf16", Gate(gate_max=7.01), False, "gate_clamp_upper_limit 7.01 is no number of bf16"),
    "shifted limit": (ONLY, "bf16", Gate(up_max=255.5, up_offset=1.0), False, "up_clamp_upper_limit 256.5 is no"),
    "relu^2 before": (ONLY | {"release": (2, 31)}, "bf16", SQUARED, False, "moe_cte has no skip_gate_proj"),
    "relu^2 in mxfp8": ({}, "mxfp8", SQUARED, False, "compute SiLU only"),
    "relu^2 with gate": (
        ONLY,
        "bf16",
        Gate("squared_relu"),
        False,
        "its gate is squared_relu, with which the kernels are not",
    ),
}


@pytest.mark.parametrize("name", NO)
def test_what_no_kernel_computes_is_refused_with_its_reason(machine: Start, name: str) -> None:
    options, precision, gate, biased, reason = NO[name]
    double = machine(**options).double
    spec = BlockSpec(precision, B, gate=gate)
    shape = BlockShape("experts", H, I, E, K, biased=(biased, biased))
    assert reason in str(neuron().support(shape, spec).reason)
    weights, x = stack(spec, biased=biased), normal(T, H, dtype=torch.bfloat16)
    with refused(ConfigError, f"the experts block (H={H}, I={I}, precision={precision})", reason):
        neuron().experts_forward(x, routing(), weights, spec, parse_keep("minimal"))
    assert not double.launches


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


def test_a_long_dense_call_in_bf16_runs_on_torch_where_that_is_allowed(machine: Start, monkeypatch: Any) -> None:
    double = machine(target="trn2").double
    monkeypatch.setattr(importlib.import_module("hf_neuron_moe.backends.neuron.limits"), "BF16_TOKENS", 32)
    ids = torch.randint(3, 60, (1, 40))
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    patch_model(model, {"backend": "neuron"})
    with refused(ShapeError, "the number of tokens (batch size times length)", got="40"):
        model(input_ids=ids)
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    report = patch_model(model, {"backend": "neuron", "fallback": "torch"})
    assert "calls of more than 32 tokens run on torch" in report.patched[0].notes
    with pytest.warns(NeuronMoEWarning, match="more than 32 tokens"):
        model(input_ids=ids)
    assert not double.launches
    model(input_ids=ids[:, :20])
    assert len(double.launches) == 1


def test_dense_blocks_have_limits_of_their_own(machine: Start) -> None:
    machine()
    shape = BlockShape("mlp", H, I)
    reason = neuron().support(shape, BlockSpec("mxfp8", gate=CLAMPED)).reason
    assert "its gate is silu, clamped, and the dense MXFP8 kernels compute" in reason
    biased = neuron().support(shape._replace(biased=(True, False)), BlockSpec("mxfp8")).reason
    assert "its projections have biases, and the dense MXFP8" in biased
    machine(target="trn2")
    assert "without a gate projection" in neuron().support(shape, BlockSpec("bf16", gate=SQUARED)).reason


def test_the_report_says_how_a_limit_on_the_activation_is_passed(machine: Start) -> None:
    machine(target="trn2")
    shape = BlockShape("experts", 512, 64, E, K)
    *_, note = neuron().support(shape, BlockSpec("bf16", B, gate=Gate(act_max=7.0, up_max=7.0, up_min=-7.0))).notes
    assert "the limit 7 on the activation is passed as the limit 7 on the gate (bf16)" in note and "6.9936" in note
