"""Every documented constraint of release 2.30's MXFP8 MLP backward broken once: kernel, argument and rule are named."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.kernels import mlp_backward_mxfp8_nki_2_30
from tests.refusals import Arguments, BrokenCall, Case, bf16, broken_calls, x4

S, H, I = 128, 128, 256  # noqa: E741


def old_arguments(S: int = S, H: int = H, I: int = I) -> Arguments:  # noqa: E741
    names = ("d_gate", "d_up", "gate_pre", "gate_act", "up", "hidden")
    return {
        "output_hidden_states_grad": bf16(S, H), "hidden_states": bf16(S, H), "gate_proj_weight_T": bf16(H, I),
        "up_proj_weight_T": bf16(H, I), "down_proj_weight_T": bf16(I, H), "gate_up_weights": bf16(2 * I, H),
        "hidden_states_T": bf16(H, S), "output_grad_T": bf16(H, S), "hidden_T": bf16(I, S),
        "silu_up_mul_gate_grad_T_scratch": bf16(2 * I, S), **{f"{name}_scratch": bf16(S, I) for name in names},
    }  # fmt: skip


def old_384(name: str) -> Arguments:
    """Operands of release 2.30 with S = H = I = 384 of which one is pre-swizzled."""
    prefix = {
        "output_hidden_states_grad": "output_grad", "down_proj_weight_T": "down_weight",
        "gate_proj_weight_T": "gate_weight", "up_proj_weight_T": "up_weight",
    }.get(name, name)  # fmt: skip
    arguments = old_arguments(384, 384, 384)
    return arguments | {name: swizzle(arguments[name]), f"{prefix}_is_swizzled": True}


OLD_BACKWARD: list[Case] = [
    (ConfigError, "mx_scale_rule", {"mx_scale_rule": "flor"}),
    *[
        (ShapeError, name, {name: bf16(size + 128, other)})
        for name, size, other in (
            ("output_hidden_states_grad", S, H),
            ("hidden_states", S, H),
            ("gate_proj_weight_T", H, I),
            ("up_proj_weight_T", H, I),
            ("down_proj_weight_T", I, H),
            ("gate_up_weights", 2 * I, H),
            ("hidden_states_T", H, S),
            ("output_grad_T", H, S),
            ("hidden_T", I, S),
        )
    ],
    (ShapeError, "down_proj_weight_T", {"down_proj_weight_T": bf16(I, 2 * H)}),
    (ConfigError, "gate_weight_is_swizzled", {"gate_weight_is_swizzled": 1}),
    (ConfigError, "run_with_lnc2", {"run_with_lnc2": 2}),
    (ShapeError, "S of output_hidden_states_grad", old_arguments(S=127)),
    (ShapeError, "I of down_proj_weight_T", old_arguments(I=127)),
    (ShapeError, "H of output_grad_T", old_arguments(H=127)),
    (ShapeError, "H of output_hidden_states_grad", old_arguments(H=96)),
    (
        ShapeError,
        "H of down_proj_weight_T",
        old_arguments(H=96) | {"output_hidden_states_grad": swizzle(bf16(S, 96)), "output_grad_is_swizzled": True},
    ),
    (ShapeError, "I of down_proj_weight_T", old_arguments(I=96)),
    (ShapeError, "S of output_hidden_states_grad", old_arguments(S=96)),
    (ShapeError, "gate_proj_weight_T", {"gate_proj_weight_T": bf16(I, H)}),
    (ShapeError, "hidden_T", {"hidden_T": bf16(S, I)}),
    (ShapeError, "hidden", {"hidden": bf16(S, H)}),
    (DTypeError, "up", {"up": torch.ones(S, I)}),
    (
        ShapeError,
        "silu_up_mul_gate_grad_T_scratch",
        {"silu_up_mul_gate_grad_T_scratch": bf16(S, 2 * I)},
    ),
    (
        DTypeError,
        "d_gate_scratch",
        {"d_gate_scratch": torch.ones(S, I)},
    ),
    (ConfigError, "phase3_tiles_m", {"phase3_tiles_m": -1}),
    (ConfigError, "fp8_x4_dtype", {"fp8_x4_dtype": None}),
    (
        ConfigError,
        "down_weight_scales",
        {"down_proj_weight_T": x4(I, H), "down_weight_scales": to_oversized(quantize_mx(bf16(I, H)).scales)},
    ),
    (
        DTypeError,
        "output_hidden_states_grad",
        {
            "output_hidden_states_grad": quantize_mx(bf16(S, H)).codes,
            "output_grad_scales": to_packed(quantize_mx(bf16(S, H)).scales),
        },
    ),
    (
        DTypeError,
        "hidden_states",
        {"hidden_states": bf16(S, H).half()},
    ),
    (DeviceError, "hidden_T", {"hidden_T": bf16(I, S, device="meta")}),
    *[
        (ConfigError, name, old_384(name))
        for name in (
            "output_hidden_states_grad",
            "down_proj_weight_T",
            "gate_proj_weight_T",
            "up_proj_weight_T",
            "hidden_states_T",
            "hidden_states",
            "gate_up_weights",
            "output_grad_T",
            "hidden_T",
        )
    ],
]


CALLS = broken_calls([(mlp_backward_mxfp8_nki_2_30, old_arguments, OLD_BACKWARD)])


@pytest.mark.parametrize("call", CALLS)
def test_refused(call: BrokenCall) -> None:
    call.check()


def test_the_unchanged_arguments_are_accepted() -> None:
    assert mlp_backward_mxfp8_nki_2_30(**old_arguments()) is not None
