"""Every rule of the kernel functions broken once: the error names the kernel, the argument and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.kernels.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.kernels.routing import build_block_plan, count_blocks, expert_mask, masked_affinities
from hf_neuron_moe.modules import ops
from tests.refusals import Arguments, BrokenCall, Case, Suite, bf16, broken_calls

S, H, I, T, E, B = 128, 128, 256, 20, 3, 128  # noqa: E741


def moe_arguments() -> Arguments:
    index = torch.arange(2 * T).view(T, 2) % E
    plan = build_block_plan(expert_mask(index, E), B, top_k=2)
    return {
        "hidden_states": bf16(T + 1, H),
        "expert_affinities_masked": masked_affinities(index, torch.full((T, 2), 0.5), E),
        "gate_up_proj_weight": bf16(E, H, 2, I),
        "down_proj_weight": bf16(E, I, H),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
    }


def moe_backward_arguments() -> Arguments:
    arguments = moe_arguments()
    blocks = len(arguments["block_to_expert"])
    return arguments | {
        "gate_up_proj_act_checkpoint_T": bf16(blocks, 2, I, B),
        "down_proj_act_checkpoint": bf16(blocks, B, H),
        "output_hidden_states_grad": bf16(T + 1, H),
    }


def mlp_operator_arguments() -> Arguments:
    return {
        "x_SH": bf16(S, H),
        "gate_IH": bf16(I, H),
        "up_IH": bf16(I, H),
        "down_HI": bf16(H, I),
        "precision": "bf16",
        "backend": "torch",
    }


def experts_operator_arguments() -> Arguments:
    return {
        "x_TH": bf16(T, H),
        "top_k_index_TK": torch.zeros(T, 2, dtype=torch.int64),
        "top_k_weights_TK": torch.ones(T, 2),
        "gate_up": bf16(E, 2 * I, H),
        "down": bf16(E, H, I),
        "transposed": False,
        "precision": "bf16",
        "block_size": B,
        "backend": "torch",
    }


MOE: list[Case] = [
    (
        DTypeError,
        "hidden_states must be a tensor of dtype bfloat16 or float32",
        {"hidden_states": torch.ones(2).half()},
    ),
    (DTypeError, "block_to_expert must be a tensor of dtype int32 or int64", {"block_to_expert": torch.ones(3)}),
    (ShapeError, r"gate_up_proj_weight must be of shape \[E, H, 2, I\]", {"gate_up_proj_weight": bf16(E, H, 2 * I)}),
    (ShapeError, r"down_proj_weight must be of shape \[E, I, H\]", {"down_proj_weight": bf16(E, H, I)}),
    (ShapeError, r"expert_affinities_masked must be of shape", {"expert_affinities_masked": torch.ones(T * E, 1)}),
    (ShapeError, "token_position_to_id must be of size N", {"block_size": B // 2}),
    (ShapeError, "block_size must be a positive int, got 128.0", {"block_size": 128.0}),
    (ShapeError, "block_size must be a positive int, got 0", {"block_size": 0}),
    (DTypeError, "down_proj_weight must be a tensor of dtype bfloat16", {"down_proj_weight": torch.ones(E, I, H)}),
    (ShapeError, "block_to_expert must be made of ids 0..2", {"block_to_expert": torch.tensor([0, 1, 3])}),
    (DeviceError, "down_proj_weight must be on cpu", {"down_proj_weight": bf16(E, I, H, device="meta")}),
]
MOE_BACKWARD: list[Case] = [
    *MOE,
    (ConfigError, "affinity_option must be a member of AffinityOption", {"affinity_option": "ON_H"}),
    (ConfigError, "down_proj_act_checkpoint must be given with AFFINITY_ON_H", {"down_proj_act_checkpoint": None}),
    (ShapeError, r"down_proj_act_checkpoint must be of shape \[N, B, H\]", {"down_proj_act_checkpoint": bf16(1, B, H)}),
    (ShapeError, r"gate_up_proj_act_checkpoint_T must be of", {"gate_up_proj_act_checkpoint_T": bf16(1, 2, B, I)}),
    (DTypeError, "gate_up_proj_act_checkpoint_T must be a tensor", {"gate_up_proj_act_checkpoint_T": None}),
    (DTypeError, "down_proj_act_checkpoint must be a tensor", {"down_proj_act_checkpoint": [1.0]}),
    (DeviceError, "output_hidden_states_grad must be on", {"output_hidden_states_grad": bf16(T + 1, H, device="meta")}),
    (ShapeError, r"output_hidden_states_grad must be of shape", {"output_hidden_states_grad": bf16(T, H)}),
]
MLP_OPERATOR: list[Case] = [
    (ConfigError, "precision must be one of .* Did you mean 'mxfp8'", {"precision": "mxpf8"}),
    (DTypeError, "x_SH must be a tensor of dtype", {"x_SH": torch.ones(S, H, dtype=torch.int32)}),
    (DTypeError, "gate_IH must be a tensor of dtype .*got NoneType", {"gate_IH": None}),
    (ShapeError, r"gate_IH must be of shape \[I, H\]", {"x_SH": bf16(S, H + 1)}),
    (ShapeError, r"up_IH must be of shape \[I, H\]", {"up_IH": bf16(I + 1, H)}),
    (ShapeError, r"down_HI must be of shape \[H, I\]", {"down_HI": bf16(I, H)}),
    (DeviceError, "up_IH must be on cpu", {"up_IH": bf16(I, H, device="meta")}),
]
EXPERTS_OPERATOR: list[Case] = [
    (DTypeError, "top_k_index_TK must be a tensor of dtype int64", {"top_k_index_TK": torch.ones(T, 2)}),
    (ShapeError, r"top_k_weights_TK must be of shape \[T, K\]", {"top_k_weights_TK": torch.ones(T, 3)}),
    (ShapeError, r"gate_up must be of shape \[E, H, 2I\]", {"transposed": True}),
    (ShapeError, r"down must be of shape \[E, H, I\]", {"down": bf16(E, I, H)}),
    (ShapeError, "block_size of the plan must be a positive multiple", {"precision": "mxfp8", "block_size": 7}),
    (DeviceError, "down must be on cpu", {"down": bf16(E, H, I, device="meta")}),
]
SUITES: list[Suite] = [
    (blockwise_mm_bwd, moe_backward_arguments, MOE_BACKWARD),
    (ops.swiglu_mlp, mlp_operator_arguments, MLP_OPERATOR),
    (ops.experts, experts_operator_arguments, EXPERTS_OPERATOR),
]


@pytest.mark.parametrize("call", broken_calls(SUITES))
def test_refused(call: BrokenCall) -> None:
    call.check()


@pytest.mark.parametrize(("kernel", "arguments", "cases"), SUITES)
def test_the_unchanged_arguments_are_accepted(
    kernel: Callable[..., Any], arguments: Callable[[], Arguments], cases: list[Case]
) -> None:
    assert kernel(**arguments()) is not None


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (DTypeError, "expert_mask must be a bool or integer tensor", {"expert_mask": torch.ones(3, 2)}),
        (ShapeError, "expert_mask must be of shape", {"expert_mask": torch.ones(3, dtype=torch.bool)}),
        (ShapeError, "block_size must be positive", {"block_size": 0}),
        (ShapeError, "block_size must be positive, an int, got 16.5", {"block_size": 16.5}),
        (ShapeError, "at most top_k = 1 experts, got a row with 2", {"top_k": 1}),
        (ShapeError, "top_k must be positive", {"top_k": -1}),
        (ShapeError, "T must be positive and below 16777216", {"expert_mask": torch.ones(0, 2, dtype=torch.bool)}),
    ],
)
def test_block_plan_refusals(kind: type[NeuronMoEError], message: str, change: Arguments) -> None:
    arguments: Arguments = {"expert_mask": torch.ones(3, 2, dtype=torch.bool), "block_size": 8, "top_k": 2}
    with pytest.raises(kind, match=message):
        build_block_plan(**(arguments | change))


@pytest.mark.parametrize(
    ("kind", "message", "index"),
    [
        (DTypeError, "top_k_index must be a tensor of dtype int64 or int32", torch.ones(3, 2)),
        (ShapeError, r"top_k_index must be of shape \[T, K\]", torch.ones(3, dtype=torch.int64)),
        (ShapeError, "top_k_index must be made of expert ids of 0 and above, got the id -1", -torch.eye(2).long()),
    ],
)
def test_routings_that_are_none_are_refused(kind: type[NeuronMoEError], message: str, index: torch.Tensor) -> None:
    with pytest.raises(kind, match=f"expert_mask: {message}"):
        expert_mask(index, E)
    with pytest.raises(kind, match=f"masked_affinities: {message}"):
        masked_affinities(index, torch.ones(index.shape), E)


def test_affinities_must_fit_the_routing() -> None:
    with pytest.raises(ShapeError, match="top_k_weights must be of shape"):
        masked_affinities(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 1), E)


def test_count_blocks_refuses_nonsense() -> None:
    with pytest.raises(ShapeError, match="count_blocks: block_size must be positive"):
        count_blocks(4, 2, 3, 0)
