"""Every bf16 value, every code and every scale byte, against a float64 oracle that shares nothing with the library.

The oracle enumerates the formats' values from their bit fields and rounds by searching the nearest one; scale bytes
follow from logarithms of float64 numbers. The library works on fp32 bit patterns and torch casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hf_neuron_moe.formats import (
    ELEMENT_FORMATS,
    dequantize_mx,
    e8m0_to_float32,
    fake_quantize_mx,
    quantize_mx,
    swizzle,
)

RULES = ["neuron", "floor", "ceil", "rceil", "even"]
FORMATS = ["e4m3fn", "e5m2", "e2m1"]
LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
EMAX = {"e4m3fn": 8, "e5m2": 15, "e2m1": 2}
BITS = {"e4m3fn": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def magnitudes(fmt: str) -> np.ndarray:
    """Finite non-negative values of a format, indexed by code."""
    exponent_bits, mantissa_bits, bias = BITS[fmt]
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array([value for value in values if value <= LARGEST[fmt]])


def round_to_code(scaled: np.ndarray, fmt: str) -> np.ndarray:
    """Nearest code, ties to the even code, saturating; NaN is 0x7F (or 0 where the format has none), signs kept."""
    table = magnitudes(fmt)
    magnitude = np.minimum(np.abs(np.nan_to_num(scaled, nan=0.0, posinf=np.inf, neginf=-np.inf)), LARGEST[fmt])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    distance_up, distance_down = table[above] - magnitude, magnitude - table[below]
    up = (distance_up < distance_down) | ((distance_up == distance_down) & (above % 2 == 0))
    code = np.where(up, above, below)
    code = np.where(np.isnan(scaled), 0 if fmt == "e2m1" else 0x7F, code)
    return code + np.signbit(scaled) * (8 if fmt == "e2m1" else 128)


def expected_byte(amax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """Scale byte from the documented formula, in float64 and logarithms."""
    finite = np.where(np.isfinite(amax) & (amax > 0), amax, 1.0)
    floor_log2 = np.frexp(finite)[1] - 1
    emax = EMAX[fmt]
    if rule == "neuron":
        exponent = floor_log2 - (emax - 1)
    elif rule == "floor":
        exponent = floor_log2 - emax
    elif rule == "ceil":
        exponent = floor_log2 + (finite > 2.0**floor_log2) - emax
    elif rule == "rceil":
        exponent = floor_log2 - emax
        exponent = exponent + (finite / 2.0**exponent > LARGEST[fmt])
    else:
        step = 2.0 ** (floor_log2 - BITS[fmt][1])
        exponent = np.frexp(np.floor(finite / step + 0.5) * step)[1] - 1 - emax
    byte = np.maximum(exponent + 127, 0)
    byte = np.where(amax == 0, 0, byte)
    if rule == "neuron":
        byte = np.where(np.isinf(amax), 255 - (emax - 1), byte)
        return np.where(np.isnan(amax), 255 if fmt == "e2m1" else 255 - (emax - 1), byte)
    return np.where(np.isfinite(amax), byte, 255)


def blocks_of(anchor: float) -> torch.Tensor:
    """One block per bf16 value: the value, an anchor that sets the scale, and zeros."""
    blocks = torch.zeros(ALL_BF16.numel(), 32, dtype=torch.bfloat16)
    blocks[:, 5] = ALL_BF16
    blocks[:, 17] = anchor
    return blocks


@contextmanager
def flushed_denormals(active: bool) -> Iterator[None]:
    """Make this thread's arithmetic flush denormals; torch must then compute on this thread only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if active and not torch.set_flush_denormal(True):
        torch.set_num_threads(threads)
        pytest.skip("this processor cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@pytest.mark.sampled(4)
@pytest.mark.thinned(5, 5)
@pytest.mark.parametrize("flush", [False, True], ids=["ieee", "flush-denormals"])
@pytest.mark.parametrize("anchor", [0.0, 1.0, 2.0**-110, 2.0**-115, 2.0**-133])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_all_bf16_values(fmt: str, rule: str, anchor: float, flush: bool) -> None:
    blocks = blocks_of(anchor)
    exact = blocks.double().numpy()
    byte = expected_byte(np.abs(exact).max(axis=1), fmt, rule)
    scaled = exact[:, 5] / 2.0 ** (byte.astype(np.float64) - 127)
    with flushed_denormals(flush):
        quantized = quantize_mx(blocks, fmt=fmt, rule=rule, scheme="1x32")
        values = fake_quantize_mx(blocks, fmt=fmt, rule=rule, scheme="1x32")
    assert np.array_equal(quantized.scales[0].numpy(), byte)

    # Element 5 of 32 consecutive values lies in row 1, lane 1. Blocks that are NaN as a whole have no defined codes.
    codes = quantized.codes.view(8, -1, 4)[1, :, 1].numpy()
    alive = byte < 255
    assert np.array_equal(codes[alive], round_to_code(scaled, fmt)[alive])

    table = magnitudes(fmt)
    sign_bit = 8 if fmt == "e2m1" else 128
    magnitude_code = codes.astype(np.int64) % sign_bit
    decoded = np.where(magnitude_code < len(table), table[np.minimum(magnitude_code, len(table) - 1)], np.nan)
    decoded = np.where(codes >= sign_bit, -decoded, decoded) * 2.0 ** (byte.astype(np.float64) - 127)
    with np.errstate(over="ignore"):
        expected = np.where(alive, decoded, np.nan).astype(np.float32)
    got = values[:, 5].numpy()
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.int32), expected[number].view(np.int32))  # the sign of zero too


@pytest.mark.parametrize("flush", [False, True], ids=["ieee", "flush-denormals"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_with_every_scale_byte(fmt: str, flush: bool) -> None:
    spec = ELEMENT_FORMATS[fmt]
    count = 2**spec.code_bits
    # One quad column per scale byte, one block row per eight codes; all four lanes hold the same code.
    codes = torch.arange(count, dtype=torch.uint8).view(-1, 1).expand(count, 4 * 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).expand(count // 8, 256).contiguous()
    with flushed_denormals(flush):
        got = dequantize_mx(codes, scales, fmt=fmt).view(count, 256, 4).numpy()

    table = magnitudes(fmt)
    half = np.full(count // 2, np.nan)
    half[: len(table)] = table
    if fmt == "e5m2":
        half[0x7C] = np.inf
    element = np.concatenate([half, -half])
    scale = 2.0 ** (np.arange(256, dtype=np.float64) - 127)
    scale[255] = np.nan
    with np.errstate(over="ignore"):
        expected = np.repeat((element[:, None] * scale[None, :]).astype(np.float32)[..., None], 4, axis=2)
    number = ~np.isnan(expected)
    assert np.array_equal(~np.isnan(got), number)
    assert np.array_equal(got[number].view(np.int32), expected[number].view(np.int32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_denormal_values_do_not_depend_on_the_other_blocks(fmt: str) -> None:
    """A tensor without tiny scales takes a shorter path; the border between the two paths must not show."""
    count = 2 ** ELEMENT_FORMATS[fmt].code_bits
    codes = torch.arange(count, dtype=torch.uint8).view(-1, 1).expand(count, 4).contiguous()
    with flushed_denormals(True):
        for byte in range(64):
            scales = torch.full((count // 8, 2), byte, dtype=torch.uint8)
            alone = dequantize_mx(codes, scales[:, :1], fmt=fmt)
            scales[:, 1] = 0
            beside = dequantize_mx(codes.repeat(1, 2), scales, fmt=fmt)[:, :4]
            assert torch.equal(alone.contiguous().view(torch.int32), beside.contiguous().view(torch.int32)), byte


def test_every_scale_byte_equals_torch_e8m0() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    got = e8m0_to_float32(byte)
    expected = byte.view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(got[:255].view(torch.int32), expected[:255].view(torch.int32))
    assert got[0].view(torch.int32) == 1 << 22  # the denormal 2**-127
    assert torch.isnan(got[255])
    assert torch.equal(e8m0_to_float32(byte.view(torch.float8_e8m0fnu))[:255], got[:255])


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_codes_are_the_bytes_of_torch_fp8(fmt: str) -> None:
    weight = torch.randn(16, 128)
    quantized = quantize_mx(weight, fmt=fmt)
    dtype = ELEMENT_FORMATS[fmt].dtype
    assert dtype is not None
    as_fp8 = quantized.codes.view(dtype)
    scale = e8m0_to_float32(quantized.scales).repeat_interleave(8, dim=0).repeat_interleave(4, dim=1)
    assert torch.equal(dequantize_mx(as_fp8, quantized.scales, fmt=fmt), as_fp8.to(torch.float32) * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wider_inputs_round_once(dtype: torch.dtype) -> None:
    """The product x / scale is exact, so fp32 and fp16 inputs see one rounding, to the element format."""
    weight = (torch.randn(64, 32) * torch.exp2(torch.randint(-12, 12, (64, 32)))).to(dtype)
    exact = weight.double().numpy()
    byte = expected_byte(np.abs(exact).max(axis=1), "e4m3fn", "neuron")
    codes = round_to_code(exact / 2.0 ** (byte[:, None].astype(np.float64) - 127), "e4m3fn")
    quantized = quantize_mx(weight)
    assert np.array_equal(quantized.scales[0].numpy(), byte)
    assert torch.equal(quantized.codes, swizzle(torch.from_numpy(codes.astype(np.uint8))))
