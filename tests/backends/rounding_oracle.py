"""The blocks in float64 with the documented rounding points, and nothing rounded anywhere else.

Legend: R rows of one expert (or all tokens of a dense MLP), H hidden, I intermediate. `r` rounds to bf16, `q` to MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.modules import ops


class Outcome(NamedTuple):
    """Results in float64; only the values on the way to them are rounded."""

    y_RH: Tensor
    dx_RH: Tensor
    d_gate_IH: Tensor
    d_up_IH: Tensor
    d_down_HI: Tensor
    d_scale_R: Tensor
    d_gate_bias_I: Tensor | None = None
    d_up_bias_I: Tensor | None = None
    d_down_bias_H: Tensor | None = None


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


class Elementwise(NamedTuple):
    """A gate at some rows: the activation, what multiplies it, and both derivatives, 0 at and beyond limits."""

    act: Tensor
    slope: Tensor
    up: Tensor
    up_slope: Tensor


def with_slope(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function of `values` and its derivative by autograd."""
    leaf = values.detach().requires_grad_()
    with torch.enable_grad():
        result = function(leaf)
        return result.detach(), torch.autograd.grad(result.sum(), leaf)[0]


def clipped(values: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Return clamped values, and where they were strictly inside."""
    inside = torch.ones_like(values)
    if high is not None:
        values, inside = values.clamp(max=high), inside * (values < high)
    if low is not None:
        values, inside = values.clamp(min=low), inside * (values > low)
    return values, inside


def activation(gate: Gate) -> Callable[[Tensor], Tensor]:
    """The families' own expressions."""
    cap = gate.gate_softcap
    if cap is not None:
        return lambda x: cap * torch.tanh(x / cap) * torch.sigmoid(x)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "swish": lambda x: x * torch.sigmoid(x * gate.alpha),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "squared_relu": lambda x: F.relu(x).square(),
    }
    return functions[gate.act]


def elementwise(gate: Gate, g: Tensor, u: Tensor) -> Elementwise:
    """`g` and `u` have their biases and up its offset; without a gate `g` is up's product and `u` is not read."""
    inner, inside = clipped(g, gate.gate_min, gate.gate_max)
    act, slope = with_slope(activation(gate), inner)
    act, below = clipped(act, None, gate.act_max)
    low, high = (None if limit is None else limit + gate.up_offset for limit in (gate.up_min, gate.up_max))
    inner, up_inside = clipped(u, low, high)
    cap = gate.up_softcap
    up, up_slope = with_slope(lambda x: x if cap is None else cap * torch.tanh(x / cap), inner)
    return Elementwise(act, slope * inside * below, up, up_slope * up_inside)


Weights = tuple[Tensor, Tensor, Tensor]
Biases = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BIASES: Biases = (None, None, None)


def plus(total: Tensor, *parts: Tensor | float | None) -> Tensor:
    for part in parts:
        total = total if part is None else total + part
    return total


def down_bias(bias_H: Tensor | None, dout_RH: Tensor, scale_R: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """What down's bias adds to the output and to the factor's gradient."""
    if bias_H is None:
        return 0.0, 0.0
    return scale_R[:, None] * bias_H, dout_RH @ bias_H


def network_bf16(
    x_RH: Tensor,
    weights: Weights,
    dout_RH: Tensor,
    scale_R: Tensor,
    block: int | None,
    gate: Gate = SWIGLU,
    biases: Biases = NO_BIASES,
) -> Outcome:
    """One expert, or a dense MLP, in precision bf16; `block` has no part in it."""
    (gate_IH, up_IH, down_HI), scale = weights, scale_R[:, None]
    u = r(plus(x_RH @ up_IH.T, biases[1], gate.up_offset))
    d_int = dout_RH @ down_HI
    if not gate.gated:
        e = elementwise(gate, u, torch.ones_like(u))
        d_gate, d_up = torch.zeros_like(gate_IH[:, 0]).expand(len(u), -1), r(d_int * scale * e.slope)
    else:
        e = elementwise(gate, r(plus(x_RH @ gate_IH.T, biases[0])), u)
        d_gate, d_up = r(d_int * scale * e.up * e.slope), r(d_int * scale * e.act * e.up_slope)
    inter = r(e.act * e.up * scale)
    added, added_to_scale = down_bias(biases[2], dout_RH, scale_R)
    return Outcome(
        inter @ down_HI.T + added,
        d_gate @ gate_IH + d_up @ up_IH,
        d_gate.T @ x_RH,
        d_up.T @ x_RH,
        dout_RH.T @ inter,
        (d_int * e.act * e.up).sum(1) + added_to_scale,
        d_gate.sum(0),
        d_up.sum(0),
        (dout_RH * scale).sum(0),
    )


def network_mxfp8(
    x_RH: Tensor,
    weights: Weights,
    dout_RH: Tensor,
    scale_R: Tensor,
    block: int | None,
    gate: Gate = SWIGLU,
    biases: Biases = NO_BIASES,
) -> Outcome:
    """The same in precision mxfp8."""
    gate_IH, up_IH, down_HI = weights
    scale, x = scale_R[:, None], q(x_RH, 1)
    u = plus(x @ q(up_IH, 1).T, biases[1], gate.up_offset)
    g = plus(x @ q(gate_IH, 1).T, biases[0]) if gate.gated else u
    e = elementwise(gate, g, u if gate.gated else torch.ones_like(u))
    inter = r(e.act * e.up * scale)
    y = q(inter, 1) @ q(down_HI, 1).T
    d_int = q(dout_RH, 1) @ q(down_HI, 0)
    if gate.gated:
        e = elementwise(gate, r(g), r(u))
        act = r(e.act)
        product = r(act * e.up)
    else:
        e = elementwise(gate, r(u), torch.ones_like(u))
        act = product = e.act
    d_scale = (d_int * product).sum(1)
    d_int, product = d_int * scale, r(product * scale)
    rows_x, rows_dout = q(x_RH, 0, block), q(dout_RH, 0, block)
    if gate.gated:
        d_gate, d_up = r(d_int * r(r(e.slope) * e.up)), r(d_int * act * e.up_slope)
        (dg, du), (wg, wu) = halves(d_gate, d_up, 1), halves(gate_IH, up_IH, 0)
        dx, d_gate_IH = dg @ wg + du @ wu, q(d_gate, 0, block).T @ rows_x
    else:
        d_gate, d_up = torch.zeros(len(u), len(gate_IH), dtype=u.dtype), r(d_int * e.slope)
        dx, d_gate_IH = q(d_up, 1) @ q(up_IH, 0), torch.zeros_like(gate_IH)
    added, added_to_scale = down_bias(biases[2], dout_RH, scale_R)
    return Outcome(
        y + added,
        dx,
        d_gate_IH,
        q(d_up, 0, block).T @ rows_x,
        rows_dout.T @ q(product, 0, block),
        d_scale + added_to_scale,
        d_gate.sum(0),
        d_up.sum(0),
        (dout_RH * scale).sum(0),
    )


NETWORKS: dict[str, Callable[..., Outcome]] = {"bf16": network_bf16, "mxfp8": network_mxfp8}


def draw(generator: torch.Generator, *shape: int, scale: float = 1.0, binades: int = 8) -> Tensor:
    """bf16 values, rows over that many binades."""
    rows = torch.exp2(torch.randint(-binades // 2, binades // 2 + 1, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * rows * scale).bfloat16()


def times_one_rounding(actual: Tensor, exact: Tensor) -> float:
    """The error of `actual` over that of `exact` rounded once to bf16."""
    once = (exact.bfloat16().double() - exact).norm()
    return float((actual.double() - exact).norm() / once)


def halves_of(both: Tensor, gate: Gate, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate's and up's part of the first axis; without a gate, an empty one and the whole."""
    if not gate.gated:
        return both[:0], both
    first, second = (both[::2], both[1::2]) if interleaved else both.chunk(2)
    return first, second


def joined(gate_part: Tensor, up_part: Tensor, interleaved: bool) -> Tensor:
    """The inverse of :func:`halves_of`."""
    if interleaved and len(gate_part):
        return torch.stack([gate_part, up_part], 1).flatten(0, 1)
    return torch.cat([gate_part, up_part])


def exact_experts(
    precision: str,
    operands: dict[str, Tensor],
    dout: Tensor,
    block: int,
    gate: Gate = SWIGLU,
    *,
    interleaved: bool = False,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Experts one by one, added in float64; and what rounding every part and then the sum costs, over one rounding."""
    given = {name: value.double() for name, value in operands.items() if name != "index"}
    exact = {name: torch.zeros_like(value) for name, value in {"y": given["x"], **given}.items()}
    noise = torch.zeros(2, dtype=torch.float64)
    for expert in range(len(given["down"])):
        tokens, slots = (operands["index"] == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        weights = (*halves_of(given["gate_up"][expert], gate, interleaved), given["down"][expert])
        biases = NO_BIASES
        if "gate_up_bias" in given:
            halves_I = halves_of(given["gate_up_bias"][expert], gate, interleaved)
            biases = (*halves_I, given["down_bias"][expert])
        rows = given["x"][tokens], weights, dout.double()[tokens], given["weights"][tokens, slots]
        one = NETWORKS[precision](*rows, block, gate, biases)
        exact["y"].index_add_(0, tokens, one.y_RH)
        exact["x"].index_add_(0, tokens, one.dx_RH)
        noise += torch.stack([(r(part) - part).norm() ** 2 for part in (one.y_RH, one.dx_RH)])
        exact["weights"][tokens, slots] = one.d_scale_R
        exact["gate_up"][expert] = joined(one.d_gate_IH, one.d_up_IH, interleaved)
        exact["down"][expert] = one.d_down_HI
        if "gate_up_bias" in given:
            exact["gate_up_bias"][expert] = joined(one.d_gate_bias_I, one.d_up_bias_I, interleaved)
            exact["down_bias"][expert] = one.d_down_bias_H
    once = [(r(exact[name]) - exact[name]).norm() ** 2 for name in "yx"]
    return exact, {name: float((1 + noise[n] / once[n]) ** 0.5) for n, name in enumerate("yx")}


def run_experts(operands: dict[str, Tensor], dout: Tensor, transposed: bool, **options: Any) -> dict[str, Tensor]:
    """The block's output and gradients, in the stock order of the weights."""
    given = dict(operands)
    if transposed:
        given |= {name: given[name].transpose(1, 2).contiguous() for name in ("gate_up", "down")}
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in given.items()}
    biases = (leaves.get("gate_up_bias"), leaves.get("down_bias"))
    tensors = [leaves[name] for name in ("x", "index", "weights", "gate_up", "down")]
    y = ops.experts(*tensors, transposed=transposed, backend="torch", biases=biases, **options)
    names = [name for name in leaves if name != "index"]
    grads = dict(zip(names, torch.autograd.grad(y, [leaves[name] for name in names], dout), strict=True))
    if transposed:
        grads |= {name: grads[name].transpose(1, 2) for name in ("gate_up", "down")}
    return {"y": y.detach(), **grads}
