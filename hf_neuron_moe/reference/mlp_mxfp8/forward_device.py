"""The MXFP8 MLP forward as the device offers it: documented argument order and defaults, buffers filled in place.

Letters and arithmetic as in :mod:`hf_neuron_moe.reference.mlp_mxfp8.forward`. Tile counts, spilling and LNC are checked
and recorded by :func:`~hf_neuron_moe.reference.launch_record.record_launches`; they do not change values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_same_device
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.launch_record import note_launch, scheduling
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    ForwardBuffers,
    ForwardOperands,
    ForwardTensors,
    intermediate_operand,
    run_forward,
)
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    STORED,
    StepCall,
    check_buffer,
    check_even,
    check_grouping,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.shape_config import get_forward_config_for_shape

get_config_for_shape = get_forward_config_for_shape
"""Upstream's name for it in the forward's module."""


@public
def mlp_forward_mxfp8_nki(
    hidden: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    intermediate_hbm: Tensor,
    run_with_lnc2: bool = True,
    gate_up_tiles_m: int = 8,
    gate_up_tiles_n: int = 1,
    gate_up_tiles_k: int = 8,
    down_tiles_m: int = 8,
    down_tiles_n: int = 1,
    down_tiles_k: int = 8,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    save_gate_pre: Tensor | None = None,
    save_gate_act: Tensor | None = None,
    save_up: Tensor | None = None,
    save_hidden: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    hidden_scales: Tensor | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    hidden_is_swizzled: bool = False,
    gate_up_is_swizzled: bool = False,
    down_is_swizzled: bool = False,
    *,
    mx_scale_rule: str = "neuron",
) -> Tensor:
    """Run the forward as documented for nki-library 2.30 to 2.33; return the output ``[S, H]`` of `dtype`.

    Operands, scales, `dtype`, `mx_scale_rule` and errors:
    :func:`~hf_neuron_moe.reference.mlp_mxfp8.forward.mlp_forward_mxfp8`.

    * intermediate_hbm: bf16 ``[S, I]``, receives the intermediate; untouched where save_hidden (likewise) is given.
    * save_gate_pre, save_gate_act, save_up: ``[S, I]`` bf16 or fp32, receive the fp32 values, cast once.
    * tiles, spill_reload: positive counts and a bool, recorded. run_with_lnc2: S is even. fp8_x4_dtype: e4m3.

    Upstream is silent and wrong about scales in the other layout, operands that do not fit each other and mixed modes
    at a contraction of 384, and ignores fp8_x4_dtype: all of these are refused here.
    """
    call = dict(locals())
    options = scheduling(call)
    rule = scale_rule(mx_scale_rule)
    tds = ForwardTensors.of(call)
    check_even({"S of hidden": tds.hidden.logical_shape[1]}, run_with_lnc2)
    tokens, hidden_size, inner = tds.check(dtype)
    saves = ("save_gate_pre", "save_gate_act", "save_up")
    given = ["intermediate_hbm", *(name for name in (*saves, "save_hidden") if call[name] is not None)]
    for name in given:
        check_buffer(call[name], (tokens, inner), "[S, I]", name, STORED if name in saves else BF16)
    check_same_device({name: call[name] for name in ("hidden", *given)})
    note_launch("mlp_forward_mxfp8_nki", options)
    output = torch.empty((tokens, hidden_size), dtype=dtype, device=hidden.device)
    intermediate = intermediate_hbm if save_hidden is None else save_hidden
    saved = ForwardBuffers(save_gate_pre, save_gate_act, save_up)
    run_forward(tds.operands(rule), intermediate, output, saved, slice(0, tokens))
    return output


@public
def compute_fused_gate_up_down_mxfp8(
    hidden_td: TensorDescriptor,
    gate_up_td: TensorDescriptor,
    down_w_td: TensorDescriptor,
    int_td: TensorDescriptor,
    output_td: TensorDescriptor,
    s_base_offset: int,
    dtype: torch.dtype,
    TILES_IN_BLOCK_M: int = 8,
    TILES_IN_BLOCK_N_GU: int = 1,
    TILES_IN_BLOCK_K_GU: int = 8,
    TILES_IN_BLOCK_M_DOWN: int = 8,
    TILES_IN_BLOCK_N_DOWN: int = 1,
    TILES_IN_BLOCK_K_DOWN: int = 8,
    save_gate_pre_td: TensorDescriptor | None = None,
    save_gate_act_td: TensorDescriptor | None = None,
    save_up_td: TensorDescriptor | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron",
) -> None:
    """Run one core's share of the forward: rows from s_base_offset on, half of S under LNC2, otherwise all of S.

    * hidden_td (F = S, K = H), gate_up_td (F = 2I, K = H), down_w_td (F = H, K = I): operands in any mode.
    * int_td (bf16 ``[S, I]``) and output_td (``[S, H]`` of `dtype`, bf16 or fp32): this core's rows are overwritten.
    * save_gate_pre_td, save_gate_act_td, save_up_td: ``[S, I]`` bf16 or fp32, likewise; None is not kept.
    * mx_scale_rule: block scale rule. TILES_IN_BLOCK_*, spill_reload: recorded, no effect on values.

    Errors as :func:`mlp_forward_mxfp8`, and ConfigError for rows out of range.
    """
    step = StepCall("compute_fused_gate_up_down_mxfp8", locals(), lone_384=True)
    names = ("hidden_td", "gate_up_td", "down_w_td")
    operands = ForwardOperands(*(step.operand(name) for name in names))
    tokens, hidden_size, inner = ForwardTensors(hidden_td, gate_up_td, down_w_td, names).check(dtype)
    check_grouping({"hidden_td": operands.hidden, "gate_up_td": operands.gate_up})
    rows, square = step.rows("s_base_offset", tokens), (tokens, inner)
    intermediate = step.buffer("int_td", square, "[S, I]")
    read_back = intermediate_operand(TensorDescriptor(intermediate), operands)
    check_grouping({"down_w_td": operands.down, "int_td": read_back})
    output = step.buffer("output_td", (tokens, hidden_size), "[S, H]", (dtype,))
    saves = ("save_gate_pre_td", "save_gate_act_td", "save_up_td")
    saved = [step.buffer(name, square, "[S, I]", STORED) if step.call[name] is not None else None for name in saves]
    step.launch()
    run_forward(operands, intermediate, output, ForwardBuffers(*saved), rows)
