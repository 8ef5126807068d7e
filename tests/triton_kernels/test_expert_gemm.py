"""Grouped products and sums over rows equal their definition.

With small integers every fp32 sum is exact in any order, so results are equal bit for bit. With other values an fp32
sum of n products differs by at most n * 2**-24 of the sum of their magnitudes, whatever its order.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_neuron_moe.backends.triton import launch_grid
from hf_neuron_moe.backends.triton.expert_gemm import (
    grouped_product,
    weight_gradient,
)
from hf_neuron_moe.backends.triton.mx_both_ways import quantize
from hf_neuron_moe.errors import DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats.mx import fake_quantize_mx
from tests.triton_kernels.grouped_rows import ENDS, ends_and_rows, runs, small_integers, wide

pytestmark = pytest.mark.triton
TILES = {"TILE_M": 16, "TILE_N": 32, "TILE_K": 32}
SUM_TILES = {"TILE_N": 32, "TILE_K": 64, "TILE_R": 32}
N, K = 40, 56


def product_of(x_RK: Tensor, weight_ENK: Tensor, groups: str) -> Tensor:
    """Return the products in the dtype of `x_RK`, zeros after the last group."""
    out = x_RK.new_zeros(len(x_RK), weight_ENK.shape[1])
    for group, start, end in runs(groups):
        out[start:end] = x_RK[start:end] @ weight_ENK[group].t()
    return out


def sums_of(left_RN: Tensor, right_RK: Tensor, groups: str) -> Tensor:
    return torch.stack([left_RN[start:end].t() @ right_RK[start:end] for _, start, end in runs(groups)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("groups", ENDS)
def test_grouped_product(groups: str) -> None:
    ends, rows = ends_and_rows(groups)
    x, weight = small_integers(11, K), small_integers(len(ends), N, K, seed=1)
    token = torch.randint(0, 11, (rows,), generator=torch.Generator().manual_seed(2))
    ours = grouped_product(x, weight, ends, token_R=token, tiles=TILES)
    assert torch.equal(ours, product_of(x.float()[token], weight.float(), groups))


def test_transposed_weights_biases_fp32_weights_and_the_table_of_tiles() -> None:
    ends, rows = ends_and_rows("some are empty")
    x, by_columns = small_integers(rows, K), small_integers(len(ends), K, N, seed=1).float().transpose(1, 2)
    added = torch.arange(len(ends) * N).view(len(ends), N) / 4
    ours = grouped_product(x, by_columns, ends, added_EN=added)
    expected = product_of(x.float(), by_columns, "some are empty")
    for group, start, end in runs("some are empty"):
        expected[start:end] += added[group]
    assert torch.equal(ours, expected)
    rounded = grouped_product(x, by_columns, ends, added_EN=added, dtype=torch.bfloat16)
    assert torch.equal(rounded, expected.bfloat16())  # the exact sum, rounded once


def test_ties_of_a_sum_go_to_even() -> None:
    """1 + 2**-8 lies between two bf16 values, the lower of which is even; 1 + 3 * 2**-8 the other way round."""
    ends, one = torch.tensor([2], dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.bfloat16)
    weight = torch.cat([one, one * 2.0**-8], 2)
    ours = grouped_product(torch.tensor([[1.0, 1.0], [1.0, 3.0]]).bfloat16(), weight, ends, dtype=torch.bfloat16)
    assert ours.flatten().tolist() == [1.0, 1.0 + 2.0**-6]
    fp32_weight = torch.tensor([[[1 + 2.0**-8], [1 + 3 * 2.0**-8]]])
    ours = grouped_product(torch.ones(1, 1).bfloat16(), fp32_weight, torch.tensor([1], dtype=torch.int32))
    assert ours.flatten().tolist() == [1.0, 1.0 + 2.0**-6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_values(dtype: torch.dtype) -> None:
    ends, rows = ends_and_rows("rows after the last")
    x, weight = torch.randn(rows, K).to(dtype), torch.randn(len(ends), N, K).to(dtype)
    ours = grouped_product(x, weight, ends, tiles=TILES)
    expected = product_of(x.double(), weight.double(), "rows after the last")
    bound = K * 2.0**-24 * product_of(x.double().abs(), weight.double().abs(), "rows after the last")
    assert bool(((ours - expected).abs() <= bound).all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("groups", ENDS)
def test_weight_gradient(groups: str) -> None:
    ends, rows = ends_and_rows(groups)
    left, right = small_integers(rows, 24), small_integers(11, 40, seed=1)
    token = torch.randint(0, 11, (rows,), generator=torch.Generator().manual_seed(2))
    out = torch.full((len(ends), 40, 24), 7.0).transpose(1, 2)
    assert weight_gradient(left, right, ends, out, tokens=(None, token), tiles=SUM_TILES) is out
    assert torch.equal(out, sums_of(left.float(), right.float()[token], groups))


def test_weight_gradient_in_bf16_is_rounded_once() -> None:
    (ends, rows), tiles = ends_and_rows("some are empty"), {"TILE_N": 16, "TILE_K": 32, "TILE_R": 16}
    left, right = torch.randn(rows, 24), torch.randn(rows, 40)
    exact = torch.empty(len(ends), 24, 40)
    weight_gradient(left, right, ends, exact, tiles=tiles)
    bound = rows * 2.0**-24 * sums_of(left.double().abs(), right.double().abs(), "some are empty")
    assert bool(((exact - sums_of(left.double(), right.double(), "some are empty")).abs() <= bound).all())
    rounded = weight_gradient(left, right, ends, exact.bfloat16().zero_(), tiles=tiles)
    assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("groups", "columns"), [("some are empty", 300), ("rows after the last", 384), ("no rows", 8)])
def test_product_of_codes_and_scales(groups: str, columns: int) -> None:
    """Blocks of hardware hold the same values, so the product is that of the dequantized operands."""
    ends, rows = ends_and_rows(groups)
    x, weight = torch.randn(9, columns).bfloat16(), torch.randn(len(ends), N, columns).bfloat16()
    token = torch.arange(rows) % 9
    operands = (quantize(part.flatten(0, -2), values=False)[0] for part in (x, weight))
    ours = grouped_product(*operands, ends, token_R=token, tiles=TILES)
    pad = torch.nn.functional.pad
    x64, w64 = (fake_quantize_mx(pad(part, (0, -columns % 128))).double() for part in (x, weight))
    bound = columns * 2.0**-24 * product_of(x64.abs()[token], w64.abs(), groups)
    assert bool(((ours - product_of(x64[token], w64, groups)).abs() <= bound).all())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("groups", "block"), [("some are empty", 32), ("long groups", 384)])
def test_sums_of_codes_and_scales(groups: str, block: int) -> None:
    ends, rows = ends_and_rows(groups)
    sources = [torch.randn(rows, 24).bfloat16(), torch.randn(rows, 40).bfloat16()]
    by_rows = {"columns": False, "tiles": {"TILE_R": min(block, 128), "TILE_C": 128}}
    left, right = (quantize(part, (ends, block), values=False, **by_rows)[1] for part in sources)
    left64, right64 = (quantize(part, (ends, block), values=True, **by_rows)[1].values.double() for part in sources)
    tiles = {"TILE_N": 32, "TILE_K": 64, "TILE_R": min(block, 128)}
    ours = torch.full((len(ends), 24, 40), 7.0)
    weight_gradient(left, right, ends, ours, block_size=block, tiles=tiles)
    bound = rows * 2.0**-24 * sums_of(left64.abs(), right64.abs(), groups)
    assert bool(((ours - sums_of(left64, right64, groups)).abs() <= bound).all())


def test_without_interpreter_tensors_of_a_cpu_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_grid, "INTERPRETED", SimpleNamespace(value=False))
    with pytest.raises(DeviceError, match="TRITON_INTERPRET=1"):
        grouped_product(small_integers(4, K), small_integers(1, N, K), torch.tensor([4], dtype=torch.int32))


def test_errors() -> None:
    ends = torch.tensor([4], dtype=torch.int32)
    x, weight = wide(4, K).bfloat16(), small_integers(1, N, K)
    with pytest.raises(DTypeError):
        grouped_product(x.half(), weight, ends)
    with pytest.raises(ShapeError):
        grouped_product(x[:, 1:], weight, ends)
    with pytest.raises(ShapeError):
        weight_gradient(x, x, ends, torch.empty(1, N, K))


def test_an_empty_grid_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes no empty grid; the interpreter does."""
    monkeypatch.setattr(launch_grid, "INTERPRETED", SimpleNamespace(value=True))
    kernel = MagicMock()
    for grid in ((4, 0), (0,), (4, 1)):
        launch_grid.launch(kernel, grid, torch.empty(0))
    assert [call.args for call in kernel.__getitem__.call_args_list] == [((4, 1),)]


def test_nothing_is_added_to_rows_after_the_last_group() -> None:
    x_RK, weight_1NK = torch.ones(20, K).bfloat16(), torch.ones(1, N, K).bfloat16()
    out_RN = grouped_product(x_RK, weight_1NK, torch.tensor([4], dtype=torch.int32), added_EN=torch.ones(1, N))
    assert torch.equal(out_RN[:4], torch.full((4, N), K + 1.0)) and not out_RN[4:].any()
