"""Generation through experts: torch's grouped product and one product per expert are the same, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.backends.torch.cpu import decode as few_rows, matmul as products
from hf_neuron_moe.backends.torch.experts import ExpertStack, stacked
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.modules import ops
from tests.refusals import refused

BOUND = {
    # fp32 sums in another order.
    torch.float32: 1e-5,
    # bf16 operands, gate, up, intermediate and output, each with a relative rounding error of up to 2^-9.
    torch.bfloat16: 2e-2,
}


def operands(
    tokens: int, experts: int, top_k: int, sizes: tuple[int, int], transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, ExpertStack]:
    """Ids from 0 to E: the highest belongs to another rank."""
    hidden, inner = sizes
    torch.manual_seed(tokens)
    gate_up = torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5
    index = torch.rand(tokens, experts + 1).topk(top_k).indices
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    x, weight = torch.randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
    return x, index, weight, stacked(gate_up, down, transposed=transposed)


def experts_of(x: Tensor, index: Tensor, weight: Tensor, stack: ExpertStack) -> Tensor:
    return few_rows.experts(x, Routing(index, weight), stack.stacked, stack.spec)


def exact(x: Tensor, index: Tensor, weight: Tensor, stack: ExpertStack, *, sizes: bool = False) -> Tensor:
    """Token by token in float64; with `sizes` the sums of the terms' sizes, to which roundings are relative."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(index.tolist(), weight.tolist(), strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            if expert < len(stack.stacked.gate_up):
                gate, up, down = (w.double() for w in stack.expert(expert)[:3] if w is not None)
                row = x[token].double()
                inter = F.silu(gate @ row) * (up @ row)
                out[token] += factor * (down.abs() @ inter.abs() if sizes else down @ inter)
    return out


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 24),
    experts=st.integers(2, 9),
    top_k=st.integers(1, 2),
    sizes=st.sampled_from([(8, 16), (32, 24), (20, 12), (9, 7), (16, 9), (16, 12), (12, 16), (1, 1), (8, 1), (1, 8)]),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_and_single_products_agree(
    tokens: int, experts: int, top_k: int, sizes: tuple[int, int], transposed: bool, dtype: torch.dtype
) -> None:
    args = operands(tokens, experts, top_k, sizes, transposed, dtype)
    out = experts_of(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "_can_be_grouped", lambda stack: False)
        assert torch.equal(experts_of(*args), out)
    size = exact(*args, sizes=True).norm().item()
    assert (out.double() - exact(*args)).norm() <= BOUND[dtype] * max(size, 1e-3)


@pytest.mark.parametrize(("tokens", "calls"), [(1, 0), (16, 2)])
def test_the_grouped_product_is_for_busy_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, calls: int) -> None:
    """It looks at idle experts too, of which a single token leaves many."""
    seen = []
    grouped = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: seen.append(1) or grouped(*args, **options))
    experts_of(*operands(tokens, 8, 2, (16, 16), False, torch.float32))
    assert len(seen) == calls


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compute as on an AMD processor without bf16 instructions, for weights of any size, and note what multiplies."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch built without oneDNN")
    rule = products.OneDNNRule(1 << 40, 1 << 40, 1 << 40, every_shape=False)  # nothing but the few rows
    monkeypatch.setattr(products, "onednn_rule", lambda: rule)
    for module in (few_rows, products):
        for name in ("SMALL_WEIGHT", "LARGE_WEIGHT"):
            monkeypatch.setattr(module, name, 1, raising=module is products)
    monkeypatch.setattr(few_rows, "bf16_matmul_is_fast", lambda device: False)
    monkeypatch.setattr(few_rows, "_CAST_AT_ONCE", 200)
    seen: list[str] = []
    for module, name in ((products, "_by_onednn"), (few_rows, "_through_fp32"), (F, "grouped_mm")):
        monkeypatch.setattr(module, name, _noting(seen, name, getattr(module, name)))
    return seen


def _noting(seen: list[str], name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def noted(*args: Tensor, **options: Tensor) -> Tensor:
        seen.append(name)
        return function(*args, **options)

    return noted


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(32, 24), (20, 12), (9, 7), (2100, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_by_onednn_and_through_fp32_are_right(
    on_amd: list[str], dtype: torch.dtype, sizes: tuple[int, int], transposed: bool
) -> None:
    for tokens in (1, 2, 5, 8, 16, 40, 90):
        args = operands(tokens, 4, 2, sizes, transposed, dtype)
        out, expected = experts_of(*args), exact(*args)
        assert out.is_contiguous()
        assert (out.double() - expected).norm() <= BOUND[dtype] * expected.norm()
    if transposed:
        assert {"_by_onednn", "_through_fp32"}.isdisjoint(on_amd)
    elif dtype is torch.float32:
        assert "_by_onednn" in on_amd and "grouped_mm" not in on_amd
    else:
        assert {"_by_onednn", "_through_fp32"} <= set(on_amd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(32, 24), (9, 7), (2100, 5)])
def test_dense_networks_by_onednn_and_through_fp32_are_right(
    on_amd: list[str], dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    precision = "fp32" if dtype is torch.float32 else "bf16"
    for tokens in (1, 2, 4, 5, 6, 11, 12, 32, 33):
        x, *_, stack = operands(tokens, 1, 1, sizes, False, dtype)
        gate, up, down = stack.expert(0)[:3]
        out = few_rows.mlp(x, gate, up, down, precision)
        if dtype is torch.bfloat16 and tokens > 12:
            assert out is None  # tiles
            continue
        wide = x.double()
        expected = (F.silu(wide @ gate.double().t()) * (wide @ up.double().t())) @ down.double().t()
        assert out is not None and out.is_contiguous() and out.dtype is dtype
        assert (out.double() - expected).norm() <= BOUND[dtype] * expected.norm()
    assert ("_through_fp32" in on_amd) is (dtype is torch.bfloat16) and "_by_onednn" in on_amd


@pytest.mark.parametrize(
    ("weights", "argument"),
    [
        (((96, 64), (96, 64), (32, 96)), "down_HI"),  # another H
        (((96, 64), (1, 64), (64, 96)), "up_IH"),
        (((1, 64), (96, 64), (64, 96)), "up_IH"),
        (((96, 64), (96, 64), (96,)), "down_HI"),
        (((64,), (64,), (64, 1)), "gate_IH"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_do_not_fit_are_refused(
    weights: tuple[tuple[int, ...], ...], argument: str, rows: int, dtype: torch.dtype
) -> None:
    x, operands = torch.randn(rows, 64, dtype=dtype), [torch.randn(shape, dtype=dtype) for shape in weights]
    precision = "fp32" if dtype is torch.float32 else "bf16"
    assert few_rows.mlp(x, *operands, precision) is None
    with refused(ShapeError, argument):
        ops.swiglu_mlp(x, *operands, precision=precision, backend="torch")


@pytest.mark.parametrize(
    ("rows", "shape", "way"),
    [
        (1, (512, 512), "onednn"),
        (1, (256, 256), None),  # small
        (2, (512, 512), "weight on the left"),
        (4, (512, 512), "weight on the left"),
        (4, (512, 4096), "onednn"),
        (5, (512, 512), None),
        (5, (1024, 512), "onednn"),
        (32, (1024, 512), "onednn"),
        (33, (1024, 512), None),
    ],
)
def test_few_rows_are_multiplied_by_the_faster_way(
    rows: int, shape: tuple[int, int], way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "onednn_rule", lambda: products._RULES["AVX2"])
    monkeypatch.setattr(products, "_by_onednn", lambda left, right: left @ right + 1)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    assert products.linear_of_few(x, weight[:, ::2][:, : shape[1] // 2]) is None  # gaps
    result, plain = products.linear_of_few(x, weight), x @ weight.t()
    if way is None:
        assert result is None
    else:
        assert result is not None and result.is_contiguous() is (way == "onednn")
        torch.testing.assert_close(result, plain + (way == "onednn"), rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(products, "onednn_rule", lambda: None)
    assert products.linear_of_few(x, weight) is None
