"""Activations, limits and softcaps in Triton, fp32: the rows of ``backends/torch/gating.py`` with their derivatives.

Also the FP8 groups of ``backends/torch/saved.py``: codes and bf16 scales of 64 columns of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_neuron_moe.backends.triton import device_functions as dev

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_tanh", "squared_relu")
"""Those that :func:`activation` has; ``silu`` is ``swish`` with alpha 1."""

GROUP = tl.constexpr(64)  # columns that share a scale


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
def activation(x, ACT: tl.constexpr, ALPHA: tl.constexpr, CAP: tl.constexpr):
    """Return the activation of `x` and its derivative; with `CAP` those of the softcapped SiLU.

    ``1 - s`` is the logistic function of the negative. What a kernel does not use of the two is not computed.
    """
    if CAP is not None:
        t, s = _tanh(x / CAP), _logistic(x)
        value, slope = CAP * t * s, s * ((1.0 - t * t) + CAP * t * _logistic(-x))
    elif ACT == "gelu":
        p = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value, slope = x * p, p + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        exponent = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        s, inner = _logistic(exponent), 1.5957691216057308 * x * (1.0 + 0.134145 * x * x)
        value, slope = x * s, s * (1.0 + inner * _logistic(-exponent))
    elif ACT == "squared_relu":
        positive = tl.where(x < 0, 0.0, x)
        value, slope = positive * positive, 2.0 * positive
    else:
        tl.static_assert(ACT == "swish", "this activation has no Triton function")
        s = _logistic(ALPHA * x)
        value, slope = x * s, s * (1.0 + ALPHA * x * _logistic(-ALPHA * x))
    return value, slope


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
def up_value(x, LIMITS: tl.constexpr, CAP: tl.constexpr):
    """Return what multiplies the activation."""
    x = clip(x, LIMITS)
    if CAP is not None:
        x = CAP * _tanh(x / CAP)
    return x


@triton.jit
def _spread(scale, C: tl.constexpr):
    """Return each column's scale of groups ``[R, C/GROUP]``."""
    R: tl.constexpr = scale.shape[0]
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (R, C // GROUP, GROUP)), (R, C))


@triton.jit
def _group_codes(x, BF16_SCALE: tl.constexpr):
    """Return codes ``x / scale`` and bf16 scales ``(max|x| + 1e-10) / 448``, by which x is divided if `BF16_SCALE`."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    largest = tl.max(tl.reshape(dev.bits_of(x) & dev.MAGNITUDE, (R, C // GROUP, GROUP)), 2)  # NaN is above all
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True) + 1e-10, tl.full((R, C // GROUP), 448.0, tl.float32))
    rounded = dev.round_bf16(scale)
    if BF16_SCALE:
        scale = rounded
    return dev.e4m3_codes(tl.div_rn(x, _spread(scale, C)), 127), rounded


@triton.jit
def round_groups(x):
    """Round to group FP8 as ``fp8_silu_forward`` does: divided by the scale that is not rounded."""
    C: tl.constexpr = x.shape[1]
    code, scale = _group_codes(x, False)
    return dev.e4m3_values(code) * _spread(scale, C)


@triton.jit
def _places(row, column, rows, columns):
    """Return where the scales of a tile are, and which of them exist."""
    groups = (columns + GROUP - 1) // GROUP
    group = tl.min(column, 0) // GROUP + tl.arange(0, column.shape[0] // GROUP)
    return row.to(tl.int64)[:, None] * groups + group[None, :], (row < rows)[:, None] & (group < groups)[None, :]


@triton.jit
def save(saved, scales, x, row, column, rows, columns, saved_row, LIMITS: tl.constexpr):
    """Save the first `columns` of `x` rounded to bf16: as they are, or in FP8 if there are `scales`.

    In FP8, what is at or beyond a limit has a NaN's code.
    """
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * saved_row + column[None, :]
    if scales is None:
        dev.store(saved + at, x, mask)
    else:
        x = dev.round_bf16(x)
        code, scale = _group_codes(tl.where(mask, dev.round_bf16(clip(x, LIMITS)), 0.0), True)
        if LIMITS[0] is not None:
            code = tl.where(x >= LIMITS[0], dev.CODE_NAN, code)
        if LIMITS[1] is not None:
            code = tl.where(x <= LIMITS[1], dev.CODE_NAN | 0x80, code)
        tl.store(saved + at, code.to(tl.uint8), mask=mask)
        scale_at, scale_mask = _places(row, column, rows, columns)
        tl.store(scales + scale_at, (dev.bits_of(scale) >> 16).to(tl.int16), mask=scale_mask)


@triton.jit
def take(
    saved, scales, row, column, rows, columns, saved_row, saved_column, LIMITS: tl.constexpr, INSIDE: tl.constexpr
):
    """Return a saved tile as fp32, zeros outside; `INSIDE` are the last numbers within the limits."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    code = tl.load(saved + row.to(tl.int64)[:, None] * saved_row + column[None, :] * saved_column, mask=mask, other=0)
    if scales is None:
        value = dev.to_fp32(code)
    else:
        scale_at, scale_mask = _places(row, column, rows, columns)
        code = code.to(tl.int32)
        scale = _spread(dev.to_fp32(tl.load(scales + scale_at, mask=scale_mask, other=0)), column.shape[0])
        value = clip(dev.e4m3_values(code) * scale, INSIDE)
        usable = tl.abs(scale) < float("inf")
        if LIMITS[0] is not None:
            value = tl.where(usable & (code == dev.CODE_NAN), LIMITS[0], value)
        if LIMITS[1] is not None:
            value = tl.where(usable & (code == (dev.CODE_NAN | 0x80)), LIMITS[1], value)
    return value
