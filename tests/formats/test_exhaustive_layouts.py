"""All bf16 values at once through every layout, every layout undone on any legal size, FP8 codes with every scale.

The oracle here is plain: it gathers blocks by the documented index map and knows the formats only as sorted lists of
values.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.formats import (
    E4M3FN,
    E5M2,
    ELEMENT_FORMATS,
    ElementFormat,
    dequantize_moe_down,
    dequantize_moe_gate_up,
    dequantize_mx,
    fake_quantize_mx,
    group_dequantize_fp8,
    group_quantize_fp8,
    k_map,
    moe_bias_from_lanes,
    moe_bias_to_lanes,
    pack_x4,
    quantize_moe_down,
    quantize_moe_gate_up,
    quantize_mx,
    swizzle,
    to_compact,
    to_oversized,
    to_packed,
    unpack_x4,
    unswizzle,
)
from hf_neuron_moe.formats.elements import round_to_fp8_

SCHEMES = ["wrapX", "wrapX_single", "one_tile", "1x32"]
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
LEGAL_K = st.one_of(st.sampled_from([32, 96, 160, 384, 544, 576, 896]), st.integers(1, 70).map(lambda n: 32 * n))


def values_of(fmt: ElementFormat) -> torch.Tensor:
    """Finite magnitudes of a format by code, float64."""
    rows = []
    for code in range(2 ** (fmt.exponent_bits + fmt.mantissa_bits)):
        exponent, mantissa = divmod(code, 2**fmt.mantissa_bits)
        fraction = mantissa / 2**fmt.mantissa_bits
        rows.append((1 + fraction) * 2.0 ** (exponent - fmt.bias) if exponent else fraction * 2.0 ** (1 - fmt.bias))
    table = torch.tensor(rows, dtype=torch.float64)
    return table[table <= fmt.max]


def nearest(values: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Nearest value of the format, ties to the even code, saturating; NaN stays NaN."""
    table = values_of(fmt)
    magnitude = values.abs().clamp(max=fmt.max).nan_to_num(0.0)
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.where(values.isnan(), values, torch.copysign(table[code], values))


def shuffled(K: int) -> torch.Tensor:
    """Every bf16 value once, as ``[65536/K, K]``: tiny, huge, infinite and NaN values share blocks at random."""
    order = torch.randperm(ALL_BF16.numel(), generator=torch.Generator().manual_seed(K))
    return ALL_BF16[order].view(-1, K)


def blocks_by_the_map(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks ``[F, K/32, 32]`` of ``[F, K]`` and the K index of each element: 8 rows of the K map, 4 lanes."""
    index = k_map(weight.shape[1], scheme).view(-1, 32)
    return weight[:, index], index


@pytest.mark.parametrize("rule", ["neuron", "floor"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("K", [512, 1024])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1"])
def test_all_bf16_values_in_shared_blocks(fmt: str, K: int, scheme: str, rule: str) -> None:
    weight, spec = shuffled(K), ELEMENT_FORMATS[fmt]
    blocks, index = blocks_by_the_map(weight, scheme)
    exponent = (blocks.view(torch.int16).int() >> 7 & 0xFF).amax(-1)
    byte = (exponent - spec.emax + (rule == "neuron")).clamp(min=0)
    has_nan = blocks.isnan().any(-1)
    if rule == "floor":
        byte[has_nan | blocks.isinf().any(-1)] = 255
    elif fmt == "e2m1":
        byte[has_nan] = 255
    quantized = quantize_mx(weight, fmt=fmt, rule=rule, scheme=scheme)
    assert torch.equal(quantized.scales.t().int(), byte)

    scale = torch.exp2(byte.double() - 127).unsqueeze(-1)
    scale = torch.where(byte.unsqueeze(-1) == 255, float("nan"), scale)
    expected = (nearest(blocks.double() / scale, spec) * scale).float()
    got = fake_quantize_mx(weight, fmt=fmt, rule=rule, scheme=scheme)[:, index]
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(got[number].view(torch.int32), expected[number].view(torch.int32))
    swizzled = dequantize_mx(quantized.codes, quantized.scales, fmt=fmt)
    natural = unswizzle(swizzled, scheme)[:, index]
    assert torch.equal(natural.nan_to_num(nan=123.0), got.nan_to_num(nan=123.0))


@given(K=LEGAL_K, F=st.integers(1, 4), scheme=st.sampled_from(SCHEMES), fmt=st.sampled_from(list(ELEMENT_FORMATS)))
def test_the_whole_chain_of_layouts_is_undone(K: int, F: int, scheme: str, fmt: str) -> None:
    """Quantize, swizzle, pack words, expand scales, and all of it backward: the fake-quantized values."""
    weight = torch.randn(F, K, generator=torch.Generator().manual_seed(K + F)).to(torch.bfloat16)
    quantized = quantize_mx(weight, fmt=fmt, scheme=scheme)
    codes = unpack_x4(pack_x4(quantized.codes, fmt), fmt)
    expected = fake_quantize_mx(weight, fmt=fmt, scheme=scheme)
    for expand in (to_oversized, to_packed):
        scales = to_compact(expand(quantized.scales), K)
        assert torch.equal(unswizzle(dequantize_mx(codes, scales, fmt=fmt), scheme), expected)
    assert torch.equal(swizzle(unswizzle(quantized.codes, scheme), scheme), quantized.codes)
    # Values on the grid keep their codes: quantizing again changes nothing. (Only FLOOR picks the same scale again.)
    once = fake_quantize_mx(weight, fmt=fmt, rule="floor", scheme=scheme)
    assert torch.equal(fake_quantize_mx(once, fmt=fmt, rule="floor", scheme=scheme), once)


@given(
    E=st.integers(1, 3),
    tiles=st.integers(1, 3),
    inter=st.one_of(st.sampled_from([32, 96, 512, 544]), st.integers(1, 40).map(lambda n: 32 * n)),
    fmt=st.sampled_from(list(ELEMENT_FORMATS)),
    H=st.integers(1, 5),
)
def test_expert_weight_layouts_are_undone(E: int, tiles: int, inter: int, fmt: str, H: int) -> None:
    generator = torch.Generator().manual_seed(inter)
    gate_up_EH2I = torch.randn(E, 512 * tiles, 2, 3, generator=generator)
    got = dequantize_moe_gate_up(quantize_moe_gate_up(gate_up_EH2I, fmt=fmt))
    rule = "floor" if fmt == "e2m1" else "neuron"
    assert torch.equal(got, fake_quantize_mx(gate_up_EH2I, 1, fmt=fmt, rule=rule, scheme="one_tile"))
    down_EIH = torch.randn(E, inter, H, generator=generator)
    got = dequantize_moe_down(quantize_moe_down(down_EIH, fmt=fmt))
    padded = torch.zeros(E, got.shape[1], H)
    padded[:, :inter] = down_EIH
    assert torch.equal(got, fake_quantize_mx(padded, 1, fmt=fmt, rule=rule, scheme="wrapX_single"))
    bias_E2I = torch.randn(E, 2, inter, generator=generator)
    back = moe_bias_from_lanes(moe_bias_to_lanes(bias_E2I))
    assert torch.equal(back[..., :inter], bias_E2I)
    assert not back[..., inter:].any()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
def test_rounding_of_all_bf16_values(fmt: ElementFormat) -> None:
    got = round_to_fp8_(ALL_BF16.float(), fmt).double()
    expected = nearest(ALL_BF16.double(), fmt)
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(got[number].view(torch.int64), expected[number].view(torch.int64))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_of_all_bf16_values(fmt: ElementFormat) -> None:
    """Never further than the two neighbours; NaN stays NaN; everything beyond the range saturates."""
    table = torch.cat([-values_of(fmt).flip(0), values_of(fmt)[1:]])
    exact = ALL_BF16.double()
    clipped = exact.clamp(-fmt.max, fmt.max)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        got = round_to_fp8_(ALL_BF16.float(), fmt, stochastic=True, generator=generator).double()
        assert torch.equal(got.isnan(), exact.isnan())
        number = ~exact.isnan()
        place = torch.searchsorted(table, clipped[number])
        high = table[place.clamp(max=len(table) - 1)]
        low = table[(place - 1).clamp(min=0)]
        on_grid = high == clipped[number]
        assert torch.equal(got[number][on_grid], high[on_grid])
        assert ((got[number] == low) | (got[number] == high)).all()


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_all_bf16_values_in_groups(fp8: str) -> None:
    fmt = E4M3FN if fp8 == "e4m3" else E5M2
    groups = shuffled(16).view(-1, 16)
    codes, scales = group_quantize_fp8(groups, 16, fp8)
    amax = groups.float().abs().amax(-1)  # amax of a group with NaN is NaN
    expected = ((amax + 1e-10) / fmt.max).to(torch.bfloat16)
    assert torch.equal(scales.flatten().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    alive = groups.isfinite().all(-1)
    assert 0 < int(alive.sum()) < len(groups)
    quotient = groups[alive].float() / scales[alive].float()
    assert torch.equal(codes[alive].double(), nearest(quotient.double(), fmt))
    assert group_dequantize_fp8(codes, scales)[~alive].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_code_with_every_positive_bf16_scale(dtype: torch.dtype) -> None:
    scales = ALL_BF16[ALL_BF16.float() > 0].view(-1, 1)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    exact = codes.double() * scales.double()
    got = group_dequantize_fp8(codes.view(torch.uint8).expand(len(scales), 256).contiguous().view(dtype), scales)
    expected = exact.float()
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(got[number].view(torch.int32), expected[number].view(torch.int32))
