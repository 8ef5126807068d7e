"""Checkpoints in group FP8 between forward and backward, where the policy asks for it.

The kernels write and read bf16: torch operations quantize what a forward kernel wrote, and bring it back before the
backward kernel reads it. The dense backward also takes COAT's activation of the gate and intermediate; the experts'
makes them from gate and up. Bytes and values are those of the torch backend's saved activations, by operations that
look at no value and can be traced. C columns, G groups of them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.saved import GROUP
from hf_neuron_moe.formats.constants import E4M3FN
from hf_neuron_moe.formats.group_fp8 import SCALE_EPSILON

Limits = tuple[tuple[float | None, float | None], tuple[float | None, float | None]]
"""Upper and lower limit of gate, then of up; None is absent."""

_AT_UPPER, _AT_LOWER = 0x7F, 0xFF


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes ``[..., C]`` and bf16 scales ``[..., G]`` of a bf16 tensor, groups along the last axis."""
    groups = _groups(rows)
    scales = _scales(groups).to(torch.bfloat16)
    codes = _codes(groups / scales.float())
    return codes.view(torch.uint8).flatten(-2)[..., : rows.shape[-1]].contiguous(), scales[..., 0]


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values of what :func:`pack` made."""
    return _values(codes, scales).to(torch.bfloat16)


def split_scales(both: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of `codes` ``[..., G]`` and, flat, the rest of `both`, in which they come first."""
    shape = (*codes.shape[:-1], -(-codes.shape[-1] // GROUP))
    first = math.prod(shape)
    return both[:first].view(shape), both[first:]


def pack_clamped(rows_N2IB: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Return :func:`pack` of gate and up, with a code of its own for each value on a limit.

    An unclamped value next to a limit would decode to it or beyond, and lose its gradient. No other value has the two
    codes: they are e4m3fn's NaN.
    """
    codes, scales = pack(rows_N2IB)
    upper, lower = _bounds(rows_N2IB, limits)
    return codes.masked_fill(rows_N2IB >= upper, _AT_UPPER).masked_fill(rows_N2IB <= lower, _AT_LOWER), scales


def unpack_clamped(codes_N2IB: Tensor, scales: Tensor, limits: Limits) -> Tensor:
    """Return the bf16 values of what :func:`pack_clamped` made: on a limit, or strictly inside. NaN groups stay NaN."""
    upper, lower = _bounds(scales, limits)
    inside = unpack(codes_N2IB, scales).clamp(torch.nextafter(lower, upper), torch.nextafter(upper, lower))
    nothing = unpack(torch.zeros_like(codes_N2IB), scales)  # 0, and NaN in a group with NaN
    at_lower = torch.where(codes_N2IB == _AT_LOWER, lower + nothing, inside)
    return torch.where(codes_N2IB == _AT_UPPER, upper + nothing, at_lower)


def _bounds(anchor: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Upper and lower limits ``[2, 1, 1]`` of gate and up in bf16, infinite where there are none."""
    (gate_high, gate_low), (up_high, up_low) = limits
    high = [torch.inf if limit is None else limit for limit in (gate_high, up_high)]
    low = [-torch.inf if limit is None else limit for limit in (gate_low, up_low)]
    upper, lower = (torch.tensor(each, dtype=torch.bfloat16, device=anchor.device) for each in (high, low))
    return upper.view(2, 1, 1), lower.view(2, 1, 1)


def coat_checkpoints(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the four checkpoints of a dense backward, bf16, from packed gate and up ``[2, S, I]``.

    The gate's activation is rounded to FP8 groups itself, as ``fp8_mul_backward`` reads it: divided by the scale in
    fp32, multiplied by the scale in bf16.
    """
    gate, up = _values(codes, scales).unbind()
    groups = _groups(F.silu(gate))
    scale = _scales(groups)
    rounded = _codes(groups / scale).float() * scale.to(torch.bfloat16).float()
    act = rounded.flatten(-2)[..., : gate.shape[-1]]
    made = {"gate_pre": gate, "up": up, "gate_act": act, "intermediate": act * up}
    return {name: value.to(torch.bfloat16) for name, value in made.items()}


def _groups(rows: Tensor) -> Tensor:
    """fp32 ``[..., G, 64]``, the last group filled with zeros."""
    return F.pad(rows.float(), (0, -rows.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _scales(groups: Tensor) -> Tensor:
    """fp32 ``[..., G, 1]``."""
    return (groups.abs().amax(-1, keepdim=True) + SCALE_EPSILON) / E4M3FN.max


def _codes(scaled: Tensor) -> Tensor:
    """E4M3 of fp32 values, nearest even, saturating."""
    return scaled.clamp(-E4M3FN.max, E4M3FN.max).to(torch.float8_e4m3fn)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 ``code * scale``."""
    columns = codes.shape[-1]
    groups = F.pad(codes, (0, -columns % GROUP)).view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
    return (groups * scales.float().unsqueeze(-1)).flatten(-2)[..., :columns]
