"""The K map, its inverse, and x4 words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats import (
    fake_quantize_mx,
    k_map,
    pack_x4,
    quantize_mx,
    quantize_mx_swizzled,
    swizzle,
    tile_segments,
    unpack_x4,
    unswizzle,
)
from tests.refusals import refused

SCHEMES = ["wrapX", "wrapX_single", "one_tile", "1x32"]
LEGAL_K = st.one_of(st.sampled_from([32, 96, 160, 384, 544, 576, 896]), st.integers(1, 70).map(lambda n: 32 * n))


def tiles_by_the_rule(K: int) -> list[int]:
    """The remainder rule, one tile at a time."""
    tiles = []
    while K:
        if K >= 512:
            tile = 512
        elif K % 128:
            tile = K
        else:
            tile = 256 if K >= 256 else 128
        tiles.append(tile)
        K -= tile
    return tiles


def map_by_the_formula(tiles: list[int]) -> list[list[int]]:
    """Z[k0/4 + p, j] = k0 + j*s + p, element by element."""
    rows, k0 = [], 0
    for tile in tiles:
        stride = tile // 4
        rows += [[k0 + j * stride + p for j in range(4)] for p in range(stride)]
        k0 += tile
    return rows


@given(K=LEGAL_K)
def test_k_map_equals_the_formula(K: int) -> None:
    assert k_map(K).tolist() == map_by_the_formula(tiles_by_the_rule(K))
    assert k_map(K, "one_tile").tolist() == map_by_the_formula([K])
    whole = [512] * (K // 512) + ([K % 512] if K % 512 else [])
    assert k_map(K, "wrapX_single").tolist() == map_by_the_formula(whole)
    assert k_map(K, "1x32").tolist() == [[4 * p + c for c in range(4)] for p in range(K // 4)]


@given(K=LEGAL_K, F=st.integers(1, 5), scheme=st.sampled_from(SCHEMES), seed=st.integers(0, 99))
def test_swizzle_and_unswizzle_are_inverse(K: int, F: int, scheme: str, seed: int) -> None:
    weight = torch.randint(-(2**15), 2**15, (F, K), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    swizzled = swizzle(weight, scheme)
    assert swizzled.shape == (K // 4, 4 * F)
    assert torch.equal(unswizzle(swizzled, scheme), weight)
    assert torch.equal(swizzled.view(-1, F, 4), weight.t()[k_map(K, scheme)].transpose(1, 2))
    other_way = torch.arange(4 * F * (K // 4)).view(K // 4, 4 * F)
    assert torch.equal(swizzle(unswizzle(other_way, scheme), scheme), other_way)


@given(K=LEGAL_K, F=st.integers(1, 4), scheme=st.sampled_from(SCHEMES), fmt=st.sampled_from(["e4m3fn", "e5m2", "e2m1"]))
def test_quantizing_before_or_after_the_swizzle_is_the_same(K: int, F: int, scheme: str, fmt: str) -> None:
    weight = torch.randn(F, K, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(K))
    before, after = quantize_mx(weight, fmt=fmt, scheme=scheme), quantize_mx_swizzled(swizzle(weight, scheme), fmt=fmt)
    assert torch.equal(before.codes, after.codes)
    assert torch.equal(before.scales, after.scales)


def test_documented_rows() -> None:
    rows = k_map(512)
    assert rows[0].tolist() == [0, 128, 256, 384]
    assert rows[1].tolist() == [1, 129, 257, 385]
    assert rows[127].tolist() == [127, 255, 383, 511]
    expected = [*range(8, 16), *range(136, 144), *range(264, 272), *range(392, 400)]
    assert sorted(rows[8:16].flatten().tolist()) == expected  # MX block 1
    rows = k_map(128)
    assert rows[0].tolist() == [0, 32, 64, 96]
    assert sorted(rows[:8].flatten().tolist()) == [*range(8), *range(32, 40), *range(64, 72), *range(96, 104)]


def test_documented_tiny_operand() -> None:
    weight = torch.arange(256).view(2, 128)
    assert swizzle(weight)[0].tolist() == [0, 32, 64, 96, 128, 160, 192, 224]


@pytest.mark.parametrize(
    ("K", "scheme", "segments"),
    [
        (384, "wrapX", [(0, 256, 1), (256, 128, 1)]),
        (384, "wrapX_single", [(0, 384, 1)]),
        (896, "wrapX", [(0, 512, 1), (512, 256, 1), (768, 128, 1)]),
        (896, "wrapX_single", [(0, 512, 1), (512, 384, 1)]),
        (256, "wrapX_single", [(0, 256, 1)]),
        (544, "wrapX", [(0, 512, 1), (512, 32, 1)]),
        (576, "wrapX", [(0, 512, 1), (512, 64, 1)]),
        (96, "wrapX", [(0, 96, 1)]),
        (480, "wrapX", [(0, 480, 1)]),
        (2048, "wrapX", [(0, 512, 4)]),
        (2048, "one_tile", [(0, 2048, 1)]),
    ],
)
def test_tile_segments(K: int, scheme: str, segments: list[tuple[int, int, int]]) -> None:
    assert [tuple(segment) for segment in tile_segments(K, scheme)] == segments


def test_384_groups_differ_between_the_two_maps_and_nothing_else_below_512_does() -> None:
    assert not torch.equal(k_map(384), k_map(384, "wrapX_single"))
    for K in (32, 64, 96, 128, 160, 256, 480, 512):
        assert torch.equal(k_map(K), k_map(K, "wrapX_single"))
    # Mixing the two in one product pairs the wrong K values: that is the hazard the schemes name.
    x, w = torch.randn(8, 384), torch.randn(8, 384)
    exact = x @ w.t()
    same = unswizzle(swizzle(x), "wrapX") @ unswizzle(swizzle(w), "wrapX").t()
    mixed = unswizzle(swizzle(x), "wrapX_single") @ w.t()
    assert torch.equal(same, exact)
    assert float((mixed - exact).norm() / exact.norm()) > 0.5
    # Each by itself only moves block boundaries: other values are flushed, at the same error level.
    x = x * torch.exp2(6 * torch.randn(8, 384))
    host, kernel = fake_quantize_mx(x), fake_quantize_mx(x, scheme="wrapX_single")
    assert not torch.equal(host, kernel)
    assert float((host - x).norm() / x.norm()) == pytest.approx(float((kernel - x).norm() / x.norm()), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_swizzle_moves_any_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 160).to(dtype)
    moved = unswizzle(swizzle(weight))
    assert moved.dtype == dtype
    assert torch.equal(moved.view(torch.uint8), weight.view(torch.uint8))


def test_strided_operands_are_read_correctly() -> None:
    base = torch.randn(1184, 7)
    weight = base.t()[1:6, 32:1120]
    assert torch.equal(swizzle(weight), swizzle(weight.contiguous()))
    strided, packed = quantize_mx(weight), quantize_mx(weight.contiguous())
    assert torch.equal(strided.codes, packed.codes)
    assert torch.equal(strided.scales, packed.scales)


def test_x4_words_of_the_documentation() -> None:
    fp8 = torch.tensor([[0x11, 0x22, 0x33, 0x44]], dtype=torch.uint8)
    assert pack_x4(fp8).tolist() == [[0x44332211]]
    fp4 = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert pack_x4(fp4, "e2m1").tolist() == [[0x4321]]


@given(seed=st.integers(0, 999), fmt=st.sampled_from(["e4m3fn", "e5m2", "e2m1"]), F=st.integers(1, 9))
def test_x4_packing_is_inverse(seed: int, fmt: str, F: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16 if fmt == "e2m1" else 256, (8, 4 * F), generator=generator, dtype=torch.uint8)
    words = pack_x4(codes, fmt)
    assert words.shape == (8, F)
    assert words.dtype == (torch.int16 if fmt == "e2m1" else torch.int32)
    assert torch.equal(unpack_x4(words, fmt), codes)
    unsigned = words.view(torch.uint16 if fmt == "e2m1" else torch.uint32)
    assert torch.equal(unpack_x4(unsigned, fmt), codes)
    assert torch.equal(pack_x4(codes.repeat(1, 2)[:, : 4 * F], fmt), words)  # strided rows


def test_fp8_words_share_storage_with_the_codes() -> None:
    codes = torch.zeros(8, 16, dtype=torch.uint8)
    words = pack_x4(codes)
    codes[0, 0] = 1
    assert int(words[0, 0]) == 1
    assert pack_x4(codes.view(torch.float8_e4m3fn)).data_ptr() == codes.data_ptr()


def test_refusals() -> None:
    with refused(ShapeError, "weight_FK's last axis K"):
        swizzle(torch.zeros(2, 48))
    with refused(ShapeError, "weight_FK", got="[64]"):
        swizzle(torch.zeros(64))
    with refused(ShapeError, "swizzled_P4F.shape[0] (K/4)"):
        unswizzle(torch.zeros(12, 8))
    with refused(ShapeError, "swizzled_P4F.shape[1] (4F)"):
        unswizzle(torch.zeros(8, 6))
    with refused(ConfigError, "scheme", "Did you mean 'wrapX'"):
        k_map(128, "wrapx")
    with refused(ShapeError, "K", got="0"):
        k_map(0)
    with refused(DTypeError, "codes", got="float32"):
        pack_x4(torch.zeros(8, 4))
    with refused(DTypeError, "codes", got="float8_e5m2"):
        pack_x4(torch.zeros(8, 4, dtype=torch.uint8).view(torch.float8_e5m2))
    with refused(ShapeError, "codes.shape[-1]", got="6"):
        pack_x4(torch.zeros(8, 6, dtype=torch.uint8))
    with refused(ShapeError, "codes", got="a code of 16"):
        pack_x4(torch.full((8, 4), 16, dtype=torch.uint8), "e2m1")
    with refused(DTypeError, "words"):
        unpack_x4(torch.zeros(8, 4, dtype=torch.int64))
    for size in ("32", 32.0, True):
        with refused(ShapeError, "K", got=repr(size)):
            k_map(size)  # type: ignore[arg-type]
