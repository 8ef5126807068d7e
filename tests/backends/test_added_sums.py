"""What is added to the sums of a bf16 product: one rounding, whoever adds it, and however the operands lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.backends.torch import grouped_forward, grouped_products
from hf_neuron_moe.backends.torch.compute import call_scratch, operands_in_bf16
from hf_neuron_moe.backends.torch.grouped_forward import has_ones, tokens_operand
from hf_neuron_moe.backends.torch.grouped_products import adds_to_sums, project
from hf_neuron_moe.backends.torch.tiles import Loader

CPU = torch.device("cpu")
RUNS = [(0, 0, 5), (2, 5, 5 + 33)]  # group 1 has no rows
SIZES = [(70, 48), (1024, 1040), (1030, 1024)]  # N and K: below, at and above a piece of a weight


def weights(order: str, N: int, K: int, generator: torch.Generator) -> Tensor:
    """bf16 ``[3, N, K]``; every other column of "interleaved" ones belongs to another weight."""
    values = (torch.randn(3, N, K, generator=generator) * K**-0.5).bfloat16()
    if order == "rows":
        return values
    if order == "columns":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "columns with gaps":
        wide = torch.full((3, K, 2 * N), torch.nan, dtype=torch.bfloat16)
        return wide[:, :, :N].transpose(1, 2).copy_(values)
    both = torch.full((3, 2 * N, K), torch.nan, dtype=torch.bfloat16)
    return both[:, 1::2].copy_(values)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", ["rows", "columns", "columns with gaps", "interleaved"])
@pytest.mark.parametrize("itself", [True, False], ids=["by the library", "by columns"])
def test_an_added_number_is_rounded_with_the_sum(
    itself: bool, order: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if itself and not adds_to_sums(CPU):
        pytest.skip("no bf16 instructions")
    for module in (grouped_products, grouped_forward):
        monkeypatch.setattr(module, "adds_to_sums", lambda _: itself)
    (N, K), rows, generator = size, RUNS[-1][2], torch.Generator().manual_seed(sum(size))
    weight_GNK = weights(order, N, K, generator)
    scales = 2.0 ** torch.randint(-9, 5, (3, 2 * N), generator=generator)
    added_GN = (torch.randn(3, 2 * N, generator=generator) * scales)[:, ::2]
    x_RK = torch.randn(rows, K, generator=generator).bfloat16()
    loader = Loader(operands_in_bf16("bf16"), call_scratch(CPU))
    assert has_ones((added_GN,), loader) != itself
    out_RN = torch.empty(rows, N, dtype=torch.bfloat16)
    left_RK = tokens_operand(x_RK, loader, with_ones=not itself)
    project(left_RK, weight_GNK, RUNS, loader, out_RN, added_GN=added_GN)
    for group, start, end in RUNS:
        terms = (x_RK[start:end].double(), weight_GNK[group].double().t())
        exact = terms[0] @ terms[1] + added_GN[group].double()
        # half a unit of bf16's last place, and K + 3 roundings of fp32 sums
        unit = 2.0 ** (exact.abs().log2().floor() - 7)
        sums = terms[0].abs() @ terms[1].abs() + added_GN[group].double().abs()
        assert ((out_RN[start:end].double() - exact).abs() <= unit / 2 + (K + 3) * 2.0**-24 * sums).all()
