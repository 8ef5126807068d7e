"""Readable float64 oracle of the MXFP8 MLP backward with its recompute, clamps and both releases.

Legend: S tokens, H hidden, I intermediate. One line per rounding point; no tiles, no descriptors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.mx import fake_quantize_mx

Limits = tuple[float | None, float | None]


def q(values: Tensor, axis: int, lone: bool, rule: str = "neuron") -> Tensor:
    """MX values along `axis`; `lone` groups an axis of exactly 384 as one tile."""
    scheme = "wrapX_single" if lone and values.shape[axis] == 384 else "wrapX"
    return fake_quantize_mx(values.float(), axis=axis, scheme=scheme, rule=rule).double()


def bf16(values: Tensor) -> Tensor:
    return values.float().bfloat16().double()


def clamp(values: Tensor, limits: Limits) -> Tensor:
    upper, lower = limits
    values = values if upper is None else values.clamp(max=upper)
    return values if lower is None else values.clamp(min=lower)


def inside(values: Tensor, limits: Limits) -> Tensor:
    upper, lower = limits
    keep = torch.ones_like(values, dtype=torch.bool)
    keep &= values < upper if upper is not None else keep
    return keep & (values > lower if lower is not None else keep)


def forward(
    x: Tensor, gate_up: Tensor, down: Tensor, *, lone: bool = True, rule: str = "neuron", inter: Tensor | None = None
) -> dict[str, Tensor]:
    """The forward's five results before the rounding of their store; `inter` replaces the bf16 intermediate."""
    gate, up = (q(x.double(), 1, lone, rule) @ q(gate_up.double(), 1, lone, rule).T).chunk(2, dim=1)
    product = F.silu(gate) * up
    output = q(bf16(product) if inter is None else inter.double(), 1, lone, rule) @ q(down.double(), 1, lone, rule).T
    return {"output": output, "gate_pre": gate, "gate_act": F.silu(gate), "up": up, "hidden": product}


def complete(
    kept: dict[str, Tensor],
    x: Tensor,
    gate_up: Tensor,
    *,
    lone: bool = False,
    rule: str = "neuron",
    gate_limits: Limits = (None, None),
    up_limits: Limits = (None, None),
) -> dict[str, Tensor]:
    """Phase 0: all four checkpoints in float64 holding bf16 values."""
    found = {name: value.double() for name, value in kept.items()}
    gate, up = (q(x.double(), 1, lone, rule) @ q(gate_up.double(), 1, lone, rule).T).chunk(2, dim=1)
    found.setdefault("gate_pre", bf16(clamp(gate, gate_limits)))
    found.setdefault("up", bf16(clamp(up, up_limits)))
    found.setdefault("gate_act", bf16(F.silu(found["gate_pre"])))
    found.setdefault("intermediate", bf16(found["gate_act"] * found["up"]))
    return found


def backward(
    dout: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    found: dict[str, Tensor],
    *,
    release: str = "2.31",
    lone: bool | None = None,
    rule: str = "neuron",
    gate_limits: Limits = (None, None),
    up_limits: Limits = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Phases 1 to 4: dX ``[S, H]``, d(gate_up) ``[2I, H]``, d(down) ``[H, I]``, not yet rounded to bf16.

    `lone` overrides the release's grouping of 384.
    """
    lone, inner = (release == "2.30" if lone is None else lone), down.shape[1]
    dout, x, gate_up, down = dout.double(), x.double(), gate_up.double(), down.double()
    gate = found["gate_pre"]
    sigmoid = torch.sigmoid(gate)
    d_int = q(dout, 1, lone, rule) @ q(down, 0, lone, rule)
    d_act = bf16(bf16(sigmoid * (1 + gate * (1 - sigmoid))) * found["up"])
    d_gate = bf16(d_int * d_act) * inside(gate, gate_limits)
    d_up = bf16(d_int * found["gate_act"]) * inside(found["up"], up_limits)
    both = torch.cat([d_gate, d_up], dim=1)
    if release == "2.30":
        d_x = q(d_gate, 1, lone, rule) @ q(gate_up[:inner], 0, lone, rule) + q(d_up, 1, lone, rule) @ q(
            gate_up[inner:], 0, lone, rule
        )
    else:
        d_x = q(both, 1, lone, rule) @ q(gate_up, 0, lone, rule)
    return (
        d_x,
        q(both, 0, lone, rule).T @ q(x, 0, lone, rule),
        q(dout, 0, lone, rule).T @ q(found["intermediate"], 0, lone, rule),
    )
