"""The fast MX rounding equals the byte-exact one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_, fake_quantize_tile_
from hf_neuron_moe.formats.mx import fake_quantize_mx


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality with NaN equal to NaN and signed zeros equal (a rounded -0 may come out as +0)."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.integers(1, 9),
    other=st.integers(1, 20),
    axis=st.sampled_from([0, 1]),
    spread=st.sampled_from([0.0, 4.0, 20.0]),
    shift=st.sampled_from([-30.0, 0.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_exact_path(tiles: int, other: int, axis: int, spread: float, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (128 * tiles, other) if axis == 0 else (other, 128 * tiles)
    values = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randn(shape, generator=generator) * spread + shift
    )
    values[torch.rand(shape, generator=generator) < 0.1] = 0.0
    values = values.bfloat16().float()
    assert equal_bits(fake_quantize_(values.clone(), axis), fake_quantize_mx(values, axis=axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 3e38, 1e-35, 1e-40, 0.0])
def test_special_values_take_the_exact_path(axis: int, special: float) -> None:
    values = torch.randn(640, 640)
    values[7, 300] = special
    assert equal_bits(fake_quantize_(values.clone(), axis), fake_quantize_mx(values, axis=axis))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_exponent_is_rounded_as_exactly(dtype: torch.dtype) -> None:
    mantissas = torch.linspace(1.0, 2.0, 129, dtype=torch.float64)[:128] * torch.exp2(-(torch.arange(128.0) % 19))
    for exponent in range(-126, 127):
        values = (mantissas.double() * 2.0**exponent).to(dtype)[None]
        assert equal_bits(fake_quantize_(values.clone(), 1), fake_quantize_mx(values, axis=1)), exponent


def test_blocks_of_nothing_but_denormals() -> None:
    values = torch.full((2, 128), 3.4e-41)
    values[1, 5] = 0.0
    assert equal_bits(fake_quantize_(values.clone(), 1), fake_quantize_mx(values, axis=1))
    assert not torch.equal(fake_quantize_mx(values, axis=1), values), "denormals are rounded, not passed through"


def test_a_block_of_nothing_but_tiny_values() -> None:
    values = torch.full((1, 128), 2.0**-125)
    assert equal_bits(fake_quantize_(values.clone(), 1), fake_quantize_mx(values, axis=1))


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_the_first_lanes_of_a_tile_are_rounded_as_with_zeros_behind(lanes: int) -> None:
    values = torch.zeros(128, 20)
    values[: 32 * lanes] = torch.randn(32 * lanes, 20, generator=torch.Generator().manual_seed(lanes))
    expected, part = fake_quantize_mx(values, axis=0)[: 32 * lanes], values[: 32 * lanes].clone()
    scratch = torch.empty(part.numel(), dtype=torch.int32)
    assert equal_bits(fake_quantize_tile_(part, 0, 32, scratch), expected)


def test_blocks_of_zeros_do_not_hide_tiny_ones() -> None:
    tiny = torch.linspace(1.0, 2.0, 128) * torch.exp2(-120 - torch.arange(128.0) % 19)
    values = torch.stack([torch.zeros(128), tiny])
    assert equal_bits(fake_quantize_(values.clone(), 1), fake_quantize_mx(values, axis=1))


@pytest.mark.parametrize("scheme", ["wrapX", "wrapX_single"])
def test_lone_384(scheme: str) -> None:
    values = torch.randn(3, 384) * torch.exp2(torch.arange(384) % 17 - 8)
    assert equal_bits(fake_quantize_(values.clone(), 1, scheme=scheme), fake_quantize_mx(values, scheme=scheme))


def test_the_two_groupings_of_384_differ() -> None:
    values = torch.randn(3, 384) * torch.exp2(torch.arange(384) % 17 - 8)
    one, other = (fake_quantize_(values.clone(), 1, scheme=scheme) for scheme in ("wrapX", "wrapX_single"))
    assert not torch.equal(one, other)


def test_works_on_a_column_slice() -> None:
    values = torch.randn(5, 512)
    whole = values.clone()
    fake_quantize_(whole[:, 128:384], 1)
    assert torch.equal(whole[:, 128:384], fake_quantize_mx(values[:, 128:384]))
    assert torch.equal(whole[:, :128], values[:, :128]) and torch.equal(whole[:, 384:], values[:, 384:])
