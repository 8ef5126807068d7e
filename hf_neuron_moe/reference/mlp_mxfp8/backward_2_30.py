"""The MXFP8 MLP backward of nki-library 2.30: transposed operands and scratch buffers come from the caller.

Legend: S tokens, H hidden, I intermediate (which this release calls hidden). Differences to 2.31 that change values:
phase 2 is one product per half along K = I, and phase 4 reads the caller's ``hidden_T`` and nothing else. A raw
contraction axis of exactly 384 is one tile.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_multiple, check_same_device
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.described_operand import TensorDescriptor, check_raw_axis
from hf_neuron_moe.reference.mlp_mxfp8.backward import MLPBackward, run_backward
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import counted_configs, get_backward_config_for_shape
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    KernelCall,
    check_buffer,
    check_logical,
    check_no_mix_at_384,
)
from hf_neuron_moe.reference.specification import described_function, multiples

_MULTIPLES = multiples("mlp_backward")
get_config_for_shape = get_backward_config_for_shape
"""Upstream's name for it in the backward's module."""

_FUNCTION = described_function("mlp_backward", "mlp_backward_mxfp8_nki_2_30")
_OPERANDS: dict[str, tuple[str, str, str]] = _FUNCTION["operands"]
"""Argument: prefix of its ``_scales`` and ``_is_swizzled``, contraction axis, free axis."""

_RENAMED: dict[str, str] = _FUNCTION["renamed"]
"""Tensors that :func:`run_backward` knows under another name; buffers without their ``_scratch``."""


@public
def mlp_backward_mxfp8_nki_2_30(
    output_hidden_states_grad: Tensor, hidden_states: Tensor, gate_proj_weight_T: Tensor, up_proj_weight_T: Tensor,
    down_proj_weight_T: Tensor, gate_up_weights: Tensor, d_gate_scratch: Tensor, d_up_scratch: Tensor,
    hidden_states_T: Tensor, output_grad_T: Tensor, hidden_T: Tensor, silu_up_mul_gate_grad_T_scratch: Tensor,
    gate_pre_scratch: Tensor, gate_act_scratch: Tensor, up_scratch: Tensor, hidden_scratch: Tensor,
    gate_pre: Tensor | None = None, gate_act: Tensor | None = None, up: Tensor | None = None,
    hidden: Tensor | None = None,
    run_with_lnc2: bool = True,
    phase1_tiles_m: int = 8, phase1_tiles_n: int = 1, phase1_tiles_k: int = 8,
    phase2_tiles_m: int = 8, phase2_tiles_n: int = 1, phase2_tiles_k: int = 8,
    phase3_tiles_m: int = 4, phase3_tiles_n: int = 1, phase3_tiles_k: int = 8,
    phase4_tiles_m: int = 4, phase4_tiles_n: int = 1, phase4_tiles_k: int = 8,
    recompute_tiles_m: int = 8, recompute_tiles_n: int = 1, recompute_tiles_k: int = 8,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True, use_scale_packing: bool = True,
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
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> MLPBackward:  # fmt: skip
    """Run the backward as documented for nki-library 2.30 (there ``mlp_backward_mxfp8_nki``).

    * Raw operands are bf16: output_hidden_states_grad, hidden_states ``[S, H]``; gate_proj_weight_T, up_proj_weight_T
      ``[H, I]``; down_proj_weight_T ``[I, H]``; gate_up_weights ``[2I, H]``; hidden_states_T, output_grad_T ``[H, S]``;
      hidden_T ``[I, S]``. Each may be pre-swizzled ``[K/4, 4F]`` or, with scales, x4 ``[K/4, F]``.
    * gate_pre, gate_act, up, hidden: bf16 ``[S, I]`` checkpoints, each may be missing.
    * Overwritten: silu_up_mul_gate_grad_T_scratch, bf16 ``[2I, S]``, d_gate and d_up transposed; the others bf16
      ``[S, I]``, those of checkpoints where these are missing (of gate_pre and up both, if either is).
    * S and I are multiples of 128, H too while an operand contracted over H is raw, all even for run_with_lnc2. Raw and
      prepared operands are never mixed on a contraction of 384 (d_gate, d_up and their transposes are always raw).
    """
    kernel = KernelCall("mlp_backward_mxfp8_nki_2_30", locals())
    call = kernel.call
    tds = {
        name: kernel.describe(name, prefix, f"[{free}, {contraction}]", BF16)
        for name, (prefix, contraction, free) in _OPERANDS.items()
    }
    kept = {name: call[name] for name in ("gate_pre", "gate_act", "up", "hidden") if call[name] is not None}
    sizes = _check_operands(kernel, tds, kept)
    scratch = {name.removesuffix("_scratch"): tensor for name, tensor in call.items() if name.endswith("_scratch")}
    for name, tensor in scratch.items():
        rows, columns = ("2I", "S") if name.endswith("_T") else ("S", "I")
        check_buffer(tensor, (sizes[rows], sizes[columns]), f"[{rows}, {columns}]", f"{name}_scratch")
    check_same_device({name: value for name, value in call.items() if isinstance(value, Tensor)})
    configs = counted_configs(call, (sizes["S"], sizes["H"], sizes["I"]), run_with_lnc2)
    kernel.launch()
    described = tds | {name: TensorDescriptor(tensor) for name, tensor in kept.items()}
    operands = {_RENAMED.get(name, name): td for name, td in described.items()}
    buffers = {_RENAMED.get(name, name): tensor for name, tensor in scratch.items()}
    with torch.no_grad():
        return run_backward(operands, kernel.step_options(), buffers=buffers, configs=configs)


def _check_operands(kernel: KernelCall, tds: dict[str, TensorDescriptor], kept: dict[str, Tensor]) -> dict[str, int]:
    """Check the nine operands and the checkpoints against each other and the rules; return S, H, I and 2I."""
    sizes = _sizes(tds)
    for name, (_, contraction, free) in _OPERANDS.items():
        check_logical(tds[name], sizes[contraction], sizes[free], f"[{free}, {contraction}]", name)
    even = {"output_hidden_states_grad": "S", "down_proj_weight_T": "I", "output_grad_T": "H"}
    kernel.check_even({f"{axis} of {name}": sizes[axis] for name, axis in even.items()})
    # Products by their contraction axis. d_gate, d_up and their transposes are always raw.
    products = [
        ("output_hidden_states_grad", "down_proj_weight_T", "H"),
        ("gate_proj_weight_T", "d_gate (always)", "I"),
        ("up_proj_weight_T", "d_up (always)", "I"),
        ("hidden_states_T", "the transposed d_gate and d_up (always)", "S"),
        ("output_grad_T", "hidden_T", "S"),
    ]
    if not {"gate_pre", "up"} <= kept.keys():
        products.append(("hidden_states", "gate_up_weights", "H"))
    for *names, axis in products:
        for name in names if axis == "H" else ():
            check_raw_axis(tds[name], "H", name)
    rule = "the kernel always quantizes d_gate and d_up along I itself"
    check_multiple(sizes["I"], _MULTIPLES["I"], "I of down_proj_weight_T", rule)
    rule = "the kernel always quantizes the transposes of d_gate and d_up along S itself"
    check_multiple(sizes["S"], _MULTIPLES["S"], "S of output_hidden_states_grad", rule)
    for name, tensor in kept.items():
        check_buffer(tensor, (sizes["S"], sizes["I"]), "[S, I]", name)
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
