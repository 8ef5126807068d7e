"""MX expert weights: index maps written as loops against the vectorised layouts."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats import (
    MoEWeightMX,
    dequantize_moe_down,
    dequantize_moe_gate_up,
    fake_quantize_mx,
    moe_bias_from_lanes,
    moe_bias_to_lanes,
    pack_moe_scales,
    padded_intermediate,
    quantize_moe_down,
    quantize_moe_gate_up,
    unpack_moe_scales,
    unpack_x4,
)
from hf_neuron_moe.formats.constants import element_format
from hf_neuron_moe.formats.e8m0 import multiply_by_scale_
from hf_neuron_moe.formats.elements import decode
from hf_neuron_moe.formats.moe_mx import arrange_moe_words, from_groups, group_words, to_groups
from tests.refusals import refused

FORMATS = ["e4m3fn", "e5m2", "e2m1"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("H", "inter", "halves"), [(512, 32, 2), (1024, 96, 2), (1024, 96, 1)])
def test_gate_up_index_map(H: int, inter: int, halves: int, fmt: str) -> None:
    gate_up_EH2I = torch.randn(2, H, halves, inter)
    weight = quantize_moe_gate_up(gate_up_EH2I, fmt=fmt)
    assert weight.words.shape == (2, 128, halves, H // 512, inter)
    assert weight.words.dtype == (torch.int16 if fmt == "e2m1" else torch.int32)
    assert weight.scales.shape == (2, 16, halves, H // 512, inter)
    lanes = unpack_x4(weight.words, fmt).view(*weight.words.shape, 4)
    # The scheme's oracle is the definition h = lane*(H/4) + tile*128 + p, one group of 8 p x 4 lanes at a time.
    for e, k, tile, i, row in ((0, 0, 0, 0, 0), (1, halves - 1, H // 512 - 1, inter - 1, 15), (1, 0, 0, 7, 3)):
        h = [[lane * (H // 4) + tile * 128 + 8 * row + p for lane in range(4)] for p in range(8)]
        group = gate_up_EH2I[e, h, k, i]
        alone = quantize_moe_gate_up(_only(gate_up_EH2I.shape, (e, h, k, i), group), fmt=fmt)
        assert torch.equal(alone.scales[e, row, k, tile, i], weight.scales[e, row, k, tile, i])
        here = lanes[e, 8 * row : 8 * row + 8, k, tile, i]
        elsewhere = unpack_x4(alone.words, fmt).view(*weight.words.shape, 4)
        assert torch.equal(elsewhere[e, 8 * row : 8 * row + 8, k, tile, i], here)
        assert int((elsewhere != 0).sum()) == int((here != 0).sum())  # the group lies there and nowhere else


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("inter", [32, 64, 384, 512, 544, 1024])
def test_down_index_map(inter: int, fmt: str) -> None:
    down_EIH = torch.randn(2, inter, 8)
    weight = quantize_moe_down(down_EIH, fmt=fmt)
    partitions, tiles = (128 if inter >= 512 else inter // 4), -(-inter // 512)
    assert weight.words.shape == (2, partitions, tiles, 8)
    assert weight.scales.shape == (2, partitions // 8, tiles, 8)
    values = dequantize_moe_down(weight)
    lanes = unpack_x4(weight.words, fmt).view(*weight.words.shape, 4)
    ones = torch.zeros_like(down_EIH)
    for e, p, tile, h, lane in ((0, 0, 0, 0, 0), (1, partitions - 1, tiles - 1, 7, 0), (1, 9 % partitions, 0, 3, 2)):
        i = tile * 512 + lane * partitions + p
        if i >= inter:
            assert int(lanes[e, p, tile, h, lane]) == 0  # padding
            continue
        ones[e, i, h] = 1.0
        placed = unpack_x4(quantize_moe_down(ones, fmt=fmt).words, fmt).view(lanes.shape)
        assert (placed != 0).nonzero().tolist() == [[e, p, tile, h, lane]]
        ones[e, i, h] = 0.0
    assert torch.equal(values[:, inter:], torch.zeros(2, padded_intermediate(inter) - inter, 8))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rule", ["neuron", "floor"])
@pytest.mark.parametrize("halves", [2, 1])
def test_values_equal_fake_quantization_with_the_named_schemes(halves: int, fmt: str, rule: str) -> None:
    gate_up_EH2I = torch.randn(3, 1024, halves, 5)
    got = dequantize_moe_gate_up(quantize_moe_gate_up(gate_up_EH2I, fmt=fmt, rule=rule))
    assert torch.equal(got, fake_quantize_mx(gate_up_EH2I, 1, fmt=fmt, rule=rule, scheme="one_tile"))
    down_EIH = torch.randn(3, 384, 6)
    got = dequantize_moe_down(quantize_moe_down(down_EIH, fmt=fmt, rule=rule))
    assert torch.equal(got, fake_quantize_mx(down_EIH, 1, fmt=fmt, rule=rule, scheme="wrapX_single"))


@pytest.mark.parametrize("inter", [32, 96, 512, 576])
def test_bias_lanes_follow_the_down_words(inter: int) -> None:
    bias_E2I = torch.randn(2, 2, inter)
    lanes = moe_bias_to_lanes(bias_E2I)
    partitions = 128 if inter >= 512 else inter // 4
    for e, p, k, tile, lane in torch.ones(lanes.shape).nonzero()[:: max(1, lanes.numel() // 97)].tolist():
        i = tile * 512 + lane * partitions + p
        assert lanes[e, p, k, tile, lane] == (bias_E2I[e, k, i] if i < inter else 0)
    assert torch.equal(moe_bias_from_lanes(lanes)[..., :inter], bias_E2I)


@pytest.mark.parametrize("tiles", [1, 4, 5])
def test_packed_moe_scales(tiles: int) -> None:
    scales = torch.randint(1, 255, (2, 16, 2, tiles, 3), dtype=torch.uint8)
    packed = pack_moe_scales(scales)
    assert packed.shape == (2, 128, -(-tiles // 4), 2, 3)
    for tile in range(tiles):
        for row in range(16):
            partition = 32 * (row // 4) + 4 * (tile % 4) + row % 4
            assert torch.equal(packed[:, partition, tile // 4], scales[:, row, :, tile])
    assert int((packed != 0).sum()) == scales.numel()
    assert torch.equal(pack_moe_scales(scales[:, :, 1:]), packed[:, :, :, 1:])  # up alone
    assert torch.equal(unpack_moe_scales(packed[:, :, :, 1:], tiles), scales[:, :, 1:])
    down = pack_moe_scales(scales[:, :, 0])
    assert torch.equal(down, packed[:, :, :, 0])


@pytest.mark.parametrize("inter", [32, 64, 96, 256, 384, 480])
def test_packed_scales_of_an_intermediate_below_512(inter: int) -> None:
    """pI/8 rows instead of 16, for example 12 with gpt-oss' 384: the same partitions, the others zero."""
    rows = inter // 32
    scales = torch.randint(1, 255, (2, rows, 1, 5), dtype=torch.uint8)
    packed = pack_moe_scales(scales)
    assert packed.shape == (2, 128, 1, 5)
    for row in range(rows):
        assert torch.equal(packed[:, 32 * (row // 4) + row % 4], scales[:, row])
    assert int((packed != 0).sum()) == scales.numel()
    assert torch.equal(unpack_moe_scales(packed, 1, rows), scales)
    assert pack_moe_scales(quantize_moe_down(torch.ones(1, inter, 8)).scales).shape == (1, 128, 1, 8)


def test_refusals() -> None:
    with refused(ShapeError, "H"):
        quantize_moe_gate_up(torch.zeros(1, 256, 2, 32))
    with refused(ShapeError, "I"):
        quantize_moe_down(torch.zeros(1, 48, 32))
    with refused(ShapeError, "gate_up", got="[1, 512, 3, 32]"):
        quantize_moe_gate_up(torch.zeros(1, 512, 3, 32))
    weight = quantize_moe_down(torch.ones(1, 64, 8))
    with refused(ShapeError, "scales", got="[1, 1, 1, 8]"):
        dequantize_moe_down(MoEWeightMX(weight.words, weight.scales[:, :1], weight.fmt))
    for shape in ((1, 2, 2, 1, 8), (1, 2, 2, 8), (1, 17, 1, 8)):
        with refused(ShapeError, "scales"):
            pack_moe_scales(torch.zeros(shape, dtype=torch.uint8))
    with refused(ConfigError, "rule"):
        quantize_moe_down(torch.ones(1, 64, 8), rule="")
    with refused(DTypeError, "scales", got="float32"):
        pack_moe_scales(torch.ones(1, 16, 4, 8))
    packed = pack_moe_scales(torch.ones(1, 16, 4, 8, dtype=torch.uint8))
    with refused(ShapeError, "tiles and rows", got="tiles 5, rows 16"):
        unpack_moe_scales(packed, 5)
    with refused(ShapeError, "tiles and rows", got="tiles 4, rows 17"):
        unpack_moe_scales(packed, 4, 17)
    with refused(ShapeError, "tiles and rows", got="tiles 4, rows 0"):
        unpack_moe_scales(packed, 4, 0)
    with refused(ShapeError, "packed"):
        unpack_moe_scales(packed[:, :64], 4)
    with refused(DTypeError, "packed"):
        unpack_moe_scales(packed.int(), 4)


def _only(shape: torch.Size, index: tuple[object, ...], values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(shape)
    e, h, k, i = index
    out[e, torch.tensor(h), k, i] = values
    return out


@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1"])
@pytest.mark.parametrize(("H", "inter"), [(512, 32), (1024, 96), (512, 512), (512, 1024)])
def test_codes_with_scales_of_adjacent_values_become_words(H: int, inter: int, fmt: str) -> None:
    """Random codes and every scale byte that is finite: the words hold both, at the positions of the formula."""
    generator = torch.Generator().manual_seed(H + inter)
    element = element_format(fmt)
    shapes = {"gate_up": (2, 2, inter, H), "up": (2, 1, inter, H), "down": (2, 40, inter)}
    for shape in shapes.values():
        codes = torch.randint(0, 1 << element.code_bits, shape, generator=generator, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # NaN of e4m3
        bytes_ = torch.randint(0, 247, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
        weight = arrange_moe_words(group_words(codes, element), bytes_, element)
        values = multiply_by_scale_(decode(codes, element), bytes_.repeat_interleave(32, -1))
        K, q, r, i = shape[-1], *places(shape[-1])
        if len(shape) == 4:
            found = dequantize_moe_gate_up(weight).permute(0, 2, 3, 1)
            rows = row_places(inter)
            along = r * (K // 4) + 128 * (q // 16) + 8 * (q % 16) + i
            lane = unpack_x4(weight.words, element).view(*weight.words.shape, 4)
            stored = weight.scales[:, along % (K // 4) // 8 % 16, :, along % (K // 4) // 128]  # [K, E, 2, I]
            codes_there = lane[:, along % (K // 4) % 128, :, along % (K // 4) // 128, :, r]
            assert torch.equal(stored[..., rows].permute(1, 2, 3, 0), bytes_.repeat_interleave(32, -1))
            assert torch.equal(codes_there[..., rows].permute(1, 2, 3, 0), codes)
            found = found[:, :, rows][..., along]
        else:
            found = dequantize_moe_down(weight).permute(0, 2, 1)[..., row_places(inter)]
        assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def places(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group q, row r and column i of every value: ``32q + 8r + i``."""
    value = torch.arange(size)
    return value // 32, value % 32 // 8, value % 8


def row_places(inter: int) -> torch.Tensor:
    """Where the words have every value of an intermediate axis of whole tiles."""
    q, r, i = places(inter)
    partitions = min(inter // 4, 128)
    tile, j = q // (partitions // 8), q % (partitions // 8)
    return 512 * tile + r * partitions + 8 * j + i


def test_the_order_of_groups_is_a_permutation() -> None:
    for size, tile in ((512, None), (1536, None), (96, 96), (1024, 512)):
        values = torch.randn(3, size)
        assert torch.equal(from_groups(to_groups(values, tile), tile), values)
        assert torch.equal(to_groups(values, tile).sort().values, values.sort().values)


@pytest.mark.parametrize(("fmt", "rule"), [("e4m3fn", "neuron"), ("e5m2", "neuron"), ("e2m1", "floor")])
def test_without_a_rule_fp4_is_rounded_as_the_format_says_and_fp8_as_neuron_does(fmt: str, rule: str) -> None:
    weight = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    found, expected = quantize_moe_down(weight, fmt=fmt), quantize_moe_down(weight, fmt=fmt, rule=rule)
    assert torch.equal(found.scales, expected.scales) and torch.equal(found.words, expected.words)
