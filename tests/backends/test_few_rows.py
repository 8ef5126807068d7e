"""Generation through experts: torch's grouped product and one product per expert are the same, and right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_neuron_moe.backends.torch import few_rows
from hf_neuron_moe.backends.torch.experts import ExpertStack

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
    return x, index, weight, ExpertStack(gate_up, down, transposed)


def exact(x: Tensor, index: Tensor, weight: Tensor, stack: ExpertStack) -> Tensor:
    """Token by token in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(index.tolist(), weight.tolist(), strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            if expert < len(stack.gate_up):
                gate, up, down = (w.double() for w in vars(stack.expert(expert)).values())
                row = x[token].double()
                out[token] += factor * (down @ (F.silu(gate @ row) * (up @ row)))
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
    out = few_rows.experts(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "_can_be_grouped", lambda stack: False)
        assert torch.equal(few_rows.experts(*args), out)
    expected = exact(*args)
    assert (out.double() - expected).norm() <= BOUND[dtype] * max(expected.norm().item(), 1e-3)


@pytest.mark.parametrize(("tokens", "calls"), [(1, 0), (16, 2)])
def test_the_grouped_product_is_for_busy_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, calls: int) -> None:
    """It looks at idle experts too, of which a single token leaves many."""
    seen = []
    grouped = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: seen.append(1) or grouped(*args, **options))
    few_rows.experts(*operands(tokens, 8, 2, (16, 16), False, torch.float32))
    assert len(seen) == calls
