"""The two blocks as operators: exact in fp32, bounded in bf16 and mxfp8, well-behaved towards torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.backends.torch import experts as routing
from hf_neuron_moe.backends.torch.compute import FEW_ROWS
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.modules import ops
from tests.refusals import refused

BOUND = {
    # fp32 sums in another order; 64 units in the last place of the norm.
    "fp32": 8e-6,
    # Operands carry a relative rounding error of up to 2^-9 each; three products deep this stays below 2^-6.
    "bf16": 2**-6,
    # e4m3 keeps 3 mantissa bits: an rms rounding error of 2.7 % per operand, two operands per product, three deep.
    "mxfp8": 0.12,
}


@pytest.fixture(params=["native", "cast"], autouse=True)
def bf16_matmuls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs as on a CPU with bf16 instructions and as on one without, whatever this machine has."""
    native = request.param == "native"
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: native)


def mlp_reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts_reference(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``[E, 2I, H]`` and ``[E, H, I]``, token by token."""
    rows = []
    for token in range(len(x)):
        row = torch.zeros_like(x[0])
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            if expert < len(gate_up):
                row = row + weight * mlp_reference(x[token : token + 1], *gate_up[expert].chunk(2), down[expert])[0]
        rows.append(row)
    return torch.stack(rows)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def mlp_tensors(tokens: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(tokens)
    x, gate, up = (torch.randn(rows, hidden) for rows in (tokens, inner, inner))
    tensors = [x, gate * hidden**-0.5, up * hidden**-0.5, torch.randn(hidden, inner) * inner**-0.5]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def expert_tensors(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, transposed: bool, idle: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The last `idle` experts get no token."""
    torch.manual_seed(tokens)
    index = torch.rand(tokens, experts - idle).topk(top_k).indices
    gate_up = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k).softmax(-1)
    return x.requires_grad_(), index, weights.requires_grad_(), gate_up.requires_grad_(), down.requires_grad_()


def run_mlp(tensors: list[Tensor], precision: str) -> Tensor:
    return ops.swiglu_mlp(*tensors, precision=precision, backend="torch")


def run_experts(
    tensors: tuple[Tensor, ...], precision: str, transposed: bool = False, block_size: int = 128, training: bool = False
) -> Tensor:
    options: dict[str, Any] = {"precision": precision, "block_size": block_size, "training": training}
    return ops.experts(*tensors, transposed=transposed, backend="torch", **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 32, 48), (37, 80, 100), (300, 64, 1100), (600, 160, 520)])
def test_mlp_and_its_gradients(precision: str, tokens: int, hidden: int, inner: int) -> None:
    tensors = mlp_tensors(tokens, hidden, inner)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, wanted = run_mlp(tensors, precision), mlp_reference(*exact)
    dout = torch.randn_like(out)
    grads, wanted_grads = torch.autograd.grad(out, tensors, dout), torch.autograd.grad(wanted, exact, dout.double())
    assert out.dtype == torch.float32
    assert relative_error(out, wanted) <= BOUND[precision]
    for grad, wanted_grad, tensor in zip(grads, wanted_grads, tensors, strict=True):
        assert grad.shape == tensor.shape and grad.dtype == tensor.dtype
        assert relative_error(grad, wanted_grad) <= BOUND[precision]


@pytest.mark.sampled(4)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(5, 32, 48), (150, 80, 600)])
def test_experts_and_their_gradients(precision: str, transposed: bool, tokens: int, hidden: int, inner: int) -> None:
    tensors = expert_tensors(tokens, hidden, inner, 5, 2, transposed)
    x, index, weights, gate_up, down = tensors
    exact = [t.detach().double().requires_grad_() for t in (x, weights, gate_up, down)]
    stock = [t.transpose(1, 2) if transposed else t for t in exact[2:]]
    out, wanted = run_experts(tensors, precision, transposed), experts_reference(exact[0], index, exact[1], *stock)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, weights, gate_up, down), dout)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.double())
    assert relative_error(out, wanted) <= BOUND[precision]
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        assert relative_error(grad, wanted_grad) <= BOUND[precision]
    assert not grads[2][-1].any() and not grads[3][-1].any(), "the idle expert's gradient is exactly zero"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_the_two_layouts_give_the_same_bits(precision: str) -> None:
    plain, turned = (expert_tensors(70, 64, 96, 4, 2, transposed) for transposed in (False, True))
    outs = [run_experts(tensors, precision, transposed) for tensors, transposed in ((plain, False), (turned, True))]
    dout = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, (t[0], t[3], t[4]), dout) for out, t in zip(outs, (plain, turned), strict=True)]
    # fp32 multiplies the stored layout as it is, and a transposed operand may sum in another order.
    same = torch.equal if precision != "fp32" else (lambda a, b: relative_error(a, b) < 1e-6)
    assert same(outs[0], outs[1]) and same(grads[0][0], grads[1][0])
    assert same(grads[0][1], grads[1][1].transpose(1, 2)) and same(grads[0][2], grads[1][2].transpose(1, 2))


def test_padding_is_exact() -> None:
    """mxfp8 at H=192, I=320, 50 tokens equals the same block zero padded by hand to 256, 384 and 128."""
    x, gate, up, down = (t.detach() for t in mlp_tensors(50, 192, 320))
    padded = [
        F.pad(x, (0, 64, 0, 78)),
        F.pad(gate, (0, 64, 0, 64)),
        F.pad(up, (0, 64, 0, 64)),
        F.pad(down, (0, 64, 0, 64)),
    ]
    small = [t.requires_grad_() for t in (x, gate, up, down)]
    large = [t.requires_grad_() for t in padded]
    outs = run_mlp(small, "mxfp8"), run_mlp(large, "mxfp8")
    dout = torch.randn_like(outs[0])
    grads = torch.autograd.grad(outs[0], small, dout)
    wanted = torch.autograd.grad(outs[1], large, F.pad(dout, (0, 64, 0, 78)))
    # Identical quantized operands; the order of the fp32 sums may differ, which flips a few bf16 roundings.
    assert relative_error(outs[0], outs[1][:50, :192]) < 2e-4
    for grad, full in zip(grads, wanted, strict=True):
        rows, columns = grad.shape
        assert relative_error(grad, full[:rows, :columns]) < 2e-4
        assert not full[rows:].any() and not full[:, columns:].any()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_sentinel_experts_contribute_nothing(precision: str) -> None:
    x, index, weights, gate_up, down = expert_tensors(40, 32, 48, 4, 2, False)
    index = index.clone()
    index[::2, 1] = 4
    index[5] = 4
    out = run_experts((x, index, weights, gate_up, down), precision)
    out.sum().backward()
    assert not out[5].any() and x.grad is not None and not x.grad[5].any()
    assert weights.grad is not None and not weights.grad[::2, 1].any() and weights.grad[::2, 0].any()
    exact = experts_reference(x.double(), index, weights.double(), gate_up.double(), down.double())
    assert relative_error(out, exact) <= BOUND[precision]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_few_and_many_tokens_agree(precision: str) -> None:
    """A token's output does not depend on how many others come with it, beyond summation order."""
    x, index, weights, gate_up, down = expert_tensors(16 * FEW_ROWS, 64, 96, 3, 2, False)
    tensors = tuple(t.detach().bfloat16() if t.is_floating_point() else t for t in (x, index, weights, gate_up, down))
    many = run_experts(tensors, precision)
    one_by_one = torch.cat(
        [run_experts((*(t[i : i + 1] for t in tensors[:3]), *tensors[3:]), precision) for i in range(20)]
    )
    assert relative_error(one_by_one, many[:20]) < 5e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_no_tokens(precision: str) -> None:
    x, gate, up, down = mlp_tensors(4, 32, 48)
    run_mlp([x[:0], gate, up, down], precision).sum().backward()
    assert gate.grad is not None and not gate.grad.any()
    tensors = expert_tensors(4, 32, 48, 4, 2, False)
    run_experts((tensors[0][:0], tensors[1][:0], tensors[2][:0], *tensors[3:]), precision).sum().backward()
    assert tensors[3].grad is not None and not tensors[3].grad.any()


@pytest.mark.parametrize("tokens", [4, 400])
def test_negative_expert_ids_are_refused(tokens: int) -> None:
    x, index, weights, gate_up, down = expert_tensors(tokens, 32, 48, 4, 2, False)
    index[-1, 0] = -1
    with refused(ShapeError, "top_k_index", got="the id -1"):
        run_experts((x, index, weights, gate_up, down), "bf16")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), experts=st.integers(1, 6), top_k=st.integers(1, 3), tokens=st.integers(1, 40))
def test_pairs_sort_the_same_by_hand_and_by_torch(data: st.DataObject, experts: int, top_k: int, tokens: int) -> None:
    ids = data.draw(st.lists(st.integers(0, experts + 1), min_size=tokens * top_k, max_size=tokens * top_k))
    index = torch.tensor(ids).view(tokens, top_k)
    by_hand = routing._sort_by_hand(index, experts)
    repeated = routing.sort_pairs(index.repeat(routing._BY_HAND, 1), experts)
    assert by_hand.offsets == [offset // routing._BY_HAND for offset in repeated.offsets]
    assert by_hand.order_R[by_hand.slot_TK.reshape(-1)].tolist() == list(range(tokens * top_k))
    assert torch.equal(by_hand.token_R, by_hand.order_R // top_k)
    kept = by_hand.offsets[-1]
    sorted_ids = index.reshape(-1)[by_hand.order_R]
    assert bool((sorted_ids[:kept].diff() >= 0).all()) and bool((sorted_ids[kept:] >= experts).all())
    if tokens * top_k > routing._BY_HAND:
        by_torch = routing.sort_pairs(index, experts)
        assert torch.equal(by_torch.order_R[:kept], by_hand.order_R[:kept]) and by_torch.offsets == by_hand.offsets


def test_frozen_weights_cost_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_neuron_moe.backends.torch.backend import TorchBackend

    seen: list[tuple[bool, ...]] = []
    original = TorchBackend.experts_backward

    def spy(self: TorchBackend, *args: Any) -> Any:
        seen.append(args[-1].wants)
        return original(self, *args)

    monkeypatch.setattr(TorchBackend, "experts_backward", spy)
    x, index, weights, gate_up, down = expert_tensors(20, 32, 48, 4, 2, False)
    run_experts((x, index, weights.detach(), gate_up.detach(), down.detach()), "bf16").sum().backward()
    assert seen == [(True, False, False)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_autocast_does_not_change_the_numbers(precision: str) -> None:
    tensors = mlp_tensors(30, 64, 96)
    plain = run_mlp(tensors, precision)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run_mlp(tensors, precision)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize(("tokens", "bound"), [(300, 0.0), (20, 5e-3)])
def test_inference_equals_training_forward(precision: str, tokens: int, bound: float) -> None:
    """Bit for bit in the tiled path; a few rows are multiplied in another order, which moves some bf16 roundings."""
    tensors = expert_tensors(tokens, 64, 600, 4, 2, False)
    with torch.no_grad():
        inference = run_experts(tensors, precision)
    assert relative_error(inference, run_experts(tensors, precision)) <= bound


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    tensors = expert_tensors(50, 32, 48, 4, 2, False)
    leaves = (tensors[0], *tensors[2:])
    plain = torch.autograd.grad(run_experts(tensors, "mxfp8").square().sum(), leaves)
    # The reentrant one's first pass records nothing: modules in training mode say so to the operator.
    again: Tensor = checkpoint(
        lambda *args: run_experts(args, "mxfp8", training=True), *tensors, use_reentrant=reentrant
    )
    again.square().sum().backward()
    for leaf, grad in zip(leaves, plain, strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, grad)


class _NoGradient(torch.autograd.Function):
    """Uses its input and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


def test_an_output_without_a_gradient_gives_none() -> None:
    experts = expert_tensors(12, 32, 48, 4, 2, False)
    mlp = mlp_tensors(12, 32, 48)
    for y, leaves in (
        (run_experts(experts, "bf16"), (experts[0], *experts[2:])),
        (ops.swiglu_mlp(*mlp, precision="bf16", backend="torch"), mlp),
    ):
        (_NoGradient.apply(y).sum() + leaves[0].sum()).backward()
        assert torch.equal(leaves[0].grad, torch.ones_like(leaves[0]))
        assert all(leaf.grad is None for leaf in leaves[1:])


@pytest.mark.sampled(2)
def test_compiles_without_a_graph_break() -> None:
    tensors = expert_tensors(50, 32, 48, 4, 2, False)
    compiled = torch.compile(run_experts, backend="aot_eager", fullgraph=True, dynamic=False)
    leaves = (tensors[0], *tensors[2:])
    plain, traced = run_experts(tensors, "bf16"), compiled(tensors, "bf16")
    assert torch.equal(plain, traced)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (plain, traced)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize(
    "keep",
    [
        *("", "minimal"),
        *(pytest.param(keep, marks=pytest.mark.slow) for keep in ("fp8", "recompute", "up")),
        pytest.param("gate_pre+gate_act+up+intermediate", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck_forward(precision: str, keep: str, biased: bool) -> None:
    biases = biases_of(48, 32, 4, biased=biased)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    tensors = [t.detach() for t in mlp_tensors(12, 32, 48)]
    needs = [t.requires_grad_(bool(keep)) for t in (tensors[0].to(dtype), *tensors[1:])]
    call = BlockCall(BlockSpec(precision, 128), parse_keep(keep), "torch").encode()
    torch.library.opcheck(ops.mlp_fwd, (*needs, *biases[:3], call))
    x, index, weights, gate_up, down = (t.detach() for t in expert_tensors(12, 32, 48, 4, 2, False, idle=0))
    floats = [t.requires_grad_(bool(keep)) for t in (x.to(dtype), weights, gate_up, down)]
    operands = (floats[0], index, *floats[1:])
    torch.library.opcheck(ops.moe_fwd, (*operands, *biases[3:], call))


def biases_of(inner: int, hidden: int, experts: int, *, biased: bool) -> list[Tensor | None]:
    """Those of a dense MLP's gate, up and down, then of the experts' gate_up and down."""
    shapes = ((inner,), (inner,), (hidden,), (experts, 2 * inner), (experts, hidden))
    return [torch.randn(shape) if biased else None for shape in shapes]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, True)])
def test_opcheck_backward(wanted: tuple[bool, bool, bool], biased: bool) -> None:
    biases = biases_of(48, 32, 4, biased=biased)
    x, gate, up, down = (t.detach() for t in mlp_tensors(12, 32, 48))
    dout = torch.randn(12, 32)
    checks = ("test_schema", "test_faketensor")
    empty = (torch.empty(0), torch.empty(0))
    pre = (torch.randn(12, 48), torch.randn(12, 48), *empty)
    call = BlockCall(BlockSpec("fp32", 128), parse_keep("minimal"), "torch")
    transposed = call._replace(spec=BlockSpec("fp32", 128, transposed=True))
    mlp_args = (dout, x, gate, up, down, *biases[:3], *pre, call.encode(), wanted[0], wanted[2])
    torch.library.opcheck(ops.mlp_bwd, mlp_args, test_utils=checks)
    x, index, weights, gate_up, down = (t.detach() for t in expert_tensors(12, 32, 48, 4, 2, True))
    pre = (torch.randn(24, 48), torch.randn(24, 48), *empty)
    moe_args = (dout, x, index, weights, gate_up, down, *biases[3:], *pre, transposed.encode(), *wanted)
    torch.library.opcheck(ops.moe_bwd, moe_args, test_utils=checks)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_few_tokens_through_weights_of_two_dtypes(precision: str) -> None:
    torch.manual_seed(0)
    x, index = torch.randn(2, 32), torch.tensor([[0, 1], [1, 2]])
    weights = torch.rand(2, 2)
    gate_up, down = torch.randn(3, 64, 32).bfloat16() * 0.1, torch.randn(3, 32, 32).bfloat16() * 0.1
    options = {"transposed": False, "precision": precision, "block_size": 128, "backend": "torch"}
    with torch.no_grad():
        expected = ops.experts(x, index, weights, gate_up, down, **options)
        for pair in ((gate_up.float(), down), (gate_up, down.float())):
            # bf16 values in fp32 memory are the same weights; only the order of sums may differ.
            torch.testing.assert_close(ops.experts(x, index, weights, *pair, **options), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_tokens_without_experts_give_zeros(precision: str, training: bool) -> None:
    torch.full((1 << 16,), 7.0)  # freed at once: what is not initialised holds it
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    x = torch.randn(5, 64).to(dtype).requires_grad_(training)
    gate_up, down = torch.randn(3, 96, 64).to(dtype), torch.randn(3, 64, 48).to(dtype)
    index, weights = torch.zeros(5, 0, dtype=torch.long), torch.zeros(5, 0)
    with torch.set_grad_enabled(training):
        y = ops.experts(
            *(x, index, weights, gate_up, down),
            precision=precision,
            backend="torch",
            activations="full",
            training=training,
            transposed=False,
            block_size=128,
        )
    assert y.shape == x.shape and not y.any()
    if training:
        y.sum().backward()
        assert x.grad is not None and not x.grad.any()
