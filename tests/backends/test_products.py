"""Products by oneDNN: right in every order of memory, the same bits in all of them, and only where the rule says so."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch.cpu import matmul as products
from hf_neuron_moe.backends.torch.cpu.matmul import (
    TOKENS,
    OneDNNRule,
    matmul,
    matmul_into,
    matmul_over_rows_into,
    padded_rows,
)
from tests.tiny_models import tiny_model, tokens

EVERYTHING = OneDNNRule(size=1, rows=1, columns=1, every_shape=True)
NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch built without oneDNN")


@pytest.fixture
def all_by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Give every fp32 product to oneDNN, whatever the processor, and note the shapes."""
    seen: list[tuple[int, ...]] = []
    kernel = torch.ops.mkldnn._linear_pointwise

    class Watched:
        @staticmethod
        def _linear_pointwise(left: Tensor, weight: Tensor, *rest: object) -> Tensor:
            assert weight.is_contiguous() or weight.t().is_contiguous()
            seen.append((*left.shape, weight.shape[0]))
            return kernel(left, weight, *rest)

    monkeypatch.setattr(products, "onednn_rule", lambda: EVERYTHING)
    monkeypatch.setattr(torch.ops, "mkldnn", Watched)
    return seen


def ordered(values: Tensor, order: str) -> Tensor:
    """The same matrix in another order of memory; ``gaps`` is a part of a larger one."""
    rows, columns = values.shape
    if order == "rows":
        return values.contiguous()
    if order == "columns":
        return values.t().contiguous().t()
    if order == "rows with gaps":
        return torch.full((rows, columns + 3), torch.nan)[:, 1:-2].copy_(values)
    return torch.full((columns, rows + 5), torch.nan)[:, 2:-3].t().copy_(values)


ORDERS = ("rows", "columns", "rows with gaps", "columns with gaps")


PRODUCTS = given(
    shape=st.tuples(*[st.one_of(st.integers(1, 70), st.integers(100, 200))] * 3),
    left=st.sampled_from(ORDERS),
    right=st.sampled_from(ORDERS),
    out=st.sampled_from(["rows", "rows with gaps"]),
    padded=st.booleans(),
    accumulate=st.booleans(),
)


def operands(shape: tuple[int, int, int], accumulate: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both operands, what the result holds before, the exact result, and the bound of the error."""
    (rows, inner, columns), generator = shape, torch.Generator().manual_seed(sum(shape))
    left, right = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
    before = torch.randn(rows, columns, generator=generator)
    exact = left.double() @ right.double() + (before.double() if accumulate else 0)
    # At most inner + 1 fp32 roundings of sums that are no larger than the sum of the terms' sizes.
    bound = (inner + 1) * 2.0**-24 * (left.double().abs() @ right.double().abs() + before.double().abs())
    return left, right, before, exact, bound


def with_rows(values: Tensor, rows: int, value: float) -> Tensor:
    """`values` with rows of `value` after its own."""
    return torch.cat([values, torch.full((rows - len(values), values.shape[1]), value)])


@NEEDS_ONEDNN
@settings(max_examples=150, deadline=None)
@PRODUCTS
def test_every_order_of_memory_is_multiplied_right(
    shape: tuple[int, int, int], left: str, right: str, out: str, padded: bool, accumulate: bool
) -> None:
    """Rows after the real ones may hold anything."""
    a, b, before, exact, bound = operands(shape, accumulate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "onednn_rule", lambda: EVERYTHING)
        size = padded_rows(len(a), 1, a.dtype, a.device)
        assert size % TOKENS == 0 and 0 <= size - len(a) < TOKENS
        a = with_rows(a, size, torch.nan) if padded else a
        result = ordered(before, out)
        matmul_into(result, ordered(a, left), ordered(b, right), accumulate=accumulate)
        assert ((result.double() - exact).abs() <= bound).all()
        if not accumulate:
            buffer = torch.full((len(a), shape[2]), torch.nan)
            values = matmul(ordered(a, left), ordered(b, right), buffer, shape[0])
            assert values.shape == buffer.shape and values.is_contiguous()
            assert ((values[: shape[0]].double() - exact).abs() <= bound).all()


@NEEDS_ONEDNN
@settings(max_examples=100, deadline=None)
@PRODUCTS
def test_sums_over_tokens_are_right(
    shape: tuple[int, int, int], left: str, right: str, out: str, padded: bool, accumulate: bool
) -> None:
    """Rows after the real ones are zero."""
    a, b, before, exact, bound = operands(shape, accumulate)
    left_RM, right_RN, rows = a.t(), b, len(b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "onednn_rule", lambda: EVERYTHING)
        if padded:
            size = padded_rows(rows, 1, a.dtype, a.device)
            left_RM, right_RN = with_rows(left_RM, size, 0.0), with_rows(right_RN, size, 0.0)
        result = ordered(before, out)
        matmul_over_rows_into(result, ordered(left_RM, left), ordered(right_RN, right), rows, accumulate=accumulate)
        assert ((result.double() - exact).abs() <= bound).all()


@NEEDS_ONEDNN
def test_a_sum_over_tokens_is_made_in_the_order_of_its_place(all_by_onednn: list[tuple[int, ...]]) -> None:
    left, right, rows = torch.randn(2 * TOKENS, 96), torch.randn(2 * TOKENS, 160), 2 * TOKENS
    by_row, by_column = torch.empty(96, 160), torch.empty(160, 96).t()
    for out in (by_row, by_column):
        matmul_over_rows_into(out, left, right, rows, accumulate=False)
    assert all_by_onednn == [(96, rows, 160), (160, rows, 96)]
    torch.testing.assert_close(by_row, by_column)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    out = torch.full((len(left), right.shape[1]), torch.nan, dtype=left.dtype)
    matmul_into(out, left, right, accumulate=False)
    return out


@NEEDS_ONEDNN
def test_the_order_of_the_weights_in_memory_changes_no_bit(all_by_onednn: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(2 * TOKENS, 96), torch.randn(96, 160)
    results = [multiply(left, ordered(right, order)) for order in ORDERS]
    assert len(all_by_onednn) == len(ORDERS)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.sampled(3)
@NEEDS_ONEDNN
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_however_many_tokens_there_are_the_shapes_are_few(
    precision: str, all_by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN generates code for every shape and keeps it."""
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: False)
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    patch_model(model, {"precision": precision})
    for length in range(33, 65):
        model(torch.arange(length)[None] % 32).logits.sum().backward()
    assert {rows for rows, _, _ in all_by_onednn if rows not in (64, 128)} <= {48}  # the others are weight gradients
    assert len(set(all_by_onednn)) <= 4 * 6


@pytest.mark.parametrize(
    ("rows", "weight", "expected"),
    [(513, 1 << 20, 528), (512, 1 << 20, 512), (127, 1 << 30, 127), (128, 1 << 21, 128), (250, 1 << 20, 250)],
)
def test_rows_are_padded_where_onednn_takes_the_products(
    rows: int, weight: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = products._RULES["AVX2"]
    monkeypatch.setattr(products, "onednn_rule", lambda: rule)
    assert padded_rows(rows, weight, torch.float32, torch.device("cpu")) == expected
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float32, "meta")):
        assert padded_rows(rows, weight, dtype, torch.device(device)) == rows
    monkeypatch.setattr(products, "onednn_rule", lambda: None)
    assert padded_rows(rows, weight, torch.float32, torch.device("cpu")) == rows


@NEEDS_ONEDNN
def test_nothing_but_fp32_goes_to_onednn(all_by_onednn: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(TOKENS, 16), torch.randn(16, 32)
    for dtype in (torch.bfloat16, torch.float64):
        a, b = left.to(dtype), right.to(dtype)
        assert torch.equal(multiply(a, b), torch.mm(a, b))
    assert all_by_onednn == []


@NEEDS_ONEDNN
def test_torchs_switch_turns_onednn_off(all_by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(TOKENS, 16), torch.randn(16, 32)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(multiply(left, right), torch.mm(left, right))
    assert all_by_onednn == []


@pytest.mark.parametrize(
    ("rule", "shape", "transposed", "taken"),
    [
        ("AVX2", (512, 512, 1792), False, True),
        ("AVX2", (512, 256, 1792), False, False),  # small
        ("AVX2", (64, 640, 8192), False, False),  # few rows
        ("AVX2", (1792, 512, 512), True, False),  # a copy of the left operand costs what is won
        ("AVX2", (1792, 512, 1024), True, True),
        ("AVX2", (512, 768, 3072), False, False),  # slow in one of the two orders
        ("AVX2", (512, 3584, 1024), False, True),
        ("AVX512", (512, 768, 3072), False, True),
        ("AVX512", (256, 512, 256), False, True),
        ("AVX512", (256, 512, 128), False, False),
        ("AVX512", (1792, 512, 512), True, True),
    ],
)
def test_the_rule_reads_shapes_and_the_left_operand_s_order(
    rule: str, shape: tuple[int, int, int], transposed: bool, taken: bool
) -> None:
    assert products._RULES[rule].takes(*shape, straight=not transposed) is taken


@pytest.mark.parametrize(
    ("cpuinfo", "capability", "operator", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX2", True, "AVX2"),
        ("vendor_id : AuthenticAMD", "AVX512", True, "AVX512"),
        ("vendor_id : AuthenticAMD", "DEFAULT", True, None),
        ("vendor_id : AuthenticAMD", "AVX2", False, None),
        ("vendor_id : GenuineIntel", "AVX512", True, None),
    ],
)
def test_the_processor_decides(
    cpuinfo: str,
    capability: str,
    operator: bool,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setattr(products, "Path", lambda _: file)
    for library in (torch.backends.mkldnn, torch.backends.mkl):
        monkeypatch.setattr(library, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if not operator:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    products.onednn_rule.cache_clear()
    try:
        assert products.onednn_rule() is (None if expected is None else products._RULES[expected])
    finally:
        products.onednn_rule.cache_clear()


def gradients(config: dict[str, str], family: str) -> dict[str, Tensor]:
    """Logits and every gradient of a patched model; in stock layout, by a state dict of gradients."""
    model = copy.deepcopy(tiny_model(family, hidden_size=64, intermediate_size=128))
    patch_model(model, config)
    logits = model(tokens()).logits
    logits.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {"logits": logits.detach(), **{name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.sampled(3)
@NEEDS_ONEDNN
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_policies_and_homes_have_the_same_bits_by_onednn(
    precision: str, family: str, all_by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: False)
    expected = gradients({"precision": precision}, family)
    by_onednn = len(all_by_onednn)
    assert by_onednn >= 2 * 9, "two layers, each forward and backward, were expected to use oneDNN"
    for change in ({"activations": "recompute"}, {"activations": "full"}, {"weights": "kernel"}):
        values = gradients({"precision": precision, **change}, family)
        assert values.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(values[name], expected[name])]
        assert different == [], (change, different)
    monkeypatch.setattr(products, "onednn_rule", lambda: None)
    for name, value in gradients({"precision": precision}, family).items():
        scale = value.abs().max().item()
        # The sums' last bits differ; what they round to (bf16, MX codes) may differ by a step of it here and there.
        tolerance = {"fp32": 1e-5, "bf16": 2e-2, "mxfp8": 1e-1}[precision] * scale
        torch.testing.assert_close(expected[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
