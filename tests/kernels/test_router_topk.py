"""The router against recorded outputs, against a readable float64 oracle, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.reference.moe_types import RouterActFnType
from hf_neuron_moe.reference.router_topk import router_topk
from tests.refusals import refused

CANCELLED = 1e-13
"""A few float64 roundings of terms of size 1: what is left of a gradient that is zero as a whole (softmax of one)."""

ACTS = {"softmax": RouterActFnType.SOFTMAX, "sigmoid": RouterActFnType.SIGMOID}


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("pre", [0, 1])
@pytest.mark.parametrize("act", ["softmax", "sigmoid"])
def test_recorded_outputs(golden_dir: Path, act: str, pre: int, norm: int, bias: int) -> None:
    golden = load_file(golden_dir / "router_topk.safetensors")
    T, E, K = 12, 16, 4
    buffers = torch.full((T, E), 7.0), torch.full((T, E), 7.0), torch.full((T, K), 7, dtype=torch.int32)
    w_bias = golden["w_bias"] if bias else None
    logits, index, affinities = router_topk(
        golden["x"], golden["w"], w_bias, *buffers, ACTS[act], K, 1, 0, bool(pre), bool(norm)
    )
    prefix = f"{act}_pre{pre}_norm{norm}_bias{bias}_"
    assert logits is not None
    assert affinities is not None
    assert torch.equal(index, golden[f"{prefix}_index"])
    # fp32 sums of 128 products in another order.
    torch.testing.assert_close(logits, golden[f"logits_bias{bias}"], rtol=0, atol=2e-6 * float(logits.abs().max()))
    expected = golden[f"{prefix}_affinities"]
    torch.testing.assert_close(affinities, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert all(bool((buffer == 7).all()) for buffer in buffers)
    transposed = router_topk(
        golden["x"].t().contiguous(), golden["w"], w_bias, act_fn=act.upper(), k=K, x_hbm_layout=0,
        router_pre_norm=bool(pre), norm_topk_prob=bool(norm),
    )  # fmt: skip
    assert torch.equal(transposed[1], index)
    torch.testing.assert_close(transposed[2], affinities, rtol=0, atol=1e-6)  # another order of the same sums


def oracle(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, act: str, k: int, pre: bool, norm: bool) -> Any:
    """One token and one expert at a time, in the dtype of the arguments (float64)."""
    logits = x @ w if bias is None else x @ w + bias.reshape(-1)
    rows, selected = [], []
    for row in logits:
        order = sorted(range(len(row)), key=lambda e: -float(row[e].detach()))[:k]

        def activate(values: torch.Tensor) -> torch.Tensor:
            if act == "sigmoid":
                return 1 / (1 + torch.exp(-values))
            return torch.exp(values - values.max()) / torch.exp(values - values.max()).sum()

        weights = activate(row)[order] if pre else activate(row[order])
        if pre and norm:
            weights = weights / weights.sum()
        dense = activate(row) if pre and not norm else torch.zeros_like(row).index_put((torch.tensor(order),), weights)
        rows.append(dense)
        selected.append(order)
    return logits, torch.tensor(selected), torch.stack(rows)


def assert_equal_in_fp32(value: torch.Tensor, exact: torch.Tensor) -> None:
    """At most 1e-6 relative (Frobenius), the promise for fp32; fp32's own rounding is 6e-8."""
    value, exact = value.detach().double(), exact.detach()
    assert float((value - exact).norm()) <= 1e-6 * float(exact.norm()) + CANCELLED


@given(
    act=st.sampled_from(["softmax", "sigmoid"]),
    pre=st.booleans(),
    norm=st.booleans(),
    bias=st.sampled_from([None, "row", "matrix"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 12)),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_the_float64_oracle(
    act: str, pre: bool, norm: bool, bias: str | None, sizes: tuple[int, int, int], data: st.DataObject, seed: int
) -> None:
    T, H, E = sizes
    k = data.draw(st.integers(1, E))
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, H, generator=generator), torch.randn(H, E, generator=generator)
    b = {None: None, "row": torch.randn(E, generator=generator), "matrix": torch.randn(1, E, generator=generator)}[bias]
    leaves = [tensor.requires_grad_() for tensor in (x, w, b) if tensor is not None]
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    logits, index, affinities, eager = router_topk(
        x, w, b, act_fn=ACTS[act], k=k, router_pre_norm=pre, norm_topk_prob=norm, return_eager_affi=True
    )
    expected = oracle(doubles[0], doubles[1], doubles[2] if b is not None else None, act, k, pre, norm)
    assert logits is not None
    assert index is not None
    assert affinities is not None
    assert torch.equal(index.long(), expected[1])
    assert torch.equal(eager, affinities.gather(1, index.long()))

    upstream = torch.randn(T, E, generator=generator)
    upstream_logits = torch.randn(T, E, generator=generator)
    got = torch.autograd.grad((affinities, logits), leaves, (upstream, upstream_logits))
    want = torch.autograd.grad((expected[2], expected[0]), doubles, (upstream.double(), upstream_logits.double()))
    pairs = [(logits, expected[0]), (affinities, expected[2]), *zip(got, want)]
    for value, exact in pairs:
        assert_equal_in_fp32(value, exact)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("pre", "norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("act", ["softmax", "sigmoid"])
def test_saturated_activations_keep_their_gradients(act: str, pre: bool, norm: bool, k: int) -> None:
    """Logits of up to about 40: sigmoid' is 1e-17 there, and an fp32 logit alone would be off by 2e-6."""
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 256, generator=generator), 0.6 * torch.randn(256, 32, generator=generator)
    upstream = torch.randn(64, 32, generator=generator)
    leaves = [tensor.requires_grad_() for tensor in (x, w)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    logits, _, affinities = router_topk(x, w, act_fn=act, k=k, router_pre_norm=pre, norm_topk_prob=norm)
    assert logits is not None and affinities is not None
    assert float(logits.detach().abs().max()) > 32
    got = torch.autograd.grad((affinities * upstream).sum(), leaves)

    exact = doubles[0] @ doubles[1]
    chosen = exact.detach().topk(k).indices
    # Written so that autograd's float64 keeps its digits: exp(logsigmoid) has the slope s(x) * s(-x).
    picked = exact if pre and not norm else exact.gather(1, chosen)
    weights = exact.softmax(-1) if act == "softmax" and pre else picked.softmax(-1)
    if act == "sigmoid":
        weights = F.logsigmoid(picked).exp()
    elif pre and norm:
        weights = weights.gather(1, chosen)
    if pre and norm:
        weights = weights / weights.sum(-1, keepdim=True)
    factor = upstream.double() if pre and not norm else upstream.double().gather(1, chosen)
    want = torch.autograd.grad((weights * factor).sum(), doubles)
    for value, expected in zip(got, want, strict=True):
        # A lone selected expert's normalized (or softmaxed) weight is 1 whatever the logits are.
        constant = k == 1 and (norm or (act == "softmax" and not pre))
        assert_equal_in_fp32(value, torch.zeros_like(expected) if constant else expected)


def test_saturated_sigmoids_keep_their_gradients_in_fp32() -> None:
    """Logits of bf16 operands are fp32, where ``1 - sigmoid(20)`` is zero and the slope, 2e-9, is not."""
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    w = torch.tensor([[20.0, 24.0]], dtype=torch.bfloat16)
    affinities = router_topk(x, w, act_fn="SIGMOID", k=2, device_limits=False)[2]
    affinities.sum().backward()
    expected = float((w.double() * (-w.double()).sigmoid() * w.double().sigmoid()).sum())
    assert abs(float(x.grad) - expected) <= expected * 2.0**-8  # one rounding to bf16


def test_sigmoid_can_be_differentiated_twice() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)

    def affinities(x: torch.Tensor) -> torch.Tensor:
        result = router_topk(x, w, act_fn="SIGMOID", k=2)[2]
        assert result is not None
        return result

    hessian = torch.autograd.functional.hessian(lambda x: affinities(x).sum(), x)
    exact = torch.autograd.functional.hessian(lambda x: (x @ w.double()).sigmoid().sum(), x.detach().double())
    assert_equal_in_fp32(hessian, exact)


def test_gradient_of_the_selected_affinities() -> None:
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, 6)
    *_, eager = router_topk(x, w, act_fn="SOFTMAX", k=2, norm_topk_prob=True, return_eager_affi=True)
    assert eager is not None
    (grad,) = torch.autograd.grad(eager[:, 0].sum(), x)
    exact = x.detach().double().requires_grad_()
    top = (exact @ w.double()).softmax(-1).topk(2).values
    (expected,) = torch.autograd.grad((top[:, 0] / top.sum(-1)).sum(), exact)
    assert float((grad.double() - expected).norm()) <= 1e-6 * float(expected.norm())


def test_bf16_operands_are_summed_in_fp32() -> None:
    x, w = torch.randn(64, 256).to(torch.bfloat16), torch.randn(256, 32).to(torch.bfloat16)
    w_bias = torch.randn(1, 32)
    logits, _, affinities = router_topk(x, w, w_bias, act_fn="SOFTMAX", k=4, norm_topk_prob=True)
    assert logits is not None
    assert affinities is not None
    assert logits.dtype == affinities.dtype == torch.float32
    exact = x.double() @ w.double() + w_bias.double()
    assert float((logits.double() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())
    assert torch.equal(affinities.count_nonzero(dim=1), torch.full((64,), 4))
    torch.testing.assert_close(affinities.sum(1), torch.ones(64), rtol=0, atol=1e-6)


def test_output_dtypes_follow_the_callers_tensors() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    logits, index, affinities = router_topk(
        x, w, None, torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(3, 5, dtype=torch.float16),
        torch.empty(3, 2, dtype=torch.uint32), "SIGMOID", 2,
    )  # fmt: skip
    assert [t.dtype for t in (logits, index, affinities) if t is not None] == [
        torch.bfloat16, torch.uint32, torch.float16,
    ]  # fmt: skip
    assert router_topk(x, w, act_fn="SIGMOID", k=2, skip_store_expert_index=True)[1] is None


def test_equal_logits_choose_the_lower_expert() -> None:
    x, w = torch.ones(2, 3), torch.zeros(3, 40)
    w[:, 7] = w[:, 31] = 1.0
    _, index, _ = router_topk(x, w, act_fn="SOFTMAX", k=5)
    assert index is not None
    assert index.tolist() == [[7, 31, 0, 1, 2]] * 2


def test_scheduling_arguments_change_nothing() -> None:
    x, w = torch.randn(128, 128), torch.randn(128, 8)
    plain = router_topk(x, w, act_fn="SOFTMAX", k=2, router_pre_norm=False)
    for option in ("use_column_tiling", "use_indirect_dma_scatter", "use_PE_broadcast_w_bias", "shard_on_tokens"):
        other = router_topk(x, w, act_fn="SOFTMAX", k=2, router_pre_norm=False, **{option: True})
        assert all(torch.equal(a, b) for a, b in zip(plain, other)), option
    for layout in (1, 2):
        other = router_topk(x, w, act_fn="SOFTMAX", k=2, router_pre_norm=False, x_sb_layout=layout)
        assert all(torch.equal(a, b) for a, b in zip(plain, other))


def test_models_use_it_as_their_router() -> None:
    """Mixtral: softmax over all experts, the two best, divided by their sum."""
    x, w = torch.randn(20, 32), torch.randn(32, 8)
    logits, index, affinities = router_topk(x, w, act_fn="SOFTMAX", k=2, norm_topk_prob=True)
    assert logits is not None
    assert affinities is not None
    top, chosen = logits.softmax(-1).topk(2)
    assert torch.equal(index, chosen.int())
    torch.testing.assert_close(affinities.gather(1, chosen), top / top.sum(-1, keepdim=True), rtol=1e-6, atol=0)


def arguments(T: int = 256, H: int = 128, E: int = 16, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"x": torch.zeros(T, H, dtype=dtype), "w": torch.zeros(H, E, dtype=dtype), "act_fn": "SOFTMAX", "k": 2}


@pytest.mark.parametrize(
    ("sizes", "options", "error", "argument", "says"),
    [
        ({"E": 513}, {}, ShapeError, "E of w", ""),
        ({"H": 192}, {}, ShapeError, "H of w", ""),
        ({}, {"k": 9}, ShapeError, "k", ""),
        ({}, {"act_fn": "SIGMOID", "router_pre_norm": False}, ConfigError, "use_indirect_dma_scatter", ""),
        ({"T": 200}, {"use_indirect_dma_scatter": True}, ShapeError, "T of x", "got 200"),
        ({"T": 129}, {"return_eager_affi": True}, ShapeError, "T of x", "got 129"),
    ],
)
def test_device_limits(
    sizes: dict[str, int], options: dict[str, Any], error: type[NeuronMoEError], argument: str, says: str
) -> None:
    with refused(error, argument, says):
        router_topk(**{**arguments(**sizes), **options})
    with refused(error, argument, says):
        router_topk(**{**arguments(**sizes, dtype=torch.float32), **options}, device_limits=True)
    assert len(router_topk(**{**arguments(**sizes, dtype=torch.float32), **options})) >= 3
    assert len(router_topk(**{**arguments(**sizes), **options}, device_limits=False)) >= 3


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"skip_store_router_logits": True}, ConfigError, "skip_store_router_logits"),
        ({"act_fn": None}, ConfigError, "act_fn"),
        ({"act_fn": "softmx"}, ConfigError, "act_fn"),
        *(
            ({name: value}, ConfigError, name)
            for value in (1, "yes")
            for name in (
                "router_pre_norm",
                "norm_topk_prob",
                "use_column_tiling",
                "use_indirect_dma_scatter",
                "return_eager_affi",
                "use_PE_broadcast_w_bias",
                "shard_on_tokens",
                "skip_store_expert_index",
                "skip_store_router_logits",
                "device_limits",
            )
        ),
        ({"k": None}, ConfigError, "k"),
        ({"k": 0}, ShapeError, "k"),
        ({"k": 17}, ShapeError, "k"),
        ({"k": 17, "device_limits": False}, ShapeError, "k"),
        ({"x_hbm_layout": 2}, ConfigError, "x_hbm_layout"),
        ({"x_hbm_layout": 0}, ShapeError, "x"),
        ({"x_sb_layout": 3}, ConfigError, "x_sb_layout"),
        ({"w": torch.zeros(128, 16)}, DTypeError, "w"),
        ({"w": torch.zeros(64, 16, dtype=torch.bfloat16)}, ShapeError, "x"),
        ({"w_bias": torch.zeros(15)}, ShapeError, "w_bias"),
        ({"w_bias": torch.zeros(16, dtype=torch.int32)}, DTypeError, "w_bias"),
        ({"router_logits": torch.zeros(256, 15)}, ShapeError, "router_logits"),
        ({"expert_affinities": torch.zeros(255, 16)}, ShapeError, "expert_affinities"),
        ({"expert_index": torch.zeros(256, 3, dtype=torch.int32)}, ShapeError, "expert_index"),
        ({"expert_index": torch.zeros(256, 2)}, DTypeError, "expert_index"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[NeuronMoEError], argument: str) -> None:
    with refused(error, argument, where="router_topk"):
        router_topk(**{**arguments(), **options})


def test_torch_compile_traces_a_call_as_one_graph() -> None:
    x, w = torch.randn(8, 128), torch.randn(128, 4)

    def route(x: torch.Tensor, w: torch.Tensor) -> Any:
        return router_topk(x, w, act_fn="SOFTMAX", k=2)

    compiled = torch.compile(route, fullgraph=True, backend="eager")
    assert all(torch.equal(one, two) for one, two in zip(compiled(x, w), route(x, w), strict=True))
