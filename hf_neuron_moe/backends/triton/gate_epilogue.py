"""Between the products: the intermediate of gate and up with what is saved, and their gradients.

Rounding points are those of ``ffn_forward`` and ``ffn_backward`` in ``backends/torch``.

Legend: R rows, I intermediate, i the operand's width: I, padded to a multiple of 128 with zeros in mxfp8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.gating import Limits, gating_of
from hf_neuron_moe.backends.torch.saved import FP8Rows, SavedRows
from hf_neuron_moe.backends.triton import device_functions as dev, gate_functions as fn
from hf_neuron_moe.backends.triton.launch_grid import Tiles, as_bits, launch, tile_sizes
from hf_neuron_moe.errors import not_one_of
from hf_neuron_moe.formats.padding import padded_size

ROUNDINGS = ("bf16", "mxfp8", "fp8")
"""Of the backward: those of the precisions, and COAT's, which replaces both where gate and up are saved in FP8."""


@triton.jit
def _forward(
    gate, up, scale, out, saved_gate, gate_scales, saved_up, up_scales, saved_act, saved_product,
    R, columns, WIDTH, up_saved, gate_row, gate_column, up_row, up_column, saved_gate_row, saved_up_row,
    ACT: tl.constexpr, ALPHA: tl.constexpr, CAP: tl.constexpr, UP_CAP: tl.constexpr, GATE_LIMITS: tl.constexpr,
    UP_LIMITS: tl.constexpr, ROUND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside, at = (row < R)[:, None] & (column < columns)[None, :], row.to(tl.int64)[:, None]
    u = dev.to_fp32(tl.load(up + at * up_row + column[None, :] * up_column, mask=inside, other=0))
    rounded_u = dev.round_bf16(u)
    if saved_up is not None:
        fn.save(saved_up, up_scales, u, row, column, R, up_saved, saved_up_row, UP_LIMITS)
    if ROUND:
        u = rounded_u
    if gate is None:
        product, _ = fn.activation(u, ACT, ALPHA, CAP)
    else:
        g = dev.to_fp32(tl.load(gate + at * gate_row + column[None, :] * gate_column, mask=inside, other=0))
        if saved_gate is not None:
            fn.save(saved_gate, gate_scales, g, row, column, R, columns, saved_gate_row, GATE_LIMITS)
        rounded_g = dev.round_bf16(g)
        if ROUND:
            g = rounded_g
        act, _ = fn.activation(fn.clip(g, GATE_LIMITS), ACT, ALPHA, CAP)
        product = act * fn.up_value(u, UP_LIMITS, UP_CAP)
        if saved_act is not None or saved_product is not None:
            act, _ = fn.activation(fn.clip(rounded_g, GATE_LIMITS), ACT, ALPHA, CAP)
            act = dev.round_bf16(act)
            here = at * columns + column[None, :]
            if saved_act is not None:
                dev.store(saved_act + here, act, inside)
            if saved_product is not None:
                dev.store(saved_product + here, act * fn.up_value(rounded_u, UP_LIMITS, UP_CAP), inside)
    if scale is not None:
        product *= tl.load(scale + row, mask=row < R, other=0.0)[:, None]
    product = tl.where(inside, product, 0.0)  # what pads the operand is zero, whatever the limits are
    dev.store(out + at * WIDTH + column[None, :], product, (row < R)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _backward(
    d_int, gate, gate_scales, up, up_scales, saved_act, saved_product, scale, d_gate, d_up, inter, d_scale,
    R, columns, WIDTH, d_int_row, gate_row, gate_column, up_row, up_column,
    d_gate_row, d_gate_column, d_up_row, d_up_column,
    ACT: tl.constexpr, ALPHA: tl.constexpr, CAP: tl.constexpr, UP_CAP: tl.constexpr,
    GATE_LIMITS: tl.constexpr, UP_LIMITS: tl.constexpr, GATE_INSIDE: tl.constexpr, UP_INSIDE: tl.constexpr,
    ROUNDING: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Make whole rows, so that the sum over a row for its factor's gradient has one order."""
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    at = row.to(tl.int64)[:, None]
    total = tl.zeros((TILE_R,), tl.float32)
    for start in range(0, WIDTH, TILE_C):
        column = start + tl.arange(0, TILE_C)
        inside = (row < R)[:, None] & (column < columns)[None, :]
        held = (row < R)[:, None] & (column < WIDTH)[None, :]
        here = at * columns + column[None, :]
        d = dev.to_fp32(tl.load(d_int + at * d_int_row + column[None, :], mask=inside, other=0))
        u = fn.take(up, up_scales, row, column, R, columns, up_row, up_column, UP_LIMITS, UP_INSIDE)
        if gate is None:
            act, slope = fn.activation(u, ACT, ALPHA, CAP)
            product = act
        else:
            g = fn.take(gate, gate_scales, row, column, R, columns, gate_row, gate_column, GATE_LIMITS, GATE_INSIDE)
            act, slope = fn.activation(fn.clip(g, GATE_LIMITS), ACT, ALPHA, CAP)
            value = fn.up_value(u, UP_LIMITS, UP_CAP)
            if saved_act is not None:
                act = dev.to_fp32(tl.load(saved_act + here, mask=inside, other=0))
            elif ROUNDING == "mxfp8":
                act = dev.round_bf16(act)
            elif ROUNDING == "fp8":
                act = fn.round_groups(tl.where(inside, act, 0.0))
            product = act * value
            if saved_product is not None:
                product = dev.to_fp32(tl.load(saved_product + here, mask=inside, other=0))
            elif ROUNDING == "mxfp8":
                product = dev.round_bf16(product)
        product = tl.where(inside, product, 0.0)
        if scale is not None:
            total += tl.sum(d * product, 1)
            factor = tl.load(scale + row, mask=row < R, other=0.0)[:, None]
            product *= factor
            d *= factor
        dev.store(inter + at * WIDTH + column[None, :], product, held)
        d_up_at = d_up + at * d_up_row + column[None, :] * d_up_column
        if gate is None:
            if ROUNDING == "fp8":
                d = dev.round_bf16(d)
            dev.store(d_up_at, slope * d, held)
        else:
            d_u = act * d
            if UP_CAP is not None:
                t = value / UP_CAP
                d_u *= 1.0 - t * t
            dev.store(d_up_at, fn.within(d_u, u, UP_LIMITS), held)
            if ROUNDING == "mxfp8":
                d_g = dev.round_bf16(dev.round_bf16(slope) * value) * d
            elif ROUNDING == "fp8":
                d_g = slope * dev.round_bf16(d * value)
            else:
                d_g = slope * (d * value)
            d_gate_at = d_gate + at * d_gate_row + column[None, :] * d_gate_column
            dev.store(d_gate_at, fn.within(d_g, g, GATE_LIMITS), held)
    if scale is not None:
        tl.store(d_scale + row, total, mask=row < R)


def gate_forward(
    gate_RI: Tensor | None,
    up_RI: Tensor,
    gate: Gate,
    *,
    rounding: str = "bf16",
    scale_R: Tensor | None = None,
    saved: Checkpoints = Checkpoints(),  # noqa: B008
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the intermediate of fp32 or bf16 gate and up, times `scale_R` (fp32): bf16 ``[R, i]``. Fills `saved`.

    Gate and up have any strides, their biases and up's offset are in them. Gate is None where there is none. With
    ``"bf16"`` the activation reads gate and up rounded to bf16, with ``"mxfp8"`` as they are.
    """
    if rounding not in ROUNDINGS[:2]:
        raise not_one_of("rounding", rounding, ROUNDINGS[:2])
    rows, inner = up_RI.shape
    width = inner if rounding == "bf16" else padded_size(inner)
    out = up_RI.new_empty(rows, width, dtype=torch.bfloat16)
    saved_gate, gate_scales = _parts(saved.gate)
    saved_up, up_scales = _parts(saved.up)
    sizes = tile_sizes("gate_forward") if tiles is None else tiles
    launch(
        _forward, (triton.cdiv(rows, sizes["TILE_R"]), triton.cdiv(width, sizes["TILE_C"])), up_RI,
        as_bits(gate_RI, "gate"), as_bits(up_RI, "up"), scale_R, as_bits(out, "out"), saved_gate, gate_scales,
        saved_up, up_scales, as_bits(saved.gate_act, "gate_act"), as_bits(saved.intermediate, "intermediate"),
        rows, inner, width, 0 if saved_up is None else saved_up.shape[1],
        *_strides(gate_RI), *_strides(up_RI), _strides(saved_gate)[0], _strides(saved_up)[0],
        **_constants(gate), ROUND=rounding == "bf16", **sizes,
    )  # fmt: skip
    return out


def gate_backward(
    d_int_RI: Tensor,
    saved: Checkpoints,
    gate: Gate,
    into: tuple[Tensor | None, Tensor],
    *,
    rounding: str = "bf16",
    scale_R: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Write the gradients of gate and up into `into`, bf16 or fp32 ``[R, i]`` with any strides.

    * d_int_RI: gradient of the intermediate, fp32 or bf16 with unit stride along I.
    * saved: gate (None where there is none) and all columns of up; rows need not be contiguous.
    * rounding: one of :data:`ROUNDINGS`.

    Returns the intermediate times `scale_R`, bf16 ``[R, i]``, and the gradient of `scale_R`.
    """
    if rounding not in ROUNDINGS:
        raise not_one_of("rounding", rounding, ROUNDINGS)
    (rows, inner), (d_gate, d_up) = d_int_RI.shape, into
    saved_gate, gate_scales = _parts(saved.gate)
    saved_up, up_scales = _parts(saved.up)
    assert saved_up is not None and saved_up.shape == d_int_RI.shape, "the backward reads the whole of up"
    inter = d_int_RI.new_empty(d_up.shape, dtype=torch.bfloat16)
    d_scale = None if scale_R is None else torch.empty_like(scale_R)
    constants = _constants(gate)
    inside = {name.replace("LIMITS", "INSIDE"): _inside(constants[name]) for name in ("GATE_LIMITS", "UP_LIMITS")}
    sizes = tile_sizes("gate_backward") if tiles is None else tiles
    launch(
        _backward, (triton.cdiv(rows, sizes["TILE_R"]),), d_int_RI,
        as_bits(d_int_RI, "d_int"), saved_gate, gate_scales, saved_up, up_scales,
        as_bits(saved.gate_act, "gate_act"), as_bits(saved.intermediate, "intermediate"), scale_R,
        as_bits(d_gate, "d_gate"), as_bits(d_up, "d_up"), as_bits(inter, "inter"), d_scale,
        rows, inner, d_up.shape[1], d_int_RI.stride(0), *_strides(saved_gate), *_strides(saved_up),
        *_strides(d_gate), *_strides(d_up), **constants, **inside, ROUNDING=rounding, **sizes,
    )  # fmt: skip
    return inter, d_scale


def _constants(gate: Gate) -> dict[str, Any]:
    """Return a gate as constants of the kernels, limits on the activation's value as those on gate."""
    gating, silu = gating_of(gate), gate.act == "silu"
    act, alpha = ("swish", 1.0) if silu else (gate.act, gate.alpha)
    softcaps = {"CAP": gate.gate_softcap, "UP_CAP": gate.up_softcap}
    return {"ACT": act, "ALPHA": alpha, "GATE_LIMITS": gating.gate_limits, "UP_LIMITS": gating.up_limits, **softcaps}


def _inside(limits: Limits) -> Limits:
    """Return the last fp32 numbers within the limits."""
    upper, lower = (
        None if limit is None else float(torch.tensor(limit, dtype=torch.float32).nextafter(torch.tensor(away)))
        for limit, away in zip(limits, (-math.inf, math.inf), strict=True)
    )
    return upper, lower


def _parts(saved: SavedRows | None) -> tuple[Tensor | None, Tensor | None]:
    """Return bf16 or fp32 values, or codes and scales, whose rows are contiguous."""
    if isinstance(saved, FP8Rows):
        return saved.codes, as_bits(saved.scales, "scales")
    assert saved is None or isinstance(saved, Tensor), "the kernels save matrices and FP8 rows"
    return as_bits(saved, "saved"), None


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
