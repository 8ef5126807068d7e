"""The MXFP8 MLP backward of nki-library 2.30: transposed operands and scratch buffers come from the caller.

Legend: S tokens, H hidden, I intermediate (which this release calls hidden). Differences to 2.31 that change values:
phase 2 is one product per half along K = I; phase 4 reads the caller's ``hidden_T`` and nothing else; a raw contraction
axis of exactly 384 is one tile.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_multiple, check_same_device
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.launch_record import note_launch, scheduling
from hf_neuron_moe.reference.mlp_mxfp8.backward import BackwardOperands, ScratchBuffers, run_backward
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    check_buffer,
    check_even,
    check_logical,
    check_no_mix_at_384,
    check_raw_axis,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import KeptActivations, step_options
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.mlp_mxfp8.shape_config import get_backward_config_for_shape

get_config_for_shape = get_backward_config_for_shape
"""Upstream's name for it in the backward's module."""

_OPERANDS = {
    "output_hidden_states_grad": ("output_grad", "H", "S"),
    "down_proj_weight_T": ("down_weight", "H", "I"),
    "gate_proj_weight_T": ("gate_weight", "I", "H"),
    "up_proj_weight_T": ("up_weight", "I", "H"),
    "hidden_states_T": ("hidden_states_T", "S", "H"),
    "hidden_states": ("hidden_states", "H", "S"),
    "gate_up_weights": ("gate_up_weights", "H", "2I"),
    "output_grad_T": ("output_grad_T", "S", "H"),
    "hidden_T": ("hidden_T", "S", "I"),
}
"""Argument: prefix of its ``_scales`` and ``_is_swizzled``, contraction axis, free axis."""


@public
def mlp_backward_mxfp8_nki_2_30(
    output_hidden_states_grad: Tensor,
    hidden_states: Tensor,
    gate_proj_weight_T: Tensor,
    up_proj_weight_T: Tensor,
    down_proj_weight_T: Tensor,
    gate_up_weights: Tensor,
    d_gate_scratch: Tensor,
    d_up_scratch: Tensor,
    hidden_states_T: Tensor,
    output_grad_T: Tensor,
    hidden_T: Tensor,
    silu_up_mul_gate_grad_T_scratch: Tensor,
    gate_pre_scratch: Tensor,
    gate_act_scratch: Tensor,
    up_scratch: Tensor,
    hidden_scratch: Tensor,
    gate_pre: Tensor | None = None,
    gate_act: Tensor | None = None,
    up: Tensor | None = None,
    hidden: Tensor | None = None,
    run_with_lnc2: bool = True,
    phase1_tiles_m: int = 8, phase1_tiles_n: int = 1, phase1_tiles_k: int = 8,
    phase2_tiles_m: int = 8, phase2_tiles_n: int = 1, phase2_tiles_k: int = 8,
    phase3_tiles_m: int = 4, phase3_tiles_n: int = 1, phase3_tiles_k: int = 8,
    phase4_tiles_m: int = 4, phase4_tiles_n: int = 1, phase4_tiles_k: int = 8,
    recompute_tiles_m: int = 8, recompute_tiles_n: int = 1, recompute_tiles_k: int = 8,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    output_grad_scales: Tensor | None = None, output_grad_is_swizzled: bool = False,
    down_weight_scales: Tensor | None = None, down_weight_is_swizzled: bool = False,
    gate_weight_scales: Tensor | None = None, gate_weight_is_swizzled: bool = False,
    up_weight_scales: Tensor | None = None, up_weight_is_swizzled: bool = False,
    hidden_states_T_scales: Tensor | None = None, hidden_states_T_is_swizzled: bool = False,
    hidden_states_scales: Tensor | None = None, hidden_states_is_swizzled: bool = False,
    gate_up_weights_scales: Tensor | None = None, gate_up_weights_is_swizzled: bool = False,
    output_grad_T_scales: Tensor | None = None, output_grad_T_is_swizzled: bool = False,
    hidden_T_scales: Tensor | None = None, hidden_T_is_swizzled: bool = False,
    *,
    mx_scale_rule: str = "neuron",
) -> MLPBackward:  # fmt: skip
    """Run the backward as documented for nki-library 2.30 (there ``mlp_backward_mxfp8_nki``).

    * Raw operands bf16: output_hidden_states_grad, hidden_states ``[S, H]``; gate_proj_weight_T, up_proj_weight_T
      ``[H, I]``; down_proj_weight_T ``[I, H]``; gate_up_weights ``[2I, H]``; hidden_states_T, output_grad_T ``[H, S]``;
      hidden_T ``[I, S]``. Each may be pre-swizzled ``[K/4, 4F]`` or, with scales, x4 ``[K/4, F]``.
    * gate_pre, gate_act, up, hidden: bf16 ``[S, I]`` checkpoints, each may be missing.
    * Overwritten, all bf16: d_gate_scratch, d_up_scratch ``[S, I]``; silu_up_mul_gate_grad_T_scratch ``[2I, S]`` (both
      transposed); gate_pre_scratch and up_scratch (both, if either is missing), gate_act_scratch and hidden_scratch
      (where missing) ``[S, I]``.
    * hidden_T is what phase 4 reads, always: neither the hidden checkpoint nor hidden_scratch affects a gradient.
    * mx_scale_rule: ``"neuron"`` (nki 0.5 and later) or ``"floor"`` (earlier), for everything quantized here.
    * Tile counts are positive and recorded; run_with_lnc2 needs even sizes. fp8_x4_dtype: e4m3.

    Raises DTypeError, ShapeError, DeviceError or ConfigError: S and I must be multiples of 128, H too while an operand
    contracted over H is raw; scales in the announced layout; raw and prepared operands never mixed on a contraction of
    384 (d_gate, d_up and their transposes are always raw).
    """
    call = dict(locals())
    options = scheduling(call)
    scale_rule(mx_scale_rule)
    tds = {
        name: describe(call, name, prefix, f"[{free}, {contraction}]", BF16)
        for name, (prefix, contraction, free) in _OPERANDS.items()
    }
    kept = KeptActivations(gate_pre, gate_act, up, hidden)
    sizes = _check_operands(tds, kept, run_with_lnc2)
    recomputed = KeptActivations(gate_pre_scratch, gate_act_scratch, up_scratch, hidden_scratch)
    for name in (name for name in call if name.endswith("_scratch")):
        names = "2IS" if name == "silu_up_mul_gate_grad_T_scratch" else "SI"
        rows, columns = names[:-1], names[-1]
        check_buffer(call[name], (sizes[rows], sizes[columns]), f"[{rows}, {columns}]", name)
    check_same_device({name: value for name, value in call.items() if isinstance(value, Tensor)})
    note_launch("mlp_backward_mxfp8_nki_2_30", options)
    operands = BackwardOperands(
        output_grad=tds["output_hidden_states_grad"],
        hidden_states=tds["hidden_states"],
        gate_up=tds["gate_up_weights"],
        weights_T=(tds["gate_proj_weight_T"], tds["up_proj_weight_T"]),
        down_T=tds["down_proj_weight_T"],
        output_grad_T=tds["output_grad_T"],
        hidden_states_T=tds["hidden_states_T"],
        intermediate_T=tds["hidden_T"],
        kept=kept,
    )
    with torch.no_grad():
        scratch = ScratchBuffers(d_gate_scratch, d_up_scratch, silu_up_mul_gate_grad_T_scratch, recomputed)
        return run_backward(operands, step_options(call), scratch=scratch)


def _check_operands(tds: dict[str, TensorDescriptor], kept: KeptActivations, run_with_lnc2: bool) -> dict[str, int]:
    """Check the nine operands against each other and the rules of the release; return S, H, I and 2I."""
    sizes = _sizes(tds)
    for name, (_, contraction, free) in _OPERANDS.items():
        check_logical(tds[name], sizes[contraction], sizes[free], f"[{free}, {contraction}]", name)
    even = {"output_hidden_states_grad": "S", "down_proj_weight_T": "I", "output_grad_T": "H"}
    check_even({f"{axis} of {name}": sizes[axis] for name, axis in even.items()}, run_with_lnc2)
    # Products by their contraction axis. d_gate, d_up and their transposes are always raw.
    products = [
        ("output_hidden_states_grad", "down_proj_weight_T", "H"),
        ("gate_proj_weight_T", "d_gate (always)", "I"),
        ("up_proj_weight_T", "d_up (always)", "I"),
        ("hidden_states_T", "the transposed d_gate and d_up (always)", "S"),
        ("output_grad_T", "hidden_T", "S"),
    ]
    if kept.gate_pre is None or kept.up is None:
        products.append(("hidden_states", "gate_up_weights", "H"))
    for name in (name for *names, axis in products if axis == "H" for name in names):
        check_raw_axis(tds[name], "H", name)
    rule = "the kernel always quantizes d_gate and d_up along I itself"
    check_multiple(sizes["I"], 128, "I of down_proj_weight_T", rule)
    rule = "the kernel always quantizes the transposes of d_gate and d_up along S itself"
    check_multiple(sizes["S"], 128, "S of output_hidden_states_grad", rule)
    kept.check((sizes["S"], sizes["I"]), {"intermediate": "hidden"})
    raw = TensorDescriptor()
    for *names, axis in products:
        check_no_mix_at_384({name: tds.get(name, raw) for name in names}, sizes[axis])
    return sizes


def _sizes(tds: dict[str, TensorDescriptor]) -> dict[str, int]:
    """Return what most operands say about S, H, I and 2I, so that a wrong one does not accuse all others."""
    votes: dict[str, Counter[int]] = {axis: Counter() for axis in "SHI"}
    for name, (_, *axes) in _OPERANDS.items():
        for axis, size in zip(axes, tds[name].logical_shape):
            votes[axis[-1]][size // 2 if axis == "2I" else size] += 1
    sizes = {axis: counts.most_common(1)[0][0] for axis, counts in votes.items()}
    return sizes | {"2I": 2 * sizes["I"]}
