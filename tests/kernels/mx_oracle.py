"""Readable float64 oracles of the MXFP8 blocks: one line per rounding point, no tiles, no buffers.

Legend: R rows, H hidden, I intermediate. ``q(t, axis)`` is the byte-exact MX rounding of :mod:`hf_neuron_moe.formats`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.mx import fake_quantize_mx


class Grads(NamedTuple):
    x: Tensor
    gate_up: Tensor
    down: Tensor
    scale: Tensor


def q(values: Tensor, axis: int, scheme: str = "wrapX") -> Tensor:
    return fake_quantize_mx(values.float(), axis=axis, scheme=scheme).double()


def bf16(values: Tensor) -> Tensor:
    return values.float().bfloat16().double()


def pad(values: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(values, (0, columns - values.shape[1], 0, rows - values.shape[0]))


def forward(x_RH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor, scale_R: Tensor | None = None) -> dict[str, Tensor]:
    """Forward with the rounding of ``mlp_fwd_mxfp8``; `scale_R` multiplies the intermediate before its rounding."""
    lone = {axis: "wrapX_single" if size == 384 else "wrapX" for axis, size in zip("HI", down_HI.shape, strict=True)}
    if scale_R is not None:
        lone = dict.fromkeys("HI", "wrapX")
    gate_up = q(x_RH, 1, lone["H"]) @ q(gate_up_2IH, 1, lone["H"]).T
    gate, up = gate_up.chunk(2, dim=1)
    inner = F.silu(gate) * up
    inter = bf16(inner if scale_R is None else inner * scale_R[:, None])
    return {"output": q(inter, 1, lone["I"]) @ q(down_HI, 1, lone["I"]).T, "gate": bf16(gate), "up": bf16(up)}


def backward(
    dout_RH: Tensor,
    x_RH: Tensor,
    gate_up_2IH: Tensor,
    down_HI: Tensor,
    gate_RI: Tensor,
    up_RI: Tensor,
    scale_R: Tensor | None = None,
) -> Grads:
    """Backward of one token block from bf16 pre-activations with the rounding of ``mlp_bwd_mxfp8`` (2.31)."""
    d_int = q(dout_RH, 1) @ q(down_HI, 0)
    sigmoid = torch.sigmoid(gate_RI)
    act, slope = bf16(F.silu(gate_RI)), bf16(sigmoid * (1 + gate_RI * (1 - sigmoid)))
    inter = bf16(act * up_RI)
    d_scale = (d_int * inter).sum(1)
    if scale_R is not None:
        inter, d_int = bf16(inter * scale_R[:, None]), d_int * scale_R[:, None]
    d_gate_up = torch.cat([bf16(d_int * bf16(slope * up_RI)), bf16(d_int * act)], dim=1)
    return Grads(
        x=q(d_gate_up, 1) @ q(gate_up_2IH, 0),
        gate_up=q(d_gate_up, 0).T @ q(x_RH, 0),
        down=q(dout_RH, 0).T @ q(inter, 0),
        scale=d_scale,
    )
