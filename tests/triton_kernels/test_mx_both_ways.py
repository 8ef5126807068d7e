"""The Triton quantization writes the bytes of ``formats/mx.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_neuron_moe.backends.triton.mx_both_ways import quantize
from hf_neuron_moe.errors import DTypeError, ShapeError
from hf_neuron_moe.formats.mx import fake_quantize_mx, quantize_mx
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import k_map, unswizzle
from tests.triton_kernels.grouped_rows import ends_and_rows, runs, wide

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]
TILES = {"TILE_R": 32, "TILE_C": 64}


def hardware_order(size: int, scheme: str = "wrapX") -> Tensor:
    """Return which position each place has, by the map of ``formats/swizzle.py``: block, lane, neighbour."""
    return k_map(size, scheme).view(-1, 8, 4).transpose(1, 2).reshape(-1)


def padded(x_RC: Tensor) -> Tensor:
    return torch.nn.functional.pad(x_RC.float(), (0, padded_size(x_RC.shape[1]) - x_RC.shape[1]))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether values are equal with their signs, NaN equal to NaN."""
    same = (left.view(torch.int16) == right.view(torch.int16)) | (left.isnan() & right.isnan())
    return bool(same.all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "lone_384"), [(40, False), (128, False), (384, False), (384, True), (640, False)])
def test_columns(columns: int, lone_384: bool, dtype: torch.dtype) -> None:
    x, scheme = wide(13, columns).to(dtype), "wrapX_single" if lone_384 else "wrapX"
    token = torch.tensor([3, 0, 12, 12, 5])
    ours, _ = quantize(x, values=False, token_R=token, lone_384=lone_384, tiles=TILES)
    expected = quantize_mx(padded(x[token]), scheme=scheme)
    assert ours.codes is not None and ours.scales is not None
    order = hardware_order(padded_size(columns), scheme)
    assert torch.equal(ours.codes, unswizzle(expected.codes, scheme)[:, order])
    assert torch.equal(ours.scales, expected.scales.t())
    values = quantize(x, values=True, lone_384=lone_384)[0].values
    assert values is not None
    assert same_bits(values, fake_quantize_mx(padded(x), scheme=scheme).bfloat16())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("groups", "block", "tile"),
    [
        ("some are empty", 32, 32),
        ("one group", 96, 32),
        ("rows after the last", 128, 128),
        ("long groups", 384, 64),
        ("long groups", 640, 128),
    ],
)
def test_rows_of_each_group(groups: str, block: int, tile: int) -> None:
    (ends, rows), tiles = ends_and_rows(groups), {"TILE_R": tile, "TILE_C": 128}
    source = wide(rows + 3, 40, seed=block).bfloat16()
    token = torch.arange(rows).flip(0) + 2
    by_columns, by_rows = quantize(source, (ends, block), values=False, token_R=token, tiles=tiles)
    _, values = quantize(source, (ends, block), values=True, columns=False, token_R=token, tiles=tiles)
    assert by_rows.codes is not None and by_rows.scales is not None and values.values is not None
    expected, order = quantize_mx(padded(source[token])), hardware_order(128)
    last = int(ends[-1])
    assert by_columns.codes is not None and by_columns.scales is not None
    assert torch.equal(by_columns.codes[:last], unswizzle(expected.codes)[:last, order])
    assert torch.equal(by_columns.scales[:last], expected.scales.t()[:last])
    for tensor in (by_columns.codes, by_rows.codes, by_columns.scales):
        assert not tensor[last:].any()
    leads = hardware_order(block).view(-1, 32)[:, 0].tolist()
    for group, start, end in runs(groups):
        for first in range(start, end, block):
            length = min(block, end - first)
            x_BC = torch.zeros(block, 40)
            x_BC[:length] = source[token[first : first + length]].float()
            expected = quantize_mx(x_BC.t())
            codes = unswizzle(expected.codes).t()[:length]
            assert torch.equal(by_rows.codes[first : first + length], codes)
            for number, lead in enumerate(leads):
                if lead < length:
                    place = (first + lead) // 8 + group
                    assert torch.equal(by_rows.scales[place], expected.scales[number])
            rounded = fake_quantize_mx(x_BC, axis=0)[:length].bfloat16()
            assert same_bits(values.values[first : first + length], rounded)


@pytest.mark.parametrize("groups", ["one has everything", "no rows", "512 groups"])
def test_extreme_groups(groups: str) -> None:
    ends, rows = ends_and_rows(groups)
    x = wide(rows, 8).bfloat16()
    _, by_rows = quantize(x, (ends, 32), values=True, columns=False, tiles={"TILE_R": 32, "TILE_C": 128})
    assert by_rows.values is not None and by_rows.values.shape == x.shape
    for _, start, end in runs(groups):
        for first in range(start, end, 32):
            part = slice(first, min(first + 32, end))
            x_BC = torch.zeros(32, 8)
            x_BC[: part.stop - first] = x[part].float()
            assert same_bits(by_rows.values[part], fake_quantize_mx(x_BC, axis=0)[: part.stop - first].bfloat16())


def test_a_carry_into_the_next_binade_is_kept() -> None:
    """Triton's interpreter itself casts 126.13 to 64."""
    x = torch.full((1, 128), 126.13)
    ours = quantize(x, values=True)[0].values
    assert ours is not None and bool((ours == 128).all())


def test_strided_source_and_what_is_no_source() -> None:
    x = wide(128, 9).bfloat16().t()
    ours = quantize(x, values=True)[0].values
    assert ours is not None and same_bits(ours, fake_quantize_mx(x).bfloat16())
    with pytest.raises(DTypeError):
        quantize(x.half(), values=True)
    with pytest.raises(ShapeError):
        quantize(x, (torch.tensor([9], dtype=torch.int32), 40), values=True)


def test_a_rest_of_384_is_no_axis_of_384() -> None:
    x_TC = torch.randn(4, 512 + 384, generator=torch.Generator().manual_seed(0))
    one, other = (quantize(x_TC, values=False, lone_384=lone)[0] for lone in (False, True))
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
