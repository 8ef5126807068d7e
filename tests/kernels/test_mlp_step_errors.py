"""Every check of the MXFP8 MLP's building blocks broken once: the error names the step, the argument and the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.kernels import (
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    TensorDescriptor,
    compute_fused_gate_up_down_mxfp8,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    get_program_sharding_info,
    mlp_backward_mxfp8_base_nki,
    recompute_gate_act,
    recompute_gate_up_projection,
    record_launches,
)
from tests.refusals import Arguments, BrokenCall, message_of, named

S, H, I = 128, 128, 256  # noqa: E741


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


STEPS = [
    (*FUSED, ConfigError, "s_base_offset", {"s_base_offset": 65}),
    (*FUSED, ShapeError, "int_td", {"int_td": td(S, H)}),
    (*FUSED, ConfigError, "hidden_td", {"hidden_td": TensorDescriptor()}),
    (*FUSED, DTypeError, "output_td", {"dtype": torch.float32}),
    (*FUSED, ShapeError, "gate_up_td", {"gate_up_td": td(2 * I, 2 * H)}),
    (*FUSED, ConfigError, "TILES_IN_BLOCK_M", {"TILES_IN_BLOCK_M": 0}),
    (*PHASE1, ShapeError, "down_weight_td", {"down_weight_td": td(I, 2 * H)}),
    (*PHASE1, ShapeError, "up_td", {"up_td": td(S, H)}),
    (*PHASE1, ShapeError, "d_gate_up_td", {"d_gate_up_td": td(S, I)}),
    (*PHASE1, ConfigError, "dtype", {"dtype": torch.float32}),
    (*PHASE1, ConfigError, "s_base", {"s_base": -1}),
    (*PHASE2, ShapeError, "gate_up_weight_td", {"gate_up_weight_td": td(H, I)}),
    (
        *PHASE2,
        DTypeError,
        "d_gate_up_td",
        {"d_gate_up_td": TensorDescriptor(torch.ones(S, 2 * I))},
    ),
    (*PHASE3, ShapeError, "hidden_states_T_td", {"hidden_states_T_td": td(H, 2 * S)}),
    (*PHASE3, ShapeError, "weight_grad_td", {"weight_grad_td": td(I, H)}),
    (*PHASE4, ConfigError, "h_base", {"h_base": H}),
    (
        *PHASE4,
        ShapeError,
        "K of output_grad_T_td",
        {"output_grad_T_td": td(H, 64)},
    ),
    (*PROJECTION, ShapeError, "gate_pre_td", {"gate_pre_td": td(S, H)}),
    (*PROJECTION, ConfigError, "dtype", {"dtype": torch.float32}),
    (*GATE_ACT, ShapeError, "gate_pre_td", {"gate_pre_td": td(S, H)}),
    (
        *GATE_ACT,
        ShapeError,
        "rows of S",
        {"gate_pre_td": td(127, I), "gate_act_td": td(127, I)},
    ),
]
STEP_CALLS = named(
    BrokenCall(step, arguments, kind, argument, change) for step, arguments, kind, argument, change in STEPS
)


@pytest.mark.parametrize("call", STEP_CALLS)
def test_steps_refuse(call: BrokenCall) -> None:
    with record_launches() as launches:
        call.function(**call.arguments())
        made = len(launches)
        call.check()
    assert len(launches) == made, "a failed call launches nothing"


LIMITS = {"clamp_limits": (1.0, -1.0)}


def config(M: int, K: int, N: int, **more: Any) -> MatmulMxfp8KernelConfig:
    return MatmulMxfp8KernelConfig(M=M, K=K, N=N, **more)


def base_arguments() -> Arguments:
    shapes = {
        "output_grad": (S, H), "gate_pre": (S, I), "gate_act": (S, I), "up": (S, I), "gate_up_weight_T": (H, 2 * I),
        "down_weight_T": (I, H), "d_gate_up": (S, 2 * I), "hidden_states_T": (H, S), "output_grad_T": (H, S),
        "intermediate_T": (I, S), "scratch": (2 * I, S), "hidden_states_grad": (S, H), "weight_grad": (2 * I, H),
        "down_weight_grad": (H, I),
    }  # fmt: skip
    return {f"{name}_td": td(*shape) for name, shape in shapes.items()}


BASE = (mlp_backward_mxfp8_base_nki, base_arguments)
OLD_PHASE2 = (compute_phase2_hidden_states_grad_mxfp8_2_30, lambda: {
    "hidden_states_grad_td": td(S, H), "gate_weight_td": td(H, I), "up_weight_td": td(H, I), "d_gate_td": td(S, I),
    "d_up_td": td(S, I), "s_base": 0, "dtype": torch.bfloat16,
})  # fmt: skip
CONFIGS = [
    (PHASE1, (S // 2, H, I)),
    (PHASE2, (S // 2, 2 * I, H)),
    (OLD_PHASE2, (S // 2, I, H)),
    (PHASE3, (I, S, H)),
    (PHASE4, (H // 2, S, I)),
]


@pytest.mark.parametrize(("step", "size"), CONFIGS)
def test_configs_are_for_the_step_and_core(step: Any, size: tuple[int, int, int]) -> None:
    function, arguments = step
    function(**arguments(), config=config(*size))
    for wrong in ((size[0] * 2, *size[1:]), (size[0], size[1] + 1, size[2])):
        message_of(ConfigError, "config", function, **arguments(), config=config(*wrong))
    message_of(ConfigError, "config", function, **arguments(), config=object())
    whole = config(size[0] * 2, *size[1:])
    function(**arguments(), config=whole, run_with_lnc2=False)


@pytest.mark.parametrize("name", ["tile_m", "tile_k", "TILES_IN_BLOCK_M", "TILES_IN_BLOCK_K"])
def test_both_projections_share_the_hidden_tiles(name: str) -> None:
    step, arguments = PROJECTION
    alike = config(S // 2, H, I, **{name: 32 if name == "tile_k" else 3})
    step(**arguments(), gate_config=alike, up_config=alike)
    other = config(S // 2, H, I)
    message_of(ConfigError, f"up_config.{name}", step, **arguments(), gate_config=alike, up_config=other)
    message_of(ConfigError, "up_config", step, **arguments(), up_config=config(S, H, I))
    message_of(ConfigError, "gate_config", step, **arguments(), gate_config={})


OPTIONS = [
    (PHASE1, "clamp_limits", LIMITS),
    (PROJECTION, "clamp_limits", LIMITS),
    (BASE, "clamp_limits", LIMITS),
    (BASE, "matmul_config", {"matmul_config": object()}),
    (
        BASE,
        "matmul_config.phase1_down_proj",
        {"matmul_config": MlpBwdMatmulConfig(phase1_down_proj=config(S, H, I))},
    ),
    *((step, "run_with_lnc2", {"run_with_lnc2": 2})
      for step in (BASE, FUSED, PHASE1, PHASE2, OLD_PHASE2, PHASE3, PHASE4, PROJECTION, GATE_ACT)),
    *((step, "mx_scale_rule", {"mx_scale_rule": "ocp"})
      for step in (BASE, FUSED, PHASE1, PHASE2, OLD_PHASE2, PHASE3, PHASE4, PROJECTION)),
    (PHASE3, "core", {"core": 5}),
    (PHASE4, "lone_384", {"lone_384": 384}),
    *((step, f"{name}.quant_scheme",
       {name: TensorDescriptor(torch.ones(shape, dtype=torch.bfloat16), quant_scheme="1x32")})
      for step, name, shape in (
        (FUSED, "hidden_td", (S, H)), (FUSED, "down_w_td", (H, I)), (PROJECTION, "gate_up_td", (2 * I, H)),
        (PHASE1, "down_weight_td", (I, H)), (PHASE2, "d_gate_up_td", (S, 2 * I)), (PHASE3, "grad_T_td", (2 * I, S)),
        (PHASE4, "intermediate_T_td", (I, S)))),
]  # fmt: skip
OPTION_CALLS = named(BrokenCall(*step, ConfigError, argument, change) for step, argument, change in OPTIONS)


CALLS = [*STEP_CALLS, *OPTION_CALLS]


@pytest.mark.parametrize("call", OPTION_CALLS)
def test_options_of_steps_are_checked(call: BrokenCall) -> None:
    call.function(**call.arguments())
    call.check()


def test_operands_are_descriptors() -> None:
    step, arguments = PHASE3
    message_of(DTypeError, "grad_T_td", step, **(arguments() | {"grad_T_td": torch.ones(2 * I, S).bfloat16()}))


@pytest.mark.parametrize("K", [384, 896])
def test_a_remainder_of_384_is_grouped_alike_on_both_sides(K: int) -> None:
    """fast_dma_transpose groups it as one tile; the other operand would pair other elements."""

    def fast(*shape: int) -> TensorDescriptor:
        return TensorDescriptor(torch.ones(shape, dtype=torch.bfloat16), fast_dma_transpose=True)

    grads = {"weight_grad_td": td(2 * I, H), "dtype": torch.bfloat16}
    phase3 = compute_phase3_gate_up_weight_grad_mxfp8
    phase3(hidden_states_T_td=fast(H, K), grad_T_td=fast(2 * I, K), **grads)
    for argument, first, second in (("hidden_states_T_td", fast, td), ("grad_T_td", td, fast)):
        operands = {"hidden_states_T_td": first(H, K), "grad_T_td": second(2 * I, K)}
        message_of(ConfigError, f"{argument}.fast_dma_transpose", phase3, **operands, **grads)
    phase3(hidden_states_T_td=fast(H, 640), grad_T_td=td(2 * I, 640), **grads)

    rest = {"down_w_td": td(K, I), "int_td": td(S, I), "output_td": td(S, K), "s_base_offset": 0}
    fused = {**rest, "hidden_td": td(S, K), "gate_up_td": td(2 * I, K), "dtype": torch.bfloat16}
    if K == 896:  # a raw contraction of 384 is one tile anyway
        step, changed = compute_fused_gate_up_down_mxfp8, fused | {"gate_up_td": fast(2 * I, K)}
        message_of(ConfigError, "gate_up_td.fast_dma_transpose", step, **changed)
        wide = {"gate_up_td": td(2 * K, H), "int_td": td(S, K), "down_w_td": fast(H, K), "output_td": td(S, H)}
        message_of(ConfigError, "down_w_td.fast_dma_transpose", step, **(fused | wide | {"hidden_td": td(S, H)}))
    compute_fused_gate_up_down_mxfp8(**(fused | {"gate_up_td": fast(2 * I, K), "hidden_td": fast(S, K)}))


def test_program_sharding_info() -> None:
    message_of(ConfigError, "run_with_lnc2", get_program_sharding_info, run_with_lnc2=1)
    assert get_program_sharding_info(False) == (1, 0)
    assert get_program_sharding_info(True) == (2, 0)
    assert get_program_sharding_info(True, 1) == (2, 1)
    message_of(ConfigError, "core", get_program_sharding_info, run_with_lnc2=True, core=2)
