"""Every documented constraint of the MXFP8 MLP kernels broken once: the error names kernel, argument and rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.kernels import (
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_nki,
    mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki,
)
from tests.refusals import Arguments, BrokenCall, Case, Suite, bf16, broken_calls, refused, x4

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
        "hidden",
        {"hidden": torch.ones(S, H)},
    ),
    (DTypeError, "down_weights", {"down_weights": [1.0]}),
    (ShapeError, "hidden", {"hidden": bf16(1, S, H)}),
    (ShapeError, "H of hidden", {"hidden": bf16(S, 64)}),
    (
        ShapeError,
        "H of gate_up_weights",
        {"gate_up_weights": bf16(2 * I, 96), "hidden": swizzle(bf16(S, 96)), "hidden_is_swizzled": True},
    ),
    (ShapeError, "S of hidden", {"hidden": bf16(12, H)}),
    (
        ShapeError,
        "gate_up_weights",
        {"gate_up_weights": bf16(2 * I, 2 * H)},
    ),
    (ShapeError, "2I of gate_up_weights", {"gate_up_weights": bf16(257, H)}),
    (ShapeError, "I of gate_up_weights", {"gate_up_weights": bf16(208, H)}),
    (ShapeError, "down_weights", {"down_weights": bf16(I, H)}),
    (DeviceError, "down_weights", {"down_weights": bf16(H, I, device="meta")}),
    (ConfigError, "dtype", {"dtype": torch.float16}),
    (
        DTypeError,
        "hidden",
        {"hidden": quantize_mx(bf16(S, H)).codes, "hidden_scales": packed(S, H)},
    ),
    (
        DTypeError,
        "hidden",
        {"hidden": quantize_mx(bf16(S, H), fmt="e5m2").codes.view(torch.float8_e5m2), "hidden_scales": packed(S, H)},
    ),
    (DTypeError, "hidden", {"hidden_scales": packed(S, H)}),
    (
        DTypeError,
        "hidden_scales",
        {"hidden": x4(S, H), "hidden_scales": packed(S, H).int()},
    ),
    (
        ShapeError,
        "hidden_scales",
        {"hidden": x4(S, H), "hidden_scales": quantize_mx(bf16(S, H)).scales},
    ),
    (
        ConfigError,
        "hidden_scales",
        {"hidden": x4(S, H), "hidden_scales": oversized(S, H)},
    ),
    (
        ConfigError,
        "down_scales",
        {"down_weights": x4(H, I), "down_scales": packed(H, I), "use_scale_packing": False},
    ),
    (
        ShapeError,
        "K/4 of gate_up_weights",
        {"gate_up_weights": bf16(4, 8 * I), "gate_up_is_swizzled": True},
    ),
    (
        ShapeError,
        "4F of down_weights",
        {"down_weights": bf16(64, 4 * H + 2), "down_is_swizzled": True},
    ),
    (ConfigError, "hidden", with_384("hidden")),
    (ConfigError, "gate_up_weights", with_384("gate_up_weights")),
    (ConfigError, "down_weights", with_384("down_weights")),
]
RULE = (ConfigError, "mx_scale_rule", {"mx_scale_rule": "flor"})
FORWARD += [
    RULE,
    (ConfigError, "use_scale_packing", {"use_scale_packing": 1}),
    (ConfigError, "hidden_is_swizzled", {"hidden_is_swizzled": "no"}),
    (ConfigError, "down_is_swizzled", {"down_is_swizzled": None}),
]
FUNCTIONAL_FORWARD: list[Case] = [
    *FORWARD,
    *[
        (
            ConfigError,
            name,
            {name: bf16(S, I)},
        )
        for name in ("save_gate_pre", "save_gate_act", "save_up", "save_hidden")
    ],
    (ConfigError, "save_up", {"save_up": 1}),
]
DEVICE_FORWARD: list[Case] = [
    *FORWARD,
    (ShapeError, "S of hidden", {"hidden": bf16(15, H)}),
    (ConfigError, "gate_up_tiles_n", {"gate_up_tiles_n": 0}),
    (ConfigError, "down_tiles_k", {"down_tiles_k": 1.0}),
    (ConfigError, "spill_reload", {"spill_reload": 1}),
    (ConfigError, "fp8_x4_dtype", {"fp8_x4_dtype": torch.float8_e5m2}),
    (ShapeError, "intermediate_hbm", {"intermediate_hbm": bf16(S, H)}),
    (DTypeError, "intermediate_hbm", {"intermediate_hbm": torch.ones(S, I)}),
    (DTypeError, "intermediate_hbm", {"intermediate_hbm": None}),
    (ShapeError, "save_up", {"save_up": bf16(S, H)}),
    (
        DTypeError,
        "save_hidden",
        {"save_hidden": torch.ones(S, I)},
    ),
    (DTypeError, "save_gate_pre", {"save_gate_pre": True}),
]
BACKWARD: list[Case] = [
    (DTypeError, "output_grad", {"output_grad": torch.ones(S, H)}),
    (
        DTypeError,
        "hidden_states",
        {"hidden_states": bf16(S, H).half()},
    ),
    (ShapeError, "output_grad", {"output_grad": bf16(S, 2 * H)}),
    (
        ShapeError,
        "S of hidden_states",
        {"hidden_states": bf16(64, H), "output_grad": bf16(64, H)},
    ),
    (
        ShapeError,
        "H of hidden_states",
        {"hidden_states": bf16(S, 96), "output_grad": bf16(S, 96)},
    ),
    (ShapeError, "I of gate_up_weights", {"gate_up_weights": bf16(192, H)}),
    (ShapeError, "2I of gate_up_weights", {"gate_up_weights": bf16(257, H)}),
    (ShapeError, "gate_up_weights", {"gate_up_weights": bf16(2 * I, 2 * H)}),
    (ShapeError, "gate_pre", {"gate_pre": bf16(S, H)}),
    (DTypeError, "intermediate", {"intermediate": torch.ones(S, I)}),
    (ShapeError, "down_proj_weight", {"down_proj_weight": bf16(I, H)}),
    (DTypeError, "down_proj_weight", {"down_proj_weight": None}),
    (DTypeError, "gate_up_weights", {"gate_up_weights": None}),
    (DeviceError, "up", {"up": bf16(S, I, device="meta")}),
    (
        DTypeError,
        "gate_up_weight_T",
        {"gate_up_weights": x4(2 * I, H), "gate_up_weights_scales": packed(2 * I, H)},
    ),
    (DTypeError, "output_grad_T_scales", {"output_grad_T": bf16(H, S)}),
    (DTypeError, "hidden_states_T", {"hidden_states_T_scales": packed(H, S)}),
    (
        ShapeError,
        "down_weight_T",
        {"down_weight_T": x4(H, I), "down_weight_T_scales": packed(H, I)},
    ),
    (
        ShapeError,
        "gate_up_weight_T",
        {"gate_up_weight_T": x4(H, I), "gate_up_weight_T_scales": packed(H, I)},
    ),
    (
        ConfigError,
        "output_grad_T_scales",
        {"output_grad_T": x4(H, S), "output_grad_T_scales": oversized(H, S)},
    ),
    (ConfigError, "clamp_limits", {"clamp_limits": (1.0, -1.0)}),
    (ConfigError, "matmul_config", {"matmul_config": {}}),
]
BACKWARD += [
    RULE,
    (ConfigError, "use_scale_packing", {"use_scale_packing": "packed"}),
    (ConfigError, "matmul_config", {"matmul_config": object()}),
    (
        ConfigError,
        "matmul_config.phase2_hidden_grad",
        {"matmul_config": MlpBwdMatmulConfig(phase2_hidden_grad=MatmulMxfp8KernelConfig(M=S, K=H, N=I + 1))},
    ),
    (
        ConfigError,
        "matmul_config.recompute_up.tile_k",
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
        "use_scale_packing",
        {"release": "2.30", "use_scale_packing": False},
    ),
    (ConfigError, "release", {"release": "2.29"}),
    (
        ConfigError,
        "down_weight_T_scales",
        {"release": "2.30", "down_weight_T": x4(I, H), "down_weight_T_scales": packed(I, H)},
    ),
]
SMALL_MATMUL = MatmulMxfp8KernelConfig(M=S, K=H, N=I)
DEVICE_BACKWARD: list[Case] = [
    *BACKWARD,
    (
        ShapeError,
        "S of hidden_states",
        {"hidden_states": bf16(127, H), "output_grad": bf16(127, H)},
    ),
    (ShapeError, "I of gate_up_weights", {"gate_up_weights": bf16(254, H)}),
    (
        ShapeError,
        "H of output_grad",
        {"hidden_states": bf16(S, 127), "output_grad": bf16(S, 127)},
    ),
    (ConfigError, "fp8_x4_dtype", {"fp8_x4_dtype": "float8_e5m2_x4"}),
    (ConfigError, "use_scale_packing", {"use_scale_packing": None}),
]
SUITES: list[Suite] = [
    (mlp_forward_mxfp8, forward_arguments, FUNCTIONAL_FORWARD),
    (mlp_forward_mxfp8_nki, device_forward_arguments, DEVICE_FORWARD),
    (mlp_backward_mxfp8, backward_arguments, FUNCTIONAL_BACKWARD),
    (mlp_backward_mxfp8_nki, backward_arguments, DEVICE_BACKWARD),
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


@pytest.mark.parametrize("announced", [True, False])
def test_scales_of_512_fit_both_announcements(announced: bool) -> None:
    """Oversized and packed scales of K = 512 are the same bytes."""
    arguments = {"hidden": x4(S, 512), "hidden_scales": packed(S, 512), "use_scale_packing": announced}
    result = mlp_forward_mxfp8(gate_up_weights=bf16(2 * I, 512), down_weights=bf16(512, I), **arguments)
    raw = mlp_forward_mxfp8(bf16(S, 512), bf16(2 * I, 512), bf16(512, I))
    assert torch.equal(result.output, raw.output)


def test_matmul_config_of_another_problem_is_refused() -> None:
    config = MlpBwdMatmulConfig(phase1_down_proj=SMALL_MATMUL)
    with refused(ConfigError, "matmul_config.phase1_down_proj"):
        mlp_backward_mxfp8_nki(**backward_arguments(), matmul_config=config)
    plain = mlp_backward_mxfp8_nki(**backward_arguments())
    tuned = mlp_backward_mxfp8_nki(**backward_arguments(), matmul_config=config, run_with_lnc2=False)
    for left, right in zip(plain, tuned, strict=True):
        assert torch.equal(left, right)
