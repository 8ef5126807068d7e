"""One legal call of every kernel function whose support is not plain, with values that a change would show in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.formats import group_quantize_fp8, quantize_moe_down, quantize_moe_gate_up
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.kernels import TensorDescriptor

Call = dict[str, Any]
S, H, I = 128, 256, 256  # noqa: E741  # of the MLP
BF16 = torch.bfloat16


def rows(*shape: int) -> Tensor:
    return (torch.randn(shape) * 0.1).bfloat16()


def td(*shape: int) -> TensorDescriptor:
    return TensorDescriptor(rows(*shape))


def mlp_forward() -> Call:
    return {"hidden": rows(S, H), "gate_up_weights": rows(2 * I, H), "down_weights": rows(H, I)}


def fused() -> Call:
    operands = {"hidden_td": td(S, H), "gate_up_td": td(2 * I, H), "down_w_td": td(H, I)}
    return operands | {"int_td": td(S, I), "output_td": td(S, H), "s_base_offset": 0, "dtype": BF16}


def mlp_backward() -> Call:
    operands = {"output_grad": rows(S, H), "hidden_states": rows(S, H)}
    return operands | {"gate_up_weights": rows(2 * I, H), "down_proj_weight": rows(H, I)}


def mlp_backward_2_30() -> Call:
    x, grad, gate_up, down, hidden = rows(S, H), rows(S, H), rows(2 * I, H), rows(H, I), rows(S, I)
    scratch = ("d_gate", "d_up", "gate_pre", "gate_act", "up", "hidden")
    return {
        "output_hidden_states_grad": grad,
        "hidden_states": x,
        "gate_proj_weight_T": gate_up[:I].t().contiguous(),
        "up_proj_weight_T": gate_up[I:].t().contiguous(),
        "down_proj_weight_T": down.t().contiguous(),
        "gate_up_weights": gate_up,
        "hidden_states_T": x.t().contiguous(),
        "output_grad_T": grad.t().contiguous(),
        "hidden_T": hidden.t().contiguous(),
        "silu_up_mul_gate_grad_T_scratch": rows(2 * I, S),
        **{f"{name}_scratch": rows(S, I) for name in scratch},
    }


def base() -> Call:
    shapes = {
        "output_grad": (S, H), "gate_pre": (S, I), "gate_act": (S, I), "up": (S, I), "gate_up_weight_T": (H, 2 * I),
        "down_weight_T": (I, H), "d_gate_up": (S, 2 * I), "hidden_states_T": (H, S), "output_grad_T": (H, S),
        "intermediate_T": (I, S), "scratch": (2 * I, S), "hidden_states_grad": (S, H), "weight_grad": (2 * I, H),
        "down_weight_grad": (H, I),
    }  # fmt: skip
    return {f"{name}_td": td(*shape) for name, shape in shapes.items()}


def phase(left: tuple[int, int], right: tuple[int, int], names: str, **more: Any) -> Callable[[], Call]:
    """A phase with one product ``[M, K] x [N, K]``; `names` are those of its two operands."""
    one, other = names.split()
    return lambda: {
        **{name: td(*value) if isinstance(value, tuple) else value for name, value in more.items()},
        one: td(*left),
        other: td(*right),
        "dtype": BF16,
    }


def routing(block: int, top_k: int = 2, tokens: int = 128, hidden: int = 512) -> Call:
    index = torch.arange(tokens * top_k).view(tokens, top_k) % 2
    plan = build_block_plan(expert_mask(index, 2), block, top_k=top_k)
    x = rows(tokens + 1, hidden)
    x[-1] = 0
    return {
        "hidden_states": x,
        "expert_affinities_masked": masked_affinities(index, torch.rand(tokens, top_k), 2),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": block,
    }


def moe(block: int = 256) -> Call:
    return routing(block) | {"gate_up_proj_weight": rows(2, 512, 2, 64), "down_proj_weight": rows(2, 64, 512)}


def moe_mx(inner: int) -> Call:
    gate_up = quantize_moe_gate_up(rows(2, 512, 2, inner), fmt="e2m1")
    down = quantize_moe_down(rows(2, inner, 512), fmt="e2m1")
    return routing(256) | {
        "gate_up_proj_weight": gate_up.words, "gate_up_proj_scale": gate_up.scales,
        "down_proj_weight": down.words, "down_proj_scale": down.scales,
    }  # fmt: skip


def with_conditions(call: Call) -> Call:
    blocks, tokens = len(call["block_to_expert"]), len(call["hidden_states"]) - 1
    used = (call["token_position_to_id"].view(blocks, -1) < tokens).any(1).int()
    return call | {"conditions": torch.cat([used, used.new_zeros(1)])}


def moe_backward() -> Call:
    call = routing(128, hidden=128, tokens=40)
    blocks = len(call["block_to_expert"])
    return call | {
        "gate_up_proj_weight": rows(2, 128, 2, 64),
        "down_proj_weight": rows(2, 64, 128),
        "gate_up_proj_act_checkpoint_T": rows(blocks, 2, 64, 128),
        "down_proj_act_checkpoint": rows(blocks, 128, 128),
        "output_hidden_states_grad": rows(41, 128),
        "shard_option": "SHARD_ON_FREE",
    }


def moe_mxfp8(backward: bool) -> Call:
    call = routing(128, hidden=128, tokens=40)
    if not backward:
        return call | {"gate_up_proj_weight": rows(2, 2, 128, 128), "down_proj_weight": rows(2, 128, 128)}
    return call | {
        "gate_up_proj_weight": rows(2, 128, 2, 128),
        "down_proj_weight": rows(2, 128, 128),
        "gate_up_proj_act_checkpoint_T": rows(len(call["block_to_expert"]), 2, 128, 128),
        "output_hidden_states_grad": rows(41, 128),
    }


def coat(*names: str) -> Call:
    made = {}
    for name in names:
        made[name], made[f"s_{name}"] = group_quantize_fp8(torch.randn(64, 128).bfloat16(), 16)
    return made | {"QB": 16}


def router() -> Call:
    return {"x": rows(64, 128), "w": rows(128, 8), "act_fn": "SOFTMAX", "k": 2}


def step(name: str, **more: Any) -> Callable[[], Call]:
    """A recompute step on ``[S, I]``."""
    shapes = {f"{each}_td": (S, I) for each in name.split()}
    return lambda: {each: td(*shape) for each, shape in shapes.items()} | {"s_base_offset": 0, "dtype": BF16} | more


GRADS = {"s_base": 0, "hidden_states_grad_td": (S, H)}
CALLS: dict[str, Callable[[], Call]] = {
    "mlp_forward_mxfp8": mlp_forward,
    "mlp_forward_mxfp8_nki": lambda: mlp_forward() | {"intermediate_hbm": rows(S, I)},
    "compute_fused_gate_up_down_mxfp8": fused,
    "quantize_block_mxfp8_kernel": lambda: {"src_tensor": rows(512, 256), "return_fp8_dtype": "float8_e4m3fn"},
    "matmul_mxfp8": lambda: {
        "lhs": rows(128, 256),
        "rhs": rows(512, 256),
        "lhs_is_swizzled": False,
        "rhs_is_swizzled": False,
    },
    "mlp_backward_mxfp8": mlp_backward,
    "mlp_backward_mxfp8_nki": mlp_backward,
    "mlp_backward_mxfp8_base_nki": base,
    "mlp_backward_mxfp8_nki_2_30": mlp_backward_2_30,
    "compute_phase1_down_proj_mm_grad_mxfp8": phase(
        (S, H), (I, H), "output_grad_td down_weight_td", s_base=0, d_gate_up_td=(S, 2 * I), scratch_td=(2 * I, S),
        gate_pre_td=(S, I), gate_act_td=(S, I), up_td=(S, I),
    ),
    "compute_phase2_hidden_states_grad_mxfp8": phase((S, 2 * I), (H, 2 * I), "d_gate_up_td gate_up_weight_td", **GRADS),
    "compute_phase2_hidden_states_grad_mxfp8_2_30": phase(
        (S, I), (H, I), "d_gate_td gate_weight_td", d_up_td=(S, I), up_weight_td=(H, I), **GRADS
    ),
    "compute_phase3_gate_up_weight_grad_mxfp8": phase(
        (2 * I, S), (H, S), "grad_T_td hidden_states_T_td", weight_grad_td=(2 * I, H)
    ),
    "compute_phase4_down_weight_grad_mxfp8": phase(
        (H, S), (I, S), "output_grad_T_td intermediate_T_td", down_weight_grad_td=(H, I), h_base=0
    ),
    "recompute_gate_up_projection": phase(
        (S, H), (2 * I, H), "hidden_td gate_up_td", gate_pre_td=(S, I), up_td=(S, I), s_base_offset=0
    ),
    "recompute_gate_act": step("gate_pre gate_act"),
    "recompute_intermediate": step("gate_act up intermediate"),
    "recompute_hidden": step("gate_act up hidden"),
    "moe_cte": lambda: moe() | {"spec": kernels.MoECTESpec("shard_on_i")},
    "bwmm_shard_on_block": moe,
    "blockwise_mm_baseline_shard_intermediate": moe,
    "blockwise_mm_baseline_shard_intermediate_hybrid": lambda: with_conditions(moe()),
    "blockwise_mm_shard_intermediate_dropping": lambda: moe(1024),
    "blockwise_mm_baseline_shard_hidden": moe,
    "bwmm_shard_on_block_mx": lambda: moe_mx(64),
    "blockwise_mm_shard_intermediate_mx": lambda: moe_mx(1024) | {"expert_affinities_scaling_mode": "POST_SCALE"},
    "blockwise_mm_shard_intermediate_mx_hybrid": lambda: with_conditions(moe_mx(1024)),
    "blockwise_mm_bwd": moe_backward,
    "blockwise_mm_fwd_mxfp8": lambda: moe_mxfp8(backward=False),
    "blockwise_mm_bwd_mxfp8": lambda: moe_mxfp8(backward=True),
    "fp8_mul_backward": lambda: coat("x1", "x2") | {"g": rows(64, 128), "fp8type": "E5M2"},
    "fp8_mul_forward": lambda: coat("x1", "x2"),
    "fp8_silu_backward": lambda: coat("x") | {"g": rows(64, 128), "fp8type": "E5M2"},
    "fp8_division_transpose": lambda: {"x": rows(64, 128), "QB": 16, "fp8type": "E4M3"},
    "router_topk": router,
}  # fmt: skip
