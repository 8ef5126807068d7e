"""Checkpoints in group FP8 between forward and backward, where the policy asks for it.

The kernels write and read bf16: torch operations quantize what a forward kernel wrote, and bring it back before the
backward kernel reads it. The dense backward also takes COAT's activation of the gate and intermediate; the experts'
makes them from gate and up. Bytes and values are those of the torch backend's saved activations, by operations that
look at no value and can be traced. C columns, G groups of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.saved import GROUP
from hf_neuron_moe.formats.constants import E4M3FN
from hf_neuron_moe.formats.group_fp8 import SCALE_EPSILON


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes ``[..., C]`` and bf16 scales ``[..., G]`` of a bf16 tensor, groups along the last axis."""
    groups = _groups(rows)
    scales = _scales(groups).to(torch.bfloat16)
    codes = _codes(groups / scales.float())
    return codes.view(torch.uint8).flatten(-2)[..., : rows.shape[-1]].contiguous(), scales[..., 0]


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values of what :func:`pack` made."""
    return _values(codes, scales).to(torch.bfloat16)


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
