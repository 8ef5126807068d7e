"""Checkpoints in group FP8 between forward and backward, where the policy asks for it.

The kernels write and read bf16. Torch operations quantize what a forward kernel wrote, and bring it back before the
backward kernel reads it; so the gradients are those of the kernels at rounded activations. The dense backward also
takes the gate's activation and the intermediate, which are then COAT's; the experts' makes them from gate and up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.kept import FP8Gating, FP8Rows, fp8_storage


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``[..., C]``, groups along the last axis."""
    flat = rows.reshape(-1, rows.shape[-1])
    codes, scales = fp8_storage(rows, (flat.shape[0],), flat.shape[1])
    FP8Rows(codes, scales).put(slice(None), slice(0, flat.shape[1]), flat)
    return codes.view(rows.shape), scales.view(*rows.shape[:-1], scales.shape[-1])


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values of what :func:`pack` made."""
    rows = FP8Rows(codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1]))
    return rows.take(slice(None), slice(0, codes.shape[-1])).to(torch.bfloat16).view(codes.shape)


def fake_pack(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors of the shapes and dtypes that :func:`pack` returns for rows of `shape`."""
    return fp8_storage(x, shape[:-1], shape[-1])


def coat_checkpoints(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the four checkpoints of a dense backward, bf16, from packed gate and up ``[2, S, I]``.

    The gate's activation is rounded to FP8 groups itself, as ``fp8_mul_backward`` reads it.
    """
    rows = FP8Rows(codes.flatten(0, 1), scales.flatten(0, 1)).take(slice(None), slice(0, codes.shape[-1]))
    gate, up = rows.view(codes.shape).unbind()
    act, inter = torch.empty_like(gate), torch.empty_like(gate)
    FP8Gating().product(gate, up, inter, act)
    names = ("gate_pre", "up", "gate_act", "intermediate")
    return {name: value.to(torch.bfloat16) for name, value in zip(names, (gate, up, act, inter))}
