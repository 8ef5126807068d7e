"""The MXFP8 MLP kernels of nki-library (``experimental.mlp_mxfp8``) as functions, raw bf16 operands.

Legend: S tokens, H hidden, I intermediate. ``Q_K`` quantizes to MXFP8 e4m3 along K; every product accumulates in fp32.

    gate = Q_H(X) Q_H(Wg)^T    up = Q_H(X) Q_H(Wu)^T    intermediate = bf16(silu(gate) * up)
    Y = Q_I(intermediate) Q_I(Wd)^T

Sources: nki-library 2.30 ``mlp_fwd_mxfp8.py``; 2.30 and 2.31 ``mlp_bwd_mxfp8.py`` (which differ in phase 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward, project_gate_up
from hf_neuron_moe.backends.torch.tiling import make_loader
from hf_neuron_moe.errors import ConfigError, refuse
from hf_neuron_moe.kernels.checks import check_dtype, check_multiple, check_same_device, check_shape

_RAW = (torch.bfloat16,)
RELEASES = ("2.31", "2.30")


class MLPForward(NamedTuple):
    """``output [S, H]``; the checkpoints ``[S, I]`` are None unless asked for."""

    output: Tensor
    gate_pre: Tensor | None
    gate_act: Tensor | None
    up: Tensor | None
    hidden: Tensor | None


class MLPBackward(NamedTuple):
    """All bf16: ``[S, H]``, ``[2I, H]`` (gate rows first) and ``[H, I]``."""

    hidden_states_grad: Tensor
    gate_up_weight_grad: Tensor
    down_proj_weight_grad: Tensor


def mlp_forward_mxfp8(
    hidden: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    *,
    save_gate_pre: bool = False,
    save_gate_act: bool = False,
    save_up: bool = False,
    save_hidden: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> MLPForward:
    """Compute what ``mlp_forward_mxfp8_nki`` computes from raw bf16 operands.

    Args:
        hidden: bf16 ``[S, H]``; S a multiple of 8, H of 128.
        gate_up_weights: bf16 ``[2I, H]``, gate rows first; I a multiple of 128.
        down_weights: bf16 ``[H, I]``.
        save_gate_pre: return the gate pre-activations, rounded once from the fp32 accumulator.
        save_gate_act: return ``silu(gate)``, rounded once from the fp32 gate.
        save_up: return the up pre-activations.
        save_hidden: return the intermediate ``silu(gate) * up``.
        dtype: of the output, the intermediate and the checkpoints: bf16 or fp32.

    Returns:
        The output and the checkpoints asked for.

    Raises:
        DTypeError, ShapeError, DeviceError: an operand breaks a rule above.
    """
    where = "mlp_forward_mxfp8"
    for name, tensor in (("hidden", hidden), ("gate_up_weights", gate_up_weights), ("down_weights", down_weights)):
        check_dtype(tensor, _RAW, where=where, argument=name)
    if dtype not in (torch.bfloat16, torch.float32):
        raise refuse(
            ConfigError,
            where=where,
            argument="dtype",
            expected="torch.bfloat16 or torch.float32",
            got=str(dtype),
            remedy="The kernel stores bf16; fp32 shows the accumulators.",
        )
    tokens, hidden_size, inner = _check_weights(hidden, "hidden", gate_up_weights, down_weights, where)
    check_multiple(tokens, 8, "S", "the loader reads groups of 8 rows", where=where, argument="hidden")
    check_same_device({"hidden": hidden, "gate_up_weights": gate_up_weights, "down_weights": down_weights}, where=where)

    def checkpoint(wanted: bool) -> Tensor | None:
        return torch.empty((tokens, inner), dtype=dtype, device=hidden.device) if wanted else None

    save = Checkpoints(
        gate=checkpoint(save_gate_pre),
        up=checkpoint(save_up),
        gate_act=checkpoint(save_gate_act),
        intermediate=checkpoint(save_hidden),
    )
    loader = make_loader("mxfp8", hidden.device, tokens, torch.bfloat16, lone_384=True)
    out = torch.empty((tokens, hidden_size), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        ffn_forward(RowSource(hidden), _split(gate_up_weights, down_weights), loader, out, save=save)
    return MLPForward(out.to(dtype), save.gate, save.gate_act, save.up, save.intermediate)


def mlp_backward_mxfp8(
    output_grad: Tensor,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_proj_weight: Tensor,
    *,
    gate_pre: Tensor | None = None,
    gate_act: Tensor | None = None,
    up: Tensor | None = None,
    intermediate: Tensor | None = None,
    release: str = "2.31",
) -> MLPBackward:
    """Compute what ``mlp_backward_mxfp8_nki`` computes from raw bf16 operands.

    Any of the four checkpoints may be missing. If gate_pre or up is, both projections are multiplied again and only the
    missing one is replaced; a missing gate_act is ``bf16(silu(gate_pre))``, a missing intermediate
    ``bf16(gate_act * up)``: not the same bits as the forward's, which reads fp32 accumulators.

    Args:
        output_grad: bf16 ``[S, H]``; S and H multiples of 128.
        hidden_states: bf16 ``[S, H]``.
        gate_up_weights: bf16 ``[2I, H]``, gate rows first; I a multiple of 128.
        down_proj_weight: bf16 ``[H, I]``.
        gate_pre: bf16 ``[S, I]`` checkpoint.
        gate_act: bf16 ``[S, I]`` checkpoint.
        up: bf16 ``[S, I]`` checkpoint.
        intermediate: bf16 ``[S, I]`` checkpoint.
        release: ``"2.31"`` (and later) contracts dX over gate and up as one axis of 2I; ``"2.30"`` over each I, which
            groups other values unless I is a multiple of 512.

    Returns:
        The three gradients.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    where = "mlp_backward_mxfp8"
    operands = {
        "output_grad": output_grad,
        "hidden_states": hidden_states,
        "gate_up_weights": gate_up_weights,
        "down_proj_weight": down_proj_weight,
    }
    checkpoints = {"gate_pre": gate_pre, "gate_act": gate_act, "up": up, "intermediate": intermediate}
    tokens, hidden_size, inner = _check_backward(operands, checkpoints, release, where)
    weights = _split(gate_up_weights, down_proj_weight)
    old = release == "2.30"
    loader = make_loader("mxfp8", hidden_states.device, tokens, torch.bfloat16, lone_384=old)
    d_gate_up, d_down = torch.empty_like(gate_up_weights), torch.empty_like(down_proj_weight)
    d_x = torch.empty((tokens, hidden_size), dtype=torch.float32, device=hidden_states.device)
    grads = FFNGrads(d_gate_up[:inner], d_gate_up[inner:], d_down, d_x, rounded=torch.bfloat16)
    with torch.no_grad():
        if gate_pre is None or up is None:
            gate_again, up_again = project_gate_up(RowSource(hidden_states), weights, loader)
            gate_pre = gate_again if gate_pre is None else gate_pre
            up = up_again if up is None else up
        saved = Checkpoints(gate_pre, up, gate_act, intermediate)
        source, target = RowSource(hidden_states), RowSource(output_grad)
        FFNBackward(target, source, weights, loader, grads, saved, fused_phase2=not old).run()
    return MLPBackward(d_x.to(torch.bfloat16), d_gate_up, d_down)


def _check_backward(
    operands: dict[str, Tensor], checkpoints: dict[str, Tensor | None], release: str, where: str
) -> tuple[int, int, int]:
    """Check the backward's arguments, by name; return S, H and I."""
    if release not in RELEASES:
        raise refuse(
            ConfigError,
            where=where,
            argument="release",
            expected=f"one of {', '.join(RELEASES)}",
            got=repr(release),
            remedy="Later releases compute as 2.31 does.",
        )
    for name, tensor in operands.items():
        check_dtype(tensor, _RAW, where=where, argument=name)
    weights = (operands["gate_up_weights"], operands["down_proj_weight"])
    tokens, hidden_size, inner = _check_weights(operands["hidden_states"], "hidden_states", *weights, where)
    check_shape(operands["output_grad"], (tokens, hidden_size), "[S, H]", where=where, argument="output_grad")
    rule = "tokens are the contraction axis of the weight gradients"
    check_multiple(tokens, 128, "S", rule, where=where, argument="hidden_states")
    for name, checkpoint in checkpoints.items():
        if checkpoint is not None:
            check_dtype(checkpoint, _RAW, where=where, argument=name)
            check_shape(checkpoint, (tokens, inner), "[S, I]", where=where, argument=name)
    check_same_device({**operands, **checkpoints}, where=where)
    return tokens, hidden_size, inner


def _check_weights(
    x: Tensor, x_name: str, gate_up_weights: Tensor, down_weights: Tensor, where: str
) -> tuple[int, int, int]:
    """Check x ``[S, H]``, ``[2I, H]`` and ``[H, I]`` against each other; return S, H and I."""
    check_shape(x, (None, None), "[S, H]", where=where, argument=x_name)
    tokens, hidden_size = x.shape
    check_multiple(hidden_size, 128, "H", "the contraction axis of gate and up", where=where, argument=x_name)
    check_shape(gate_up_weights, (None, hidden_size), "[2I, H]", where=where, argument="gate_up_weights")
    check_multiple(
        gate_up_weights.shape[0], 2, "2I", "gate rows, then up rows", where=where, argument="gate_up_weights"
    )
    inner = gate_up_weights.shape[0] // 2
    check_multiple(inner, 128, "I", "the contraction axis of down", where=where, argument="gate_up_weights")
    name = "down_weights" if where == "mlp_forward_mxfp8" else "down_proj_weight"
    check_shape(down_weights, (hidden_size, inner), "[H, I]", where=where, argument=name)
    return tokens, hidden_size, inner


def _split(gate_up_weights: Tensor, down_weights: Tensor) -> FFNWeights:
    inner = gate_up_weights.shape[0] // 2
    return FFNWeights(gate_up_weights[:inner], gate_up_weights[inner:], down_weights)
