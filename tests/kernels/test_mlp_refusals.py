"""Every documented constraint of the MXFP8 MLP kernels broken once: the error names kernel, argument and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.kernels.mlp_mxfp8 import (
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_nki,
    mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki,
)
from tests.refusals import Arguments, BrokenCall, Case, Suite, bf16, broken_calls, x4

S, H, I = 128, 128, 256  # noqa: E741


def packed(F: int, K: int) -> Tensor:
    return to_packed(quantize_mx(bf16(F, K)).scales)


def oversized(F: int, K: int) -> Tensor:
    return to_oversized(quantize_mx(bf16(F, K)).scales)


def forward_arguments() -> Arguments:
    return {"hidden": bf16(S, H), "gate_up_weights": bf16(2 * I, H), "down_weights": bf16(H, I)}


def device_forward_arguments() -> Arguments:
    return forward_arguments() | {"intermediate_hbm": bf16(S, I)}


def backward_arguments() -> Arguments:
    return {
        "output_grad": bf16(S, H),
        "hidden_states": bf16(S, H),
        "gate_up_weights": bf16(2 * I, H),
        "down_proj_weight": bf16(H, I),
    }


def with_384(prepared: str) -> Arguments:
    """Forward operands with H = I = 384 of which one is pre-quantized."""
    arguments = {"hidden": bf16(S, 384), "gate_up_weights": bf16(768, 384), "down_weights": bf16(384, 384)}
    F = len(arguments[prepared])
    scales = prepared.removesuffix("_weights") + "_scales"
    return arguments | {prepared: x4(F, 384), scales: packed(F, 384)}


FORWARD: list[Case] = [
    (
        DTypeError,
        "hidden must be a tensor of dtype bfloat16 or float16, got torch.float32",
        {"hidden": torch.ones(S, H)},
    ),
    (DTypeError, "down_weights.*got list", {"down_weights": [1.0]}),
    (ShapeError, r"hidden must be of shape \[S, H\]", {"hidden": bf16(1, S, H)}),
    (ShapeError, "H of hidden must be a positive multiple of 128.*neither swizzled nor", {"hidden": bf16(S, 64)}),
    (
        ShapeError,
        "H of gate_up_weights must be a positive multiple of 128",
        {"gate_up_weights": bf16(2 * I, 96), "hidden": swizzle(bf16(S, 96)), "hidden_is_swizzled": True},
    ),
    (ShapeError, "S of hidden must be a positive multiple of 8", {"hidden": bf16(12, H)}),
    (
        ShapeError,
        r"gate_up_weights must be of shape \[2I, H\].*contraction axis",
        {"gate_up_weights": bf16(2 * I, 2 * H)},
    ),
    (ShapeError, "2I of gate_up_weights must be a positive multiple of 2", {"gate_up_weights": bf16(257, H)}),
    (ShapeError, "I of gate_up_weights must be a positive multiple of 128", {"gate_up_weights": bf16(208, H)}),
    (ShapeError, r"down_weights must be of shape \[H, I\] = \[128, 256\]", {"down_weights": bf16(I, H)}),
    (DeviceError, "down_weights must be on cpu like hidden, got meta", {"down_weights": bf16(H, I, device="meta")}),
    (ConfigError, "dtype must be torch.bfloat16 or torch.float32", {"dtype": torch.float16}),
    (
        DTypeError,
        "hidden must be of dtype int32 or uint32 .* or float8_e4m3fn.*uint8.*Bytes do not say which",
        {"hidden": quantize_mx(bf16(S, H)).codes, "hidden_scales": packed(S, H)},
    ),
    (
        DTypeError,
        "hidden must be of dtype int32 or uint32 .* got torch.float8_e5m2",
        {"hidden": quantize_mx(bf16(S, H), fmt="e5m2").codes.view(torch.float8_e5m2), "hidden_scales": packed(S, H)},
    ),
    (DTypeError, "hidden must be of dtype int32.*because it has scales", {"hidden_scales": packed(S, H)}),
    (
        DTypeError,
        "hidden_scales must be a tensor of dtype uint8 or float8_e8m0fnu",
        {"hidden": x4(S, H), "hidden_scales": packed(S, H).int()},
    ),
    (
        ShapeError,
        r"hidden_scales must be of shape \[32, 128\] \(oversized\) or \[128, 128\] \(packed\).*Compact",
        {"hidden": x4(S, H), "hidden_scales": quantize_mx(bf16(S, H)).scales},
    ),
    (
        ConfigError,
        "hidden_scales must be in the layout that use_scale_packing=True announces: 128 rows for K=128, got 32",
        {"hidden": x4(S, H), "hidden_scales": oversized(S, H)},
    ),
    (
        ConfigError,
        "down_scales must be in the layout that use_scale_packing=False announces: 64 rows for K=256, got 128",
        {"down_weights": x4(H, I), "down_scales": packed(H, I), "use_scale_packing": False},
    ),
    (
        ShapeError,
        "K/4 of gate_up_weights must be a positive multiple of 8",
        {"gate_up_weights": bf16(4, 8 * I), "gate_up_is_swizzled": True},
    ),
    (
        ShapeError,
        "4F of down_weights must be a positive multiple of 4",
        {"down_weights": bf16(64, 4 * H + 2), "down_is_swizzled": True},
    ),
    (ConfigError, "hidden must be raw like gate_up_weights.*exactly 384", with_384("hidden")),
    (ConfigError, "gate_up_weights must be raw like hidden.*256 \\+ 128", with_384("gate_up_weights")),
    (ConfigError, "down_weights must be raw like the intermediate, which is always raw", with_384("down_weights")),
]
RULE = (ConfigError, "mx_scale_rule must be one of neuron, floor, .*Did you mean 'floor'", {"mx_scale_rule": "flor"})
FORWARD += [
    RULE,
    (ConfigError, "use_scale_packing must be True or False, got 1", {"use_scale_packing": 1}),
    (ConfigError, "hidden_is_swizzled must be True or False, got 'no'", {"hidden_is_swizzled": "no"}),
    (ConfigError, "down_is_swizzled must be True or False", {"down_is_swizzled": None}),
]
FUNCTIONAL_FORWARD: list[Case] = [
    *FORWARD,
    *[
        (
            ConfigError,
            f"{name} must be True or False: this .* got a tensor. Pass True, or call mlp_forward_mxfp8_nki",
            {name: bf16(S, I)},
        )
        for name in ("save_gate_pre", "save_gate_act", "save_up", "save_hidden")
    ],
    (ConfigError, "save_up must be True or False, got 1", {"save_up": 1}),
]
DEVICE_FORWARD: list[Case] = [
    *FORWARD,
    (ShapeError, "S of hidden must be a positive multiple of 2 .run_with_lnc2", {"hidden": bf16(15, H)}),
    (ConfigError, "gate_up_tiles_n must be a positive integer, got 0", {"gate_up_tiles_n": 0}),
    (ConfigError, "down_tiles_k must be a positive integer, got 1.0", {"down_tiles_k": 1.0}),
    (ConfigError, "spill_reload must be True or False, got 1", {"spill_reload": 1}),
    (ConfigError, "fp8_x4_dtype must be float8_e4m3fn_x4", {"fp8_x4_dtype": torch.float8_e5m2}),
    (ShapeError, r"intermediate_hbm must be of shape \[S, I\]", {"intermediate_hbm": bf16(S, H)}),
    (DTypeError, "intermediate_hbm must be a tensor of dtype bfloat16", {"intermediate_hbm": torch.ones(S, I)}),
    (DTypeError, "intermediate_hbm must be a tensor.*NoneType", {"intermediate_hbm": None}),
    (ShapeError, r"save_up must be of shape \[S, I\]", {"save_up": bf16(S, H)}),
    (
        DTypeError,
        "save_hidden must be a tensor of dtype bfloat16, got torch.float32",
        {"save_hidden": torch.ones(S, I)},
    ),
    (DTypeError, "save_gate_pre must be a tensor of dtype bfloat16 or float32", {"save_gate_pre": True}),
]
BACKWARD: list[Case] = [
    (DTypeError, "output_grad must be a tensor of dtype bfloat16", {"output_grad": torch.ones(S, H)}),
    (
        DTypeError,
        "hidden_states must be a tensor of dtype bfloat16, got torch.float16",
        {"hidden_states": bf16(S, H).half()},
    ),
    (ShapeError, r"output_grad must be of shape \[S, H\]", {"output_grad": bf16(S, 2 * H)}),
    (
        ShapeError,
        "S of hidden_states must be a positive multiple of 128 .tokens are the contraction",
        {"hidden_states": bf16(64, H), "output_grad": bf16(64, H)},
    ),
    (
        ShapeError,
        "H of hidden_states must be a positive multiple of 128 .output_grad is always raw",
        {"hidden_states": bf16(S, 96), "output_grad": bf16(S, 96)},
    ),
    (ShapeError, "I of gate_up_weights must be a positive multiple of 128", {"gate_up_weights": bf16(192, H)}),
    (ShapeError, "2I of gate_up_weights must be a positive multiple of 2", {"gate_up_weights": bf16(257, H)}),
    (ShapeError, r"gate_up_weights must be of shape \[2I, H\]", {"gate_up_weights": bf16(2 * I, 2 * H)}),
    (ShapeError, r"gate_pre must be of shape \[S, I\]", {"gate_pre": bf16(S, H)}),
    (DTypeError, "intermediate must be a tensor of dtype bfloat16", {"intermediate": torch.ones(S, I)}),
    (ShapeError, r"down_proj_weight must be of shape \[H, I\]", {"down_proj_weight": bf16(I, H)}),
    (DTypeError, "down_proj_weight must be given unless down_weight_T", {"down_proj_weight": None}),
    (DTypeError, "gate_up_weights must be given always", {"gate_up_weights": None}),
    (DeviceError, "up must be on cpu", {"up": bf16(S, I, device="meta")}),
    (
        DTypeError,
        "gate_up_weight_T must be given with pre-quantized gate_up_weights: codes cannot be transposed",
        {"gate_up_weights": x4(2 * I, H), "gate_up_weights_scales": packed(2 * I, H)},
    ),
    (DTypeError, "output_grad_T_scales must be given with output_grad_T.*ignores", {"output_grad_T": bf16(H, S)}),
    (DTypeError, "hidden_states_T must be given with hidden_states_T_scales", {"hidden_states_T_scales": packed(H, S)}),
    (
        ShapeError,
        r"down_weight_T must be of shape \[I, H\] = \[256, 128\]",
        {"down_weight_T": x4(H, I), "down_weight_T_scales": packed(H, I)},
    ),
    (
        ShapeError,
        r"gate_up_weight_T must be of shape \[H, 2I\] = \[128, 512\]",
        {"gate_up_weight_T": x4(H, I), "gate_up_weight_T_scales": packed(H, I)},
    ),
    (
        ConfigError,
        "output_grad_T_scales must be in the layout that use_scale_packing=True",
        {"output_grad_T": x4(H, S), "output_grad_T_scales": oversized(H, S)},
    ),
    (ConfigError, "clamp_limits must be None or a ClampLimits, got tuple", {"clamp_limits": (1.0, -1.0)}),
    (ConfigError, "matmul_config must be None or a MlpBwdMatmulConfig, got dict", {"matmul_config": {}}),
]
BACKWARD += [
    RULE,
    (ConfigError, "use_scale_packing must be True or False", {"use_scale_packing": "packed"}),
    (ConfigError, "matmul_config must be None or a MlpBwdMatmulConfig, got object", {"matmul_config": object()}),
    (
        ConfigError,
        r"matmul_config.phase2_hidden_grad must be a configuration for M, K, N = ",
        {"matmul_config": MlpBwdMatmulConfig(phase2_hidden_grad=MatmulMxfp8KernelConfig(M=S, K=H, N=I + 1))},
    ),
    (
        ConfigError,
        r"matmul_config.recompute_up.tile_k must be that of matmul_config.recompute_gate, 256",
        {
            "matmul_config": MlpBwdMatmulConfig(
                MatmulMxfp8KernelConfig(M=S, K=H, N=I, tile_k=256), MatmulMxfp8KernelConfig(M=S, K=H, N=I)
            ),
            "run_with_lnc2": False,
        },
    ),
]
FUNCTIONAL_BACKWARD: list[Case] = [
    *[
        (kind, message, {name: value for name, value in change.items() if name != "run_with_lnc2"})
        for kind, message, change in BACKWARD
    ],
    (
        ConfigError,
        'use_scale_packing must be True with release="2.30"',
        {"release": "2.30", "use_scale_packing": False},
    ),
    (ConfigError, "release must be one of 2.31, 2.30, got '2.29'", {"release": "2.29"}),
    (
        ConfigError,
        'down_weight_T_scales must be None with release="2.30"',
        {"release": "2.30", "down_weight_T": x4(I, H), "down_weight_T_scales": packed(I, H)},
    ),
]
SMALL_MATMUL = MatmulMxfp8KernelConfig(M=S, K=H, N=I)
DEVICE_BACKWARD: list[Case] = [
    *BACKWARD,
    (
        ShapeError,
        "S of hidden_states must be a positive multiple of 2 .run_with_lnc2",
        {"hidden_states": bf16(127, H), "output_grad": bf16(127, H)},
    ),
    (ShapeError, "I of gate_up_weights must be a positive multiple of 2", {"gate_up_weights": bf16(254, H)}),
    (
        ShapeError,
        "H of output_grad must be a positive multiple of 2",
        {"hidden_states": bf16(S, 127), "output_grad": bf16(S, 127)},
    ),
    (ConfigError, "fp8_x4_dtype must be float8_e4m3fn_x4", {"fp8_x4_dtype": "float8_e5m2_x4"}),
    (ConfigError, "use_scale_packing must be True or False", {"use_scale_packing": None}),
]
SUITES: list[Suite] = [
    (mlp_forward_mxfp8, forward_arguments, FUNCTIONAL_FORWARD),
    (mlp_forward_mxfp8_nki, device_forward_arguments, DEVICE_FORWARD),
    (mlp_backward_mxfp8, backward_arguments, FUNCTIONAL_BACKWARD),
    (mlp_backward_mxfp8_nki, backward_arguments, DEVICE_BACKWARD),
]


@pytest.mark.parametrize("call", broken_calls(SUITES))
def test_refused(call: BrokenCall) -> None:
    call.check()


@pytest.mark.parametrize(("kernel", "arguments", "cases"), SUITES)
def test_the_unchanged_arguments_are_accepted(
    kernel: Callable[..., Any], arguments: Callable[[], Arguments], cases: list[Case]
) -> None:
    assert kernel(**arguments()) is not None


@pytest.mark.parametrize("announced", [True, False])
def test_scales_of_512_fit_both_announcements(announced: bool) -> None:
    """Oversized and packed scales of K = 512 are the same bytes."""
    arguments = {"hidden": x4(S, 512), "hidden_scales": packed(S, 512), "use_scale_packing": announced}
    result = mlp_forward_mxfp8(gate_up_weights=bf16(2 * I, 512), down_weights=bf16(512, I), **arguments)
    raw = mlp_forward_mxfp8(bf16(S, 512), bf16(2 * I, 512), bf16(512, I))
    assert torch.equal(result.output, raw.output)


def test_matmul_config_of_another_problem_is_refused() -> None:
    config = MlpBwdMatmulConfig(phase1_down_proj=SMALL_MATMUL)
    with pytest.raises(ConfigError, match=r"phase1_down_proj must be a configuration for M, K, N = \(64, 128, 256\)"):
        mlp_backward_mxfp8_nki(**backward_arguments(), matmul_config=config)
    plain = mlp_backward_mxfp8_nki(**backward_arguments())
    tuned = mlp_backward_mxfp8_nki(**backward_arguments(), matmul_config=config, run_with_lnc2=False)
    for left, right in zip(plain, tuned, strict=True):
        assert torch.equal(left, right)
