"""Activations, limits and softcaps in Triton, fp32: the rows of ``backends/torch/gating.py`` with their derivatives.

Also the FP8 groups of ``backends/torch/saved.py``: codes and bf16 scales of 64 columns of a row.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import triton
import triton.language as tl

from hf_neuron_moe.backends.triton.device_functions import (
    CODE_NAN,
    MAGNITUDE,
    bits_of,
    e4m3_codes,
    e4m3_values,
    round_bf16,
    to_fp32,
)

GROUP = tl.constexpr(64)  # columns that share a scale
FP8_MAX = tl.constexpr(448.0)
SCALE_EPSILON = tl.constexpr(1e-10)


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Return tanh, near 0 by its series: the difference would cancel."""
    s = x * x
    series = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _gelu_exponent(x):
    """Return ``2 q`` of tanh-GELU: twice sqrt(2/pi) (x + 0.044715 x^3)."""
    return 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)


@triton.jit
def activation(x, ACT: tl.constexpr, ALPHA: tl.constexpr, CAP: tl.constexpr):
    """Return the activation of `x`; with `CAP` that of the softcapped SiLU."""
    # One return: Triton compiles what follows a return under a constant condition too.
    if CAP is not None:
        value = CAP * _tanh(x / CAP) * _logistic(x)
    elif ACT == "gelu":
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        value = x * _logistic(_gelu_exponent(x))
    elif ACT == "squared_relu":
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
    elif ACT == "swish":
        value = x * _logistic(ALPHA * x)
    else:
        tl.static_assert(ACT == "silu", "this activation has no Triton function")
        value = x * _logistic(x)
    return value


@triton.jit
def slope(x, ACT: tl.constexpr, ALPHA: tl.constexpr, CAP: tl.constexpr):
    """Return the derivative of :func:`activation`; ``1 - s`` is the logistic function of the negative."""
    if CAP is not None:
        t = _tanh(x / CAP)
        value = _logistic(x) * ((1.0 - t * t) + CAP * t * _logistic(-x))
    elif ACT == "gelu":
        value = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        exponent = _gelu_exponent(x)
        inner = 1.5957691216057308 * x * (1.0 + 0.134145 * x * x)  # x times the exponent's derivative
        value = _logistic(exponent) * (1.0 + inner * _logistic(-exponent))
    elif ACT == "squared_relu":
        value = 2.0 * tl.where(x < 0, 0.0, x)
    elif ACT == "swish":
        value = _logistic(ALPHA * x) * (1.0 + ALPHA * x * _logistic(-ALPHA * x))
    else:
        tl.static_assert(ACT == "silu", "this activation has no Triton function")
        value = _logistic(x) * (1.0 + x * _logistic(-x))
    return value


@triton.jit
def clip(x, LIMITS: tl.constexpr):
    """Return `x` within (upper, lower), None is absent; NaN stays NaN."""
    if LIMITS[0] is not None:
        x = tl.where(x > LIMITS[0], LIMITS[0], x)
    if LIMITS[1] is not None:
        x = tl.where(x < LIMITS[1], LIMITS[1], x)
    return x


@triton.jit
def within(gradient, x, LIMITS: tl.constexpr):
    """Return the gradient times 1 strictly within the limits and 0 elsewhere; NaN stays NaN."""
    if LIMITS[0] is not None:
        gradient *= tl.where(x < LIMITS[0], 1.0, 0.0)
    if LIMITS[1] is not None:
        gradient *= tl.where(x > LIMITS[1], 1.0, 0.0)
    return gradient


@triton.jit
def softcapped(x, CAP: tl.constexpr):
    """Return what multiplies the activation, of clipped up."""
    if CAP is not None:
        x = CAP * _tanh(x / CAP)
    return x


@triton.jit
def _spread(scale, C: tl.constexpr):
    """Return each column's scale of groups ``[R, C/GROUP]``."""
    R: tl.constexpr = scale.shape[0]
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (R, C // GROUP, GROUP)), (R, C))


@triton.jit
def _group_scale(x):
    """Return ``(max|x| + 1e-10) / 448`` of each group, not rounded; NaN counts as the largest."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    largest = tl.max(tl.reshape(bits_of(x) & MAGNITUDE, (R, C // GROUP, GROUP)), 2)
    return tl.div_rn(largest.to(tl.float32, bitcast=True) + SCALE_EPSILON, largest * 0.0 + FP8_MAX)


@triton.jit
def round_groups(x):
    """Round to group FP8 as ``fp8_silu_forward`` does: divided by the scale that is not rounded."""
    C: tl.constexpr = x.shape[1]
    scale = _group_scale(x)
    code = e4m3_codes(tl.div_rn(x, _spread(scale, C)), 127)
    return e4m3_values(code) * _spread(round_bf16(scale), C)


@triton.jit
def put_groups(codes, scales, x, at, scale_at, mask, scale_mask, LIMITS: tl.constexpr):
    """Save bf16 values `x` as codes and scales; what is at or beyond a limit has a NaN's code."""
    C: tl.constexpr = x.shape[1]
    stored = round_bf16(clip(x, LIMITS))
    scale = round_bf16(_group_scale(tl.where(mask, stored, 0.0)))
    code = e4m3_codes(tl.div_rn(stored, _spread(scale, C)), 127)
    if LIMITS[0] is not None:
        code = tl.where(x >= LIMITS[0], CODE_NAN, code)
    if LIMITS[1] is not None:
        code = tl.where(x <= LIMITS[1], CODE_NAN | 0x80, code)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)
    tl.store(scales + scale_at, (bits_of(scale) >> 16).to(tl.int16), mask=scale_mask)


@triton.jit
def take(values, scales, at, scale_at, mask, scale_mask, LIMITS: tl.constexpr, INSIDE: tl.constexpr):
    """Return a saved tile as fp32; `INSIDE` are the last numbers within the limits."""
    if scales is None:
        value = to_fp32(tl.load(values + at, mask=mask, other=0))
    else:
        C: tl.constexpr = at.shape[1]
        code = tl.load(values + at, mask=mask, other=0).to(tl.int32)
        scale = _spread(to_fp32(tl.load(scales + scale_at, mask=scale_mask, other=0)), C)
        value = clip(e4m3_values(code) * scale, INSIDE)
        usable = tl.abs(scale) < float("inf")
        if LIMITS[0] is not None:
            value = tl.where(usable & (code == CODE_NAN), LIMITS[0], value)
        if LIMITS[1] is not None:
            value = tl.where(usable & (code == (CODE_NAN | 0x80)), LIMITS[1], value)
    return value
