"""The MXFP8 MLP forward as the device offers it: documented argument order and defaults, buffers filled in place.

Letters and arithmetic as in :mod:`hf_neuron_moe.reference.mlp_mxfp8.forward`. Tile counts, spilling and LNC are checked
and recorded by :func:`~hf_neuron_moe.reference.launch_record.record_launches`; they do not change values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_same_device
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.launch_record import note_launch
from hf_neuron_moe.reference.mlp_mxfp8.arguments import (
    check_buffer,
    check_descriptor,
    check_even,
    check_grouping,
    check_launch,
    check_packing,
    core_rows,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    STORED,
    ForwardBuffers,
    ForwardOperands,
    check_forward,
    describe_forward,
    intermediate_operand,
    run_forward,
)
from hf_neuron_moe.reference.mlp_mxfp8.shape_config import get_forward_config_for_shape
from hf_neuron_moe.reference.mx_operand import TensorDescriptor

get_config_for_shape = get_forward_config_for_shape
"""Upstream's name for it in the forward's module."""

_ROUNDED = (torch.bfloat16,)


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
    where = "mlp_forward_mxfp8_nki"
    tiles = {
        "gate_up_tiles_m": gate_up_tiles_m, "gate_up_tiles_n": gate_up_tiles_n, "gate_up_tiles_k": gate_up_tiles_k,
        "down_tiles_m": down_tiles_m, "down_tiles_n": down_tiles_n, "down_tiles_k": down_tiles_k,
    }  # fmt: skip
    flags = {"run_with_lnc2": run_with_lnc2, "spill_reload": spill_reload, "use_scale_packing": use_scale_packing}
    check_launch(tiles, flags, fp8_x4_dtype)
    rule = scale_rule(mx_scale_rule)
    tds = describe_forward(
        use_scale_packing,
        hidden=(hidden, hidden_scales, hidden_is_swizzled),
        gate_up=(gate_up_weights, gate_up_scales, gate_up_is_swizzled),
        down=(down_weights, down_scales, down_is_swizzled),
    )
    check_even({"hidden": (tds[0].logical_shape[1], "S")}, run_with_lnc2)
    tokens, hidden_size, inner = check_forward(*tds, dtype)
    saves = {"save_gate_pre": save_gate_pre, "save_gate_act": save_gate_act, "save_up": save_up}
    targets = {"intermediate_hbm": intermediate_hbm, **({} if save_hidden is None else {"save_hidden": save_hidden})}
    for dtypes, buffers in ((_ROUNDED, targets), (STORED, {k: v for k, v in saves.items() if v is not None})):
        for name, buffer in buffers.items():
            check_buffer(buffer, (tokens, inner), "[S, I]", dtypes, argument=name)
    check_same_device({"hidden": hidden, **targets, **saves})
    note_launch(where, fp8_x4_dtype=fp8_x4_dtype, **tiles, **flags)
    output = torch.empty((tokens, hidden_size), dtype=dtype, device=hidden.device)
    with torch.no_grad():
        intermediate = intermediate_hbm if save_hidden is None else save_hidden
        saved = ForwardBuffers(save_gate_pre, save_gate_act, save_up)
        run_forward(ForwardOperands.of(*tds, rule), intermediate, output, saved, slice(0, tokens))
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
    where = "compute_fused_gate_up_down_mxfp8"
    tiles = {
        "TILES_IN_BLOCK_M": TILES_IN_BLOCK_M, "TILES_IN_BLOCK_N_GU": TILES_IN_BLOCK_N_GU,
        "TILES_IN_BLOCK_K_GU": TILES_IN_BLOCK_K_GU, "TILES_IN_BLOCK_M_DOWN": TILES_IN_BLOCK_M_DOWN,
        "TILES_IN_BLOCK_N_DOWN": TILES_IN_BLOCK_N_DOWN, "TILES_IN_BLOCK_K_DOWN": TILES_IN_BLOCK_K_DOWN,
    }  # fmt: skip
    flags = {"spill_reload": spill_reload, "use_scale_packing": use_scale_packing, "run_with_lnc2": run_with_lnc2}
    check_launch(tiles, flags, torch.float8_e4m3fn)
    names = ("hidden_td", "gate_up_td", "down_w_td")
    tds = (hidden_td, gate_up_td, down_w_td)
    for name, td in zip(names, tds, strict=True):
        check_descriptor(td, argument=name)
        check_packing(td, use_scale_packing, argument=name)
    operands = ForwardOperands.of(*tds, scale_rule(mx_scale_rule), names)
    tokens, hidden_size, inner = check_forward(*tds, dtype, names)
    check_grouping({"hidden_td": operands.hidden, "gate_up_td": operands.gate_up})
    rows, square = core_rows(tokens, s_base_offset, run_with_lnc2), (tokens, inner)
    inter = check_buffer(int_td.data, square, "[S, I]", _ROUNDED, argument="int_td")
    read_back = intermediate_operand(TensorDescriptor(inter), operands)
    check_grouping({"down_w_td": operands.down, "int_td": read_back})
    output = check_buffer(output_td.data, (tokens, hidden_size), "[S, H]", (dtype,), argument="output_td")
    saves = {"save_gate_pre_td": save_gate_pre_td, "save_gate_act_td": save_gate_act_td, "save_up_td": save_up_td}
    saved = [
        None if td is None else check_buffer(td.data, square, "[S, I]", STORED, argument=name)
        for name, td in saves.items()
    ]
    note_launch(where, s_base_offset=s_base_offset, **tiles, **flags)
    with torch.no_grad():
        run_forward(operands, inter, output, ForwardBuffers(*saved), rows)
