"""Block scales: the byte of a block, and exact multiplication and division by 2**(byte - 127).

2**-127, the value of byte 0, is an fp32 denormal, which processors may flush to zero (``torch.set_flush_denormal``).
Nothing here depends on that: factors are normal powers of two, and denormals are built as integers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.checks import VIEW, check_dtype
from hf_neuron_moe.errors import public
from hf_neuron_moe.formats.constants import E8M0_BIAS, E8M0_NAN, SCALE_DTYPES, ElementFormat, ScaleRule

# fp32: 1 sign bit, 8 exponent bits, 23 mantissa bits, bias 127 (IEEE 754 binary32).
MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
MAGNITUDE_MASK = 0x7FFFFFFF
SIGN_MASK = -0x80000000
EXPONENT_ALL_ONES = 255
FP32_NAN_BITS = 0x7FC00000
SMALLEST_NORMAL_EXPONENT = -126
UNIT_EXPONENT = -149  # exponent of the smallest fp32 denormal

DENORMAL_BYTES = 32
"""Blocks with a scale byte below this may involve fp32 denormals.

A denormal input (< 2**-126) divided by 2**(32 - 127) is below 2**-31. The smallest non-zero code of any format times
2**(32 - 127) is at least 2**-111. From 32 on, neither matters.
"""


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent as fp32 for integer exponents in [-126, 127], by writing the exponent field."""
    return ((exponent.to(torch.int32) + E8M0_BIAS) << MANTISSA_BITS).view(torch.float32)


@public
def e8m0_to_float32(scales: Tensor) -> Tensor:
    """Return the fp32 values 2**(byte - 127) of scale bytes, uint8 or float8_e8m0fnu of any shape.

    Byte 0 is the denormal 2**-127, byte 255 is NaN.
    """
    check_dtype(scales, SCALE_DTYPES, "scales", VIEW)
    byte = scales.detach().view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 1 << (MANTISSA_BITS - 1), byte << MANTISSA_BITS)
    return bits.masked_fill_(byte == E8M0_NAN, FP32_NAN_BITS).view(torch.float32)


def scale_bytes(amax_bits: Tensor, fmt: ElementFormat, rule: ScaleRule) -> Tensor:
    """Return the uint8 scale byte of blocks by the rules of :class:`ScaleRule`.

    `amax_bits` are the fp32 bits, as int32 without sign, of every block's largest magnitude: NaN > Inf > finite.
    """
    exponent = amax_bits >> MANTISSA_BITS
    mantissa = amax_bits & MANTISSA_MASK
    if rule is ScaleRule.NEURON:
        byte = exponent - (fmt.emax - 1)
        # E2M1 has no NaN code, so only the scale can carry one.
        poisoned = (exponent == EXPONENT_ALL_ONES) & (mantissa != 0) if fmt.dtype is None else None
    else:
        if rule is ScaleRule.CEIL:
            exponent = exponent + (mantissa > 0)
        elif rule is ScaleRule.RCEIL:
            significand_of_max = fmt.max / 2.0**fmt.emax
            exponent = exponent + (mantissa > int((significand_of_max - 1) * 2**MANTISSA_BITS))
        elif rule is ScaleRule.EVEN:
            exponent = (amax_bits + (1 << (MANTISSA_BITS - fmt.mantissa_bits - 1))) >> MANTISSA_BITS
        byte = exponent - fmt.emax
        poisoned = (amax_bits >> MANTISSA_BITS) == EXPONENT_ALL_ONES
    byte = byte.clamp_(min=0)
    if poisoned is not None:
        byte.masked_fill_(poisoned, E8M0_NAN)
    return byte.to(torch.uint8)


def divide_by_scale_(x: Tensor, byte: Tensor) -> Tensor:
    """Divide fp32 `x`, which may be overwritten and returned, by 2**(byte - 127); 255 yields NaN.

    `byte` is uint8, broadcastable to `x`. The quotient is exact where its magnitude is at least 2**-100 or zero, below
    2**-30 elsewhere; signs are kept.
    """
    first, second = _factors(E8M0_BIAS - byte.to(torch.int32), byte)
    if not _any_below(byte, DENORMAL_BYTES):
        return x.mul_(first).mul_(second)
    bits = x.view(torch.int32)
    sign, magnitude = bits & SIGN_MASK, bits & MAGNITUDE_MASK
    # A denormal's bits are its multiple of 2**-149, so the integer converts to a normal float where the value may not.
    unit = power_of_two((E8M0_BIAS + UNIT_EXPONENT - byte.to(torch.int32)).clamp(min=SMALLEST_NORMAL_EXPONENT))
    unit.masked_fill_(byte == E8M0_NAN, float("nan"))
    from_denormal = (magnitude.to(torch.float32) * unit).view(torch.int32) | sign
    quotient = (x * first * second).view(torch.int32)
    return torch.where(magnitude <= MANTISSA_MASK, from_denormal, quotient).view(torch.float32)


def multiply_by_scale_(values: Tensor, byte: Tensor) -> Tensor:
    """Multiply fp32 values of codes, which may be overwritten and returned, by 2**(byte - 127); 255 yields NaN.

    `byte` is uint8, broadcastable to `values`. The product is exact, denormals too; overflow gives infinity.
    """
    exponent = byte.to(torch.int32) - E8M0_BIAS
    first, second = _factors(exponent, byte)
    if not _any_below(byte, DENORMAL_BYTES):
        return values.mul_(first).mul_(second)
    sign = values.view(torch.int32) & SIGN_MASK
    # The product in multiples of 2**-149 is an integer, and below 2**23 it is the product's bit pattern.
    unit = power_of_two((exponent - UNIT_EXPONENT).clamp(max=E8M0_BIAS)).masked_fill_(byte == E8M0_NAN, float("nan"))
    units = values.abs() * unit
    denormal = units < 2.0**MANTISSA_BITS
    bits = units.clamp(max=2.0**MANTISSA_BITS).nan_to_num(nan=0.0).to(torch.int32) | sign
    product = (values * first * second).view(torch.int32)
    return torch.where(denormal, bits, product).view(torch.float32)


def _factors(exponent: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
    """Split 2**exponent into two normal powers of two (2**-127 is not one); NaN where the byte says so."""
    half = exponent >> 1
    second = power_of_two(exponent - half)
    return power_of_two(half), second.masked_fill_(byte == E8M0_NAN, float("nan"))


def _any_below(byte: Tensor, limit: int) -> bool:
    """Whether any byte is below `limit`. Answers yes where looking would stall an accelerator, or there is no value."""
    return byte.device.type != "cpu" or isinstance(byte, FakeTensor) or bool((byte < limit).any())
