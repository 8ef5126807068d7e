"""Every check of the MXFP8 MLP's building blocks broken once: the error names the step, the argument and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.kernels.mlp_mxfp8 import (
    TensorDescriptor,
    compute_fused_gate_up_down_mxfp8,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    get_program_sharding_info,
    recompute_gate_act,
    recompute_gate_up_projection,
)

S, H, I = 128, 128, 256  # noqa: E741
Arguments = dict[str, Any]


def td(*shape: int) -> TensorDescriptor:
    return TensorDescriptor(torch.ones(shape, dtype=torch.bfloat16))


def fused_arguments() -> Arguments:
    operands = {"hidden_td": td(S, H), "gate_up_td": td(2 * I, H), "down_w_td": td(H, I)}
    return operands | {"int_td": td(S, I), "output_td": td(S, H), "s_base_offset": 0, "dtype": torch.bfloat16}


def phase1_arguments() -> Arguments:
    names = ("gate_pre_td", "gate_act_td", "up_td")
    return {name: td(S, I) for name in names} | {
        "output_grad_td": td(S, H), "d_gate_up_td": td(S, 2 * I), "scratch_td": td(2 * I, S),
        "down_weight_td": td(I, H), "s_base": 0, "dtype": torch.bfloat16,
    }  # fmt: skip


def phase2_arguments() -> Arguments:
    tds = {"hidden_states_grad_td": td(S, H), "gate_up_weight_td": td(H, 2 * I), "d_gate_up_td": td(S, 2 * I)}
    return tds | {"s_base": 0, "dtype": torch.bfloat16}


def phase3_arguments() -> Arguments:
    tds = {"weight_grad_td": td(2 * I, H), "hidden_states_T_td": td(H, S), "grad_T_td": td(2 * I, S)}
    return tds | {"dtype": torch.bfloat16}


def phase4_arguments() -> Arguments:
    tds = {"down_weight_grad_td": td(H, I), "output_grad_T_td": td(H, S), "intermediate_T_td": td(I, S)}
    return tds | {"h_base": 0, "dtype": torch.bfloat16}


def projection_arguments() -> Arguments:
    tds = {"hidden_td": td(S, H), "gate_up_td": td(2 * I, H), "gate_pre_td": td(S, I), "up_td": td(S, I)}
    return tds | {"s_base_offset": 0, "dtype": torch.bfloat16}


def gate_act_arguments() -> Arguments:
    return {"gate_pre_td": td(S, I), "gate_act_td": td(S, I), "s_base_offset": 0, "dtype": torch.bfloat16}


FUSED = (compute_fused_gate_up_down_mxfp8, fused_arguments)
PHASE1 = (compute_phase1_down_proj_mm_grad_mxfp8, phase1_arguments)
PHASE2 = (compute_phase2_hidden_states_grad_mxfp8, phase2_arguments)
PHASE3 = (compute_phase3_gate_up_weight_grad_mxfp8, phase3_arguments)
PHASE4 = (compute_phase4_down_weight_grad_mxfp8, phase4_arguments)
PROJECTION = (recompute_gate_up_projection, projection_arguments)
GATE_ACT = (recompute_gate_act, gate_act_arguments)


@pytest.mark.parametrize(
    ("step", "arguments", "kind", "message", "change"),
    [
        (*FUSED, ConfigError, "s_base_offset must be .* at most 64", {"s_base_offset": 65}),
        (*FUSED, ShapeError, r"int_td must be of shape \[S, I\]", {"int_td": td(S, H)}),
        (*FUSED, ConfigError, "hidden_td must be described with its data", {"hidden_td": TensorDescriptor()}),
        (*FUSED, DTypeError, "output_td must be a tensor of dtype float32", {"dtype": torch.float32}),
        (*FUSED, ShapeError, r"gate_up_td must be of shape \[2I, H\]", {"gate_up_td": td(2 * I, 2 * H)}),
        (*FUSED, ConfigError, "TILES_IN_BLOCK_M must be a positive", {"TILES_IN_BLOCK_M": 0}),
        (*PHASE1, ShapeError, "down_weight_td must be of shape", {"down_weight_td": td(I, 2 * H)}),
        (*PHASE1, ShapeError, r"up_td must be of shape \[S, I\]", {"up_td": td(S, H)}),
        (*PHASE1, ShapeError, r"d_gate_up_td must be of shape \[S, 2I\]", {"d_gate_up_td": td(S, I)}),
        (*PHASE1, ConfigError, "dtype must be torch.bfloat16", {"dtype": torch.float32}),
        (*PHASE1, ConfigError, "s_base must be an int", {"s_base": -1}),
        (*PHASE2, ShapeError, "gate_up_weight_td must be of shape", {"gate_up_weight_td": td(H, I)}),
        (
            *PHASE2,
            DTypeError,
            "d_gate_up_td must be a tensor of dtype bfloat16 or float16",
            {"d_gate_up_td": TensorDescriptor(torch.ones(S, 2 * I))},
        ),
        (*PHASE3, ShapeError, "hidden_states_T_td must be of shape", {"hidden_states_T_td": td(H, 2 * S)}),
        (*PHASE3, ShapeError, r"weight_grad_td must be of shape \[2I, H\]", {"weight_grad_td": td(I, H)}),
        (*PHASE4, ConfigError, "h_base must be an int", {"h_base": H}),
        (
            *PHASE4,
            ShapeError,
            "K of output_grad_T_td must be a positive multiple of 128",
            {"output_grad_T_td": td(H, 64)},
        ),
        (*PROJECTION, ShapeError, r"gate_pre_td must be of shape \[S, I\]", {"gate_pre_td": td(S, H)}),
        (*PROJECTION, ConfigError, "dtype must be torch.bfloat16", {"dtype": torch.float32}),
        (*GATE_ACT, ShapeError, r"gate_pre_td must be of shape \[S, I\]", {"gate_pre_td": td(S, H)}),
        (
            *GATE_ACT,
            ShapeError,
            "rows of S must be a positive multiple of 2",
            {"gate_pre_td": td(127, I), "gate_act_td": td(127, I)},
        ),
    ],
)
def test_steps_refuse(
    step: Callable[..., Any],
    arguments: Callable[[], Arguments],
    kind: type[NeuronMoEError],
    message: str,
    change: Arguments,
) -> None:
    step(**arguments())
    with pytest.raises(kind, match=message) as caught:
        step(**(arguments() | change))
    assert str(caught.value).startswith(f"{step.__name__}: ")


def test_program_sharding_info() -> None:
    assert get_program_sharding_info(False) == (1, 0)
    assert get_program_sharding_info(True) == (2, 0)
    assert get_program_sharding_info(True, 1) == (2, 1)
    with pytest.raises(ConfigError, match="core must be 0 or 1, got 2"):
        get_program_sharding_info(True, 2)
