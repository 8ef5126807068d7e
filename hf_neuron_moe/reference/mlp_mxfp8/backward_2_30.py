"""The MXFP8 MLP backward of nki-library 2.30: transposed operands and scratch buffers come from the caller.

Legend: S tokens, H hidden, I intermediate (which this release calls hidden). Differences to 2.31 that change values:
phase 2 is one product per half along K = I; phase 4 reads the caller's ``hidden_T`` and nothing else; a raw contraction
axis of exactly 384 is one tile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_multiple, check_same_device
from hf_neuron_moe.errors import public
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.launch_record import note_launch
from hf_neuron_moe.reference.mlp_mxfp8.arguments import (
    check_buffer,
    check_even,
    check_launch,
    check_logical,
    check_no_mix_at_384,
    check_raw_axis,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward import check_kept
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    BF16,
    StepOptions,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import KeptActivations, recompute_missing
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.mlp_mxfp8.shape_config import get_backward_config_for_shape
from hf_neuron_moe.reference.mx_operand import TensorDescriptor

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
    # Sixty arguments: gathered by name once, checked and described by name below.
    return _from_call(dict(locals()))


@dataclass(frozen=True)
class Scratch230:
    """Buffers that the kernel leaves its intermediate results in; None is not wanted."""

    d_gate: Tensor | None = None
    d_up: Tensor | None = None
    transposed: Tensor | None = None
    recomputed: KeptActivations = field(default_factory=KeptActivations)


def run_2_30(
    tds: dict[str, TensorDescriptor],
    kept: KeptActivations,
    scratch: Scratch230,
    *,
    use_scale_packing: bool,
    rule: ScaleRule,
) -> MLPBackward:
    """Check the operands against each other, recompute what is missing, run the four phases.

    Args:
        tds: the nine operands by argument name.
        kept: the checkpoints.
        scratch: buffers to fill.
        use_scale_packing: layout of all scales.
        rule: block scale rule.
    """
    tokens, hidden_size, inner = _check_operands(tds, kept)
    grad = tds["output_hidden_states_grad"].data
    assert grad is not None

    def empty(rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.bfloat16, device=grad.device)

    found = recompute_missing(
        kept, scratch.recomputed, tds["hidden_states"], tds["gate_up_weights"],
        use_scale_packing=use_scale_packing, lone_384=True, rule=rule,
    )  # fmt: skip
    d_gate_up = empty(tokens, 2 * inner)
    transposed = d_gate_up.t() if scratch.transposed is None else scratch.transposed
    bf16, flags = (
        torch.bfloat16,
        StepOptions(use_scale_packing=use_scale_packing, run_with_lnc2=False, mx_scale_rule=rule.value),
    )
    gate_pre_td, gate_act_td, up_td = (TensorDescriptor(t) for t in (found.gate_pre, found.gate_act, found.up))
    compute_phase1_down_proj_mm_grad_mxfp8(
        tds["output_hidden_states_grad"], gate_pre_td, gate_act_td, up_td, TensorDescriptor(d_gate_up),
        None if scratch.transposed is None else TensorDescriptor(transposed), tds["down_proj_weight_T"], 0, bf16,
        lone_384=True, **flags,
    )  # fmt: skip
    d_gate, d_up = d_gate_up[:, :inner], d_gate_up[:, inner:]
    for buffer, values in ((scratch.d_gate, d_gate), (scratch.d_up, d_up)):
        if buffer is not None:
            buffer.copy_(values)
    grads = MLPBackward(empty(tokens, hidden_size), empty(2 * inner, hidden_size), empty(hidden_size, inner))
    d_x_td, d_weight_td, d_down_td = (TensorDescriptor(tensor) for tensor in grads)
    compute_phase2_hidden_states_grad_mxfp8_2_30(
        d_x_td, tds["gate_proj_weight_T"], tds["up_proj_weight_T"], TensorDescriptor(d_gate), TensorDescriptor(d_up),
        0, bf16, **flags,
    )  # fmt: skip
    compute_phase3_gate_up_weight_grad_mxfp8(
        d_weight_td, tds["hidden_states_T"], TensorDescriptor(transposed), bf16, lone_384=True, **flags
    )
    compute_phase4_down_weight_grad_mxfp8(
        d_down_td, tds["output_grad_T"], tds["hidden_T"], 0, bf16, lone_384=True, **flags
    )
    return grads


@public("mlp_backward_mxfp8_nki_2_30")
def _from_call(call: dict[str, Any]) -> MLPBackward:
    """Check and describe the arguments of :func:`mlp_backward_mxfp8_nki_2_30`, then run it."""
    where = "mlp_backward_mxfp8_nki_2_30"
    tiles = {name: value for name, value in call.items() if "_tiles_" in name}
    flags = {name: call[name] for name in ("run_with_lnc2", "spill_reload", "use_scale_packing")}
    check_launch(tiles, flags, call["fp8_x4_dtype"])
    rule = scale_rule(call["mx_scale_rule"])
    tds = {
        name: describe(
            call[name],
            call[f"{prefix}_scales"],
            call[f"{prefix}_is_swizzled"],
            argument=name,
            scales_argument=f"{prefix}_scales",
            use_scale_packing=call["use_scale_packing"],
            raw_shape=f"[{free}, {contraction}]",
            raw_dtypes=BF16,
        )
        for name, (prefix, contraction, free) in _OPERANDS.items()
    }
    kept = KeptActivations(call["gate_pre"], call["gate_act"], call["up"], call["hidden"])
    sizes = _sizes(tds)
    tokens, hidden_size, inner = (sizes[axis] for axis in "SHI")
    _check_shapes(tds, sizes)
    even = {
        "output_hidden_states_grad": (tokens, "S"), "down_proj_weight_T": (inner, "I"),
        "output_grad_T": (hidden_size, "H"),
    }  # fmt: skip
    check_even(even, call["run_with_lnc2"])
    buffers = {name: call[name] for name in call if name.endswith("_scratch")}
    for name, buffer in buffers.items():
        turned = name == "silu_up_mul_gate_grad_T_scratch"
        shape, names = ((2 * inner, tokens), "[2I, S]") if turned else ((tokens, inner), "[S, I]")
        check_buffer(buffer, shape, names, BF16, argument=name)
    check_same_device({name: value for name, value in call.items() if isinstance(value, Tensor)})
    scratch = Scratch230(
        call["d_gate_scratch"], call["d_up_scratch"], call["silu_up_mul_gate_grad_T_scratch"],
        KeptActivations(*(call[f"{name}_scratch"] for name in ("gate_pre", "gate_act", "up", "hidden"))),
    )  # fmt: skip
    note_launch(where, fp8_x4_dtype=call["fp8_x4_dtype"], **tiles, **flags)
    with torch.no_grad():
        return run_2_30(tds, kept, scratch, use_scale_packing=call["use_scale_packing"], rule=rule)


def _sizes(tds: dict[str, TensorDescriptor]) -> dict[str, int]:
    """Return what most operands say about S, H, I and 2I, so that a wrong one does not accuse all others."""
    votes: dict[str, Counter[int]] = {axis: Counter() for axis in "SHI"}
    for name, (_, *axes) in _OPERANDS.items():
        for axis, size in zip(axes, tds[name].logical_shape, strict=True):
            votes[axis[-1]][size // 2 if axis == "2I" else size] += 1
    sizes = {axis: counts.most_common(1)[0][0] for axis, counts in votes.items()}
    return sizes | {"2I": 2 * sizes["I"]}


def _check_shapes(tds: dict[str, TensorDescriptor], sizes: dict[str, int]) -> None:
    for name, (_, contraction, free) in _OPERANDS.items():
        names = f"[{free}, {contraction}]"
        check_logical(tds[name], sizes[contraction], sizes[free], names, argument=name)


def _check_operands(tds: dict[str, TensorDescriptor], kept: KeptActivations) -> tuple[int, int, int]:
    """Check the nine operands against each other and the rules of the release; return S, H and I."""
    sizes = _sizes(tds)
    tokens, hidden_size, inner = (sizes[axis] for axis in "SHI")
    _check_shapes(tds, sizes)
    needs_projection = kept.gate_pre is None or kept.up is None
    contracted_over_H = ["output_hidden_states_grad", "down_proj_weight_T"]
    contracted_over_H += ["hidden_states", "gate_up_weights"] if needs_projection else []
    for name in contracted_over_H:
        check_raw_axis(tds[name], tds[name].logical_shape[0], "H", argument=name)
    rule = "the kernel always quantizes d_gate and d_up along I itself"
    check_multiple(inner, 128, "I of down_proj_weight_T", rule)
    rule = "the kernel always quantizes the transposes of d_gate and d_up along S itself"
    check_multiple(tokens, 128, "S of output_hidden_states_grad", rule)
    check_kept(kept, (tokens, inner), old_names=True)
    always_raw = TensorDescriptor()
    products = [
        ({name: tds[name] for name in ("output_hidden_states_grad", "down_proj_weight_T")}, hidden_size),
        ({"gate_proj_weight_T": tds["gate_proj_weight_T"], "d_gate (always)": always_raw}, inner),
        ({"up_proj_weight_T": tds["up_proj_weight_T"], "d_up (always)": always_raw}, inner),
        ({"hidden_states_T": tds["hidden_states_T"], "the transposed d_gate and d_up (always)": always_raw}, tokens),
        ({name: tds[name] for name in ("output_grad_T", "hidden_T")}, tokens),
    ]
    if needs_projection:
        products.append(({name: tds[name] for name in ("hidden_states", "gate_up_weights")}, hidden_size))
    for operands, size in products:
        check_no_mix_at_384(operands, size)
    return tokens, hidden_size, inner
