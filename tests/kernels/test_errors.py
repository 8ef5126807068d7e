"""Every rule of the kernel functions broken once: the error names the kernel, the argument and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, count_blocks, expert_mask, masked_affinities
from hf_neuron_moe.modules import ops
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from tests.kernels.moe_cte_calls import with_sink_row
from tests.refusals import Arguments, BrokenCall, Case, Suite, bf16, broken_calls, message_of

S, H, I, T, E, B = 128, 128, 256, 20, 3, 128  # noqa: E741


def moe_arguments() -> Arguments:
    index = torch.arange(2 * T).view(T, 2) % E
    plan = build_block_plan(expert_mask(index, E), B, top_k=2)
    return {
        "hidden_states": with_sink_row(bf16(T, H)),
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
        "output_hidden_states_grad": with_sink_row(bf16(T, H)),
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
        "hidden_states",
        {"hidden_states": torch.ones(2).half()},
    ),
    (DTypeError, "block_to_expert", {"block_to_expert": torch.ones(3)}),
    (ShapeError, "gate_up_proj_weight", {"gate_up_proj_weight": bf16(E, H, 2 * I)}),
    (ShapeError, "down_proj_weight", {"down_proj_weight": bf16(E, H, I)}),
    (ShapeError, "expert_affinities_masked", {"expert_affinities_masked": torch.ones(T * E, 1)}),
    (ShapeError, "token_position_to_id", {"block_size": B // 2}),
    (ShapeError, "block_size", {"block_size": 128.0}),
    (ShapeError, "block_size", {"block_size": 0}),
    (DTypeError, "down_proj_weight", {"down_proj_weight": torch.ones(E, I, H)}),
    (ShapeError, "block_to_expert", {"block_to_expert": torch.tensor([0, 1, 3])}),
    (DeviceError, "down_proj_weight", {"down_proj_weight": bf16(E, I, H, device="meta")}),
]
MOE_BACKWARD: list[Case] = [
    *MOE,
    (ConfigError, "affinity_option", {"affinity_option": "ON_H"}),
    (ConfigError, "down_proj_act_checkpoint", {"down_proj_act_checkpoint": None}),
    (ShapeError, "down_proj_act_checkpoint", {"down_proj_act_checkpoint": bf16(1, B, H)}),
    (ShapeError, "gate_up_proj_act_checkpoint_T", {"gate_up_proj_act_checkpoint_T": bf16(1, 2, B, I)}),
    (DTypeError, "gate_up_proj_act_checkpoint_T", {"gate_up_proj_act_checkpoint_T": None}),
    (DTypeError, "down_proj_act_checkpoint", {"down_proj_act_checkpoint": [1.0]}),
    (DeviceError, "output_hidden_states_grad", {"output_hidden_states_grad": bf16(T + 1, H, device="meta")}),
    (ShapeError, "output_hidden_states_grad", {"output_hidden_states_grad": bf16(T, H)}),
]
MLP_OPERATOR: list[Case] = [
    (ConfigError, "precision", {"precision": "mxpf8"}),
    (DTypeError, "x_SH", {"x_SH": torch.ones(S, H, dtype=torch.int32)}),
    (DTypeError, "gate_IH", {"gate_IH": None}),
    (ShapeError, "gate_IH", {"x_SH": bf16(S, H + 1)}),
    (ShapeError, "up_IH", {"up_IH": bf16(I + 1, H)}),
    (ShapeError, "down_HI", {"down_HI": bf16(I, H)}),
    (DeviceError, "up_IH", {"up_IH": bf16(I, H, device="meta")}),
]
EXPERTS_OPERATOR: list[Case] = [
    (DTypeError, "top_k_index_TK", {"top_k_index_TK": torch.ones(T, 2)}),
    (ShapeError, "top_k_weights_TK", {"top_k_weights_TK": torch.ones(T, 3)}),
    (ShapeError, "gate_up", {"transposed": True}),
    (ShapeError, "down", {"down": bf16(E, I, H)}),
    (ShapeError, "block_size of the plan", {"precision": "mxfp8", "block_size": 7}),
    (DeviceError, "down", {"down": bf16(E, H, I, device="meta")}),
]
SUITES: list[Suite] = [
    (blockwise_mm_bwd, moe_backward_arguments, MOE_BACKWARD),
    (ops.swiglu_mlp, mlp_operator_arguments, MLP_OPERATOR),
    (ops.experts, experts_operator_arguments, EXPERTS_OPERATOR),
]


CALLS = broken_calls(SUITES)


@pytest.mark.parametrize("call", CALLS)
def test_refused(call: BrokenCall) -> None:
    call.check()


@pytest.mark.parametrize(("kernel", "arguments", "cases"), SUITES)
def test_the_unchanged_arguments_are_accepted(
    kernel: Callable[..., Any], arguments: Callable[[], Arguments], cases: list[Case]
) -> None:
    assert kernel(**arguments()) is not None


@pytest.mark.parametrize(
    ("kind", "argument", "change"),
    [
        (DTypeError, "expert_mask", {"expert_mask": torch.ones(3, 2)}),
        (ShapeError, "expert_mask", {"expert_mask": torch.ones(3, dtype=torch.bool)}),
        (ShapeError, "block_size", {"block_size": 0}),
        (ShapeError, "block_size", {"block_size": 16.5}),
        (ShapeError, "expert_mask", {"top_k": 1}),
        (ShapeError, "top_k", {"top_k": -1}),
        (ShapeError, "T", {"expert_mask": torch.ones(0, 2, dtype=torch.bool)}),
    ],
)
def test_block_plan_refusals(kind: type[NeuronMoEError], argument: str, change: Arguments) -> None:
    arguments: Arguments = {"expert_mask": torch.ones(3, 2, dtype=torch.bool), "block_size": 8, "top_k": 2}
    message_of(kind, argument, build_block_plan, **(arguments | change))


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        (DTypeError, torch.ones(3, 2)),
        (ShapeError, torch.ones(3, dtype=torch.int64)),
        (ShapeError, -torch.eye(2).long()),
    ],
    ids=["dtype", "shape", "negative"],
)
def test_routings_that_are_none_are_refused(kind: type[NeuronMoEError], index: torch.Tensor) -> None:
    routing = {"top_k_index": index, "experts": E}
    message_of(kind, "top_k_index", expert_mask, **routing)
    message_of(kind, "top_k_index", masked_affinities, top_k_weights=torch.ones(index.shape), **routing)


def test_affinities_must_fit_the_routing() -> None:
    index, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 1)
    message_of(ShapeError, "top_k_weights", masked_affinities, top_k_index=index, top_k_weights=weights, experts=E)


def test_count_blocks_refuses_nonsense() -> None:
    message_of(ShapeError, "block_size", count_blocks, tokens=4, top_k=2, experts=3, block_size=0)
