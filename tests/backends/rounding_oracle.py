"""The blocks in float64 with the documented rounding points, and nothing rounded anywhere else.

Legend: R rows of one expert (or all tokens of a dense MLP), H hidden, I intermediate. `r` rounds to bf16, `q` to MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.formats.padding import padded_size


class Outcome(NamedTuple):
    """Results in float64; only the values on the way to them are rounded."""

    y_RH: Tensor
    dx_RH: Tensor
    d_gate_IH: Tensor
    d_up_IH: Tensor
    d_down_HI: Tensor
    d_scale_R: Tensor


def r(values: Tensor) -> Tensor:
    """Round to bf16."""
    return values.to(torch.bfloat16).double()


def q(values: Tensor, axis: int, block: int | None = None) -> Tensor:
    """Quantize along `axis` in blocks of that many positions (None: one), zero padded to what the kernels take."""
    values = values.movedim(axis, -1)
    size = values.shape[-1]
    parts = [
        fake_quantize_mx(F.pad(part, (0, (block or padded_size(part.shape[-1])) - part.shape[-1])).bfloat16())
        for part in values.split(block or size, dim=-1)
    ]
    return torch.cat(parts, dim=-1)[..., :size].double().movedim(-1, axis)


def halves(gate: Tensor, up: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Quantize gate's and up's gradients, or weights, along one axis of 2I; each half is padded by itself."""
    size = gate.shape[axis]
    padding = (0, padded_size(size) - size) if axis == 1 else (0, 0, 0, padded_size(size) - size)
    both = q(torch.cat([F.pad(gate, padding), F.pad(up, padding)], axis), axis)
    first, second = both.chunk(2, axis)
    return first.narrow(axis, 0, size), second.narrow(axis, 0, size)


def silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def network_bf16(
    x_RH: Tensor, weights: tuple[Tensor, Tensor, Tensor], dout_RH: Tensor, scale_R: Tensor, block: int | None
) -> Outcome:
    """One expert, or a dense MLP, in precision bf16; `block` has no part in it."""
    gate_IH, up_IH, down_HI = weights
    gate, up, scale = r(x_RH @ gate_IH.T), r(x_RH @ up_IH.T), scale_R[:, None]
    inter = r(F.silu(gate) * up * scale)
    d_int = dout_RH @ down_HI
    d_scale = (d_int * F.silu(gate) * up).sum(1)
    d_gate, d_up = r(d_int * scale * up * silu_slope(gate)), r(d_int * scale * F.silu(gate))
    dx = d_gate @ gate_IH + d_up @ up_IH
    return Outcome(inter @ down_HI.T, dx, d_gate.T @ x_RH, d_up.T @ x_RH, dout_RH.T @ inter, d_scale)


def network_mxfp8(
    x_RH: Tensor, weights: tuple[Tensor, Tensor, Tensor], dout_RH: Tensor, scale_R: Tensor, block: int | None
) -> Outcome:
    """The same in precision mxfp8."""
    gate_IH, up_IH, down_HI = weights
    scale, x = scale_R[:, None], q(x_RH, 1)
    gate, up = x @ q(gate_IH, 1).T, x @ q(up_IH, 1).T
    inter = r(F.silu(gate) * up * scale)
    y = q(inter, 1) @ q(down_HI, 1).T
    gate, up = r(gate), r(up)
    act = r(F.silu(gate))
    product = r(act * up)
    d_int = q(dout_RH, 1) @ q(down_HI, 0)
    d_scale = (d_int * product).sum(1)
    d_int, product = d_int * scale, r(product * scale)
    d_gate, d_up = r(d_int * r(r(silu_slope(gate)) * up)), r(d_int * act)
    (dg, du), (wg, wu) = halves(d_gate, d_up, 1), halves(gate_IH, up_IH, 0)
    rows_x, rows_dout = q(x_RH, 0, block), q(dout_RH, 0, block)
    d_weights = (q(d_gate, 0, block).T @ rows_x, q(d_up, 0, block).T @ rows_x, rows_dout.T @ q(product, 0, block))
    return Outcome(y, dg @ wg + du @ wu, *d_weights, d_scale)


NETWORKS: dict[str, Callable[..., Outcome]] = {"bf16": network_bf16, "mxfp8": network_mxfp8}
