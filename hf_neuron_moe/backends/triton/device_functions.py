"""What the Triton kernels compute element by element: bf16 and e4m3 rounding, MX block order, expert of a tile.

Every rounding is done on bits. Triton's interpreter truncates fp32 where it casts to bf16, and loses the carry where it
casts to e4m3; bits are the same there and on a device. bf16 tensors therefore arrive as int16.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter; read once, when this file is imported."""

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
CODE_NAN = tl.constexpr(0x7F)
CODE_MAX = tl.constexpr(0x7E)  # 448


@triton.jit
def bits_of(x):
    """Return the bits of fp32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def to_fp32(x):
    """Return fp32 values of fp32 or of the bits of bf16."""
    if x.dtype == tl.int16:
        value = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def round_bf16(x):
    """Return fp32 `x` rounded to bf16, to nearest even, as fp32."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, bits | 0x400000, rounded).to(tl.float32, bitcast=True)


@triton.jit
def store(pointers, x, mask):
    """Store fp32 values as fp32, or rounded as the bits of bf16."""
    if pointers.dtype.element_ty == tl.int16:
        tl.store(pointers, (bits_of(round_bf16(x)) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def e4m3_codes(x, byte):
    """Return the e4m3 codes of fp32 ``x / 2**(byte - 127)`` as int32: nearest even, saturating, NaN stays NaN."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    field = magnitude >> 23
    # A denormal's bits are its multiple of 2**-149, so the integer converts to a normal float.
    normal = tl.where(field == 0, bits_of(magnitude.to(tl.float32)), magnitude)
    exponent = tl.where(field == 0, (normal >> 23) - 149, field) - byte
    significand = (normal & 0x7FFFFF) | 0x800000
    kept = tl.maximum(exponent, -6)  # subnormal codes have the step of the smallest normal binade
    shift = tl.minimum(20 + kept - exponent, 26)
    half = (significand * 0 + 1) << (shift - 1)
    steps = (significand + half - 1 + ((significand >> shift) & 1)) >> shift
    code = tl.minimum((kept + 6) * 8 + steps, CODE_MAX)
    code = tl.where(magnitude == INFINITY, CODE_MAX, code)
    return tl.where(magnitude > INFINITY, CODE_NAN, code) | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_values(code):
    """Return the fp32 values of e4m3 codes, int32."""
    field, mantissa = (code >> 3) & 15, code & 7
    normal = (((field + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(field == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((code & CODE_NAN) == CODE_NAN, float("nan"), value)
    return (bits_of(value) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)  # zeros have a sign too


@triton.jit
def scaled(value, byte):
    """Return ``value * 2**(byte - 127)``, exact for values of codes: two factors, as 2**-127 is a denormal."""
    half = (byte - 127) >> 1
    first, second = (half + 127) << 23, (byte - half) << 23
    return value * first.to(tl.float32, bitcast=True) * second.to(tl.float32, bitcast=True)


@triton.jit
def natural_position(q, SIZE: tl.constexpr, SINGLE: tl.constexpr):
    """Return where the value at place `q` of the hardware's order lies on a contraction axis of `SIZE`.

    Hardware order is block after block: 32 values, lane after lane, 8 neighbours in each
    (``formats/swizzle.py`` has the tiles). `SINGLE` makes one tile of what is left after the tiles of 512.
    """
    FULL: tl.constexpr = SIZE // 512 * 512
    REST: tl.constexpr = SIZE - FULL
    first = tl.where(q < FULL, q // 512 * 512, FULL)
    lane = tl.where(q < FULL, 128, REST // 4)
    if REST == 384 and not SINGLE:
        first = tl.where(q >= FULL + 256, FULL + 256, first)
        lane = tl.where(q >= FULL + 256, 32, tl.where(q < FULL, 128, 64))
    within = q - first
    return first + within % 32 // 8 * lane + within // 32 * 8 + within % 8


@triton.jit
def group_of_tile(ends, tile, R, E, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Return the group of a tile of `SIZE` rows, the tile's first row and the group's end row.

    `ends` [E] int32 has the groups' end rows. Group E is the rows after the last end; for E + 1 there is no such tile,
    and it has no rows. `GROUPS` is a power of two above E. No tile has rows of two groups.
    """
    e = tl.arange(0, GROUPS)
    end_e = tl.load(ends + e, mask=e < E, other=R)
    start_e = tl.where(e > E, R, tl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0))
    tiles_e = (end_e - start_e + SIZE - 1) // SIZE
    after_e = tl.cumsum(tiles_e, 0)
    group = tl.minimum(tl.sum((after_e <= tile).to(tl.int32), 0), E + 1)
    here = e == group
    first = tl.sum(tl.where(here, start_e + (tile - after_e + tiles_e) * SIZE, 0), 0)
    return group, first, tl.sum(tl.where(here, end_e, 0), 0)
