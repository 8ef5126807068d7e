"""Element codes: scaled fp32 values to bytes and back, rounded to nearest or, for FP8, stochastically."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.checks import check_dtype, check_flags, check_multiple
from hf_neuron_moe.errors import ConfigError, DeviceError
from hf_neuron_moe.formats.constants import E4M3FN, MX_BLOCK, ElementFormat
from hf_neuron_moe.formats.e8m0 import MAGNITUDE_MASK, MANTISSA_BITS

# IEEE 754 binary16.
HALF_MANTISSA_BITS = 10
HALF_BIAS = 15
_HALF_FIELDS = {"e4m3fn": ~0x4000, "e5m2": -1}
"""Bits of an fp16 number that a format's code can set; E5M2 has all of fp16's exponent."""


def encode_(scaled: Tensor, fmt: ElementFormat) -> Tensor:
    """Round fp32 values, overwriting them, to uint8 codes: clip to the largest finite value, nearest, ties to even.

    NaN stays NaN in the fp8 formats and becomes code 0 in E2M1, whose callers put the NaN in the block's scale. E2M1
    codes are 0 to 15.
    """
    if fmt.dtype is not None:
        return round_to_fp8_(scaled, fmt).view(torch.uint8)
    sign = torch.signbit(scaled).to(torch.uint8) << (fmt.code_bits - 1)
    magnitude = scaled.clamp_(-fmt.max, fmt.max).nan_to_num_(nan=0.0).abs_()
    # Steps are 1/2 below 2, 1 below 4 and 2 above, and torch.round is to even: equal to even codes in each range.
    upper = torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round_() + 4)
    code = torch.where(magnitude < 2, (magnitude * 2).round_(), upper)
    return code.to(torch.uint8) | sign


def round_to_fp8_(
    scaled: Tensor, fmt: ElementFormat, *, stochastic: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    """Round fp32 values, overwriting them, to FP8 of ``fmt.dtype``: nearest with ties to even, or `stochastic`.

    Magnitudes beyond the largest finite code saturate and NaN stays NaN. The generator is on the device of `scaled`.
    """
    assert fmt.dtype is not None
    # torch's e5m2 cast overflows to infinity and older e4m3 casts to NaN: the clip makes both saturate.
    clipped = scaled.clamp_(-fmt.max, fmt.max)
    if stochastic:
        clipped = _to_grid_stochastic(clipped, fmt, generator)
    return clipped.to(fmt.dtype)


def _to_grid_stochastic(values: Tensor, fmt: ElementFormat, generator: torch.Generator | None) -> Tensor:
    """Move finite values within the format's range to one of their two neighbours on its grid; NaN stays NaN.

    The probability of the upper one is the distance from the lower one, so that the expectation is the value itself. A
    random number below one FP8 step is added to the fp32 bits, then everything below it is cut off.
    """
    step_bits = MANTISSA_BITS - fmt.mantissa_bits
    smallest_normal = 2.0 ** (1 - fmt.bias)
    noise = torch.randint(0, 1 << step_bits, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    magnitude = values.abs()
    # The grid below the smallest normal is that of the binade above it, shifted down: shift there and back.
    shift = torch.where(magnitude < smallest_normal, smallest_normal, 0.0)
    bits = (magnitude + shift).view(torch.int32) & MAGNITUDE_MASK
    bits = bits.add_(noise).bitwise_and_(-(1 << step_bits))
    rounded = torch.copysign(bits.view(torch.float32) - shift, values)
    return torch.where(values.isnan(), values, rounded)


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the exact fp32 values of uint8 codes, contiguous, also NaN and infinity; E2M1 reads the low four bits."""
    if codes.device.type == "cpu" and not isinstance(codes, FakeTensor):
        return _decode_through_half(codes, fmt)
    return decode_by_table(codes, fmt)


def decode_by_table(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode with one gather from a small table: nothing looks at values, which would stall an accelerator."""
    index = codes & 0xF if fmt.dtype is None else codes
    without_values = isinstance(codes, FakeTensor)
    table = _every_value(fmt, codes.device) if without_values else decode_table(fmt, codes.device)
    return table.index_select(0, index.flatten().to(torch.int32)).view(codes.shape)


def _decode_through_half(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode by moving a code's fields into the wider ones of fp16, which processors convert ten times faster.

    Denormals included; only the bias differs.
    """
    shift = HALF_MANTISSA_BITS - fmt.mantissa_bits
    signed = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    if fmt.dtype is None:
        half = (signed & 0x7).mul_(1 << shift).add_((signed & 0x8).mul_(-0x1000))
    else:
        # The sign-extended byte, moved up, repeats the sign where fp16 has further exponent bits.
        half = signed.mul_(1 << shift).bitwise_and_(_HALF_FIELDS[fmt.name])
    values = half.view(torch.float16).to(torch.float32)
    if fmt.bias != HALF_BIAS:
        values.mul_(2.0 ** (HALF_BIAS - fmt.bias))
    if fmt is E4M3FN and values.numel():
        # Codes 0x7F and 0xFF are NaN, and would be 480.
        low, high = torch.aminmax(values)
        if max(-float(low), float(high)) > fmt.max:
            values.masked_fill_(values.abs() > fmt.max, float("nan"))
    return values


@lru_cache(maxsize=16)
def decode_table(fmt: ElementFormat, device: torch.device) -> Tensor:
    """Return the fp32 value of every code of a format, ``[2**code_bits]``. Shared: do not write to it."""
    return _every_value(fmt, device)


def _every_value(fmt: ElementFormat, device: torch.device) -> Tensor:
    if fmt.dtype is None:  # made on the device: a copy from the host could not be part of a CUDA graph
        return _decode_through_half(torch.arange(16, dtype=torch.uint8, device=device), fmt)
    return torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype).to(torch.float32)


def codes_as_bytes(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return a uint8 view of uint8 codes or of `fmt`'s fp8 dtype; the bytes of another fp8 dtype would be misread."""
    fix = f"Name the format of the codes (here {fmt.name}), or view plain bytes with .view({{}})."
    check_dtype(codes, (torch.uint8,) if fmt.dtype is None else (torch.uint8, fmt.dtype), "codes", fix)
    return codes.detach().view(torch.uint8)


def check_contraction(size: int, argument: str = "K") -> None:
    """Raise ShapeError for a contraction size that does not consist of whole MX blocks."""
    fix = "Zero-pad the contraction axis of both operands; zero padding does not change the product."
    check_multiple(size, MX_BLOCK, argument, remedy=fix)


def check_randomness(stochastic: object, generator: object, device: torch.device, *, argument: str = "x") -> None:
    """Check what callers pass on to :func:`round_to_fp8_`, for values on `device` that they call `argument`."""
    check_flags({"stochastic": stochastic})
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        fix = "Build it with torch.Generator(device).manual_seed(seed)."
        raise ConfigError.about("generator", "a torch.Generator or None", type(generator).__name__, fix)
    if generator.device.type != device.type:
        fix = f"Build it with torch.Generator({device.type!r})."
        raise DeviceError.about("generator", f"on {device.type} like {argument}", generator.device, fix)
