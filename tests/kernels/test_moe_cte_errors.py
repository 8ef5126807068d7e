"""Every documented constraint of ``moe_cte`` broken once: the error names the function, the argument and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.reference import moe_cte_direct as direct
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import (
    BlockShardStrategy,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationConfig,
    QuantizationType,
    ShardOnBlockConfig,
    SkipMode,
)
from tests.kernels.moe_cte_calls import (
    BIASES,
    Arguments,
    B,
    E,
    H,
    I,
    Mode,
    T,
    arguments,
    bf16,
    conditions,
    fp8,
    fp8_scales,
    mx_arguments,
    spec,
    static_mx,
)
from tests.refusals import BrokenCall, Case, Suite, broken_calls, message_of

TENSORS: list[Case] = [
    (DTypeError, "hidden_states",
     arguments() | {"hidden_states": torch.ones(2, H).half()}),
    (ShapeError, "hidden_states", arguments() | {"hidden_states": bf16(1, T + 1, H)}),
    (ShapeError, "hidden_states", arguments() | {"hidden_states": bf16(T + 1, H)}),
    (ShapeError, "expert_affinities_masked",
     arguments() | {"expert_affinities_masked": torch.ones((T + 1) * E, 1)}),
    (DTypeError, "expert_affinities_masked",
     arguments() | {"expert_affinities_masked": torch.ones((T + 1) * E, 1, dtype=torch.int32)}),
    (ShapeError, "expert_affinities_masked",
     arguments() | {"expert_affinities_masked": torch.ones(T * E, 1)}),
    (DTypeError, "gate_up_proj_weight",
     arguments() | {"gate_up_proj_weight": bf16(E, H, 2, I).to(torch.float8_e5m2)}),
    (ShapeError, "gate_up_proj_weight",
     arguments() | {"gate_up_proj_weight": bf16(E, H, 2 * I)}),
    (DTypeError, "down_proj_weight",
     arguments() | {"down_proj_weight": torch.ones(E, I, H)}),
    (ShapeError, "down_proj_weight", arguments() | {"down_proj_weight": bf16(E, H, I)}),
    (DTypeError, "token_position_to_id",
     arguments() | {"token_position_to_id": torch.ones(2 * B)}),
    (ShapeError, "token_position_to_id", arguments() | {"block_size": 512}),
    (DTypeError, "block_to_expert", arguments() | {"block_to_expert": torch.ones(2)}),
    (ShapeError, "block_to_expert",
     arguments() | {"block_to_expert": torch.tensor([0, 3], dtype=torch.int32)}),
    (ShapeError, "block_size", arguments() | {"block_size": 256.0}),
    (ShapeError, "block_size", arguments() | {"block_size": 0}),
    (DeviceError, "down_proj_weight", arguments() | {"down_proj_weight": bf16(E, I, H, device="meta")}),
]  # fmt: skip
PAIRS: list[Case] = [
    (ConfigError, "down_proj_bias",
     arguments() | {"gate_and_up_proj_bias": bf16(E, 2, I)}),
    (ConfigError, "gate_and_up_proj_bias",
     arguments() | {"down_proj_bias": bf16(E, H)}),
    (ShapeError, "gate_and_up_proj_bias",
     arguments() | BIASES | {"gate_and_up_proj_bias": bf16(E, 2 * I)}),
    (ShapeError, "down_proj_bias", arguments() | BIASES | {"down_proj_bias": bf16(E, I)}),
    (DTypeError, "down_proj_bias",
     arguments() | BIASES | {"down_proj_bias": torch.ones(E, H).half()}),
    (ConfigError, "down_proj_scale",
     arguments() | {"gate_up_proj_scale": torch.ones(E, 1, 2 * I)}),
    (ConfigError, "gate_up_proj_scale",
     arguments() | {"quantization_config": QuantizationConfig(None, torch.ones(E, 1, H))}),
    (ConfigError, "down_in_scale",
     arguments() | fp8_scales() | {"gate_up_in_scale": torch.ones(T + 1, 1)}),
    (ConfigError, "gate_up_in_scale",
     arguments() | {"gate_up_in_scale": torch.ones(T + 1, 1), "down_in_scale": torch.ones(T + 1, 1)}),
    (ConfigError, "gate_up_proj_scale",
     arguments() | {"gate_up_proj_weight": fp8(E, H, 2, I), "down_proj_weight": fp8(E, I, H)}),
]  # fmt: skip
SCALES: list[Case] = [
    (ShapeError, "gate_up_proj_scale",
     arguments() | fp8_scales() | {"gate_up_proj_scale": torch.ones(E, 2 * I)}),
    (ShapeError, "down_proj_scale",
     arguments() | fp8_scales() | {"down_proj_scale": torch.ones(E, 128, H // 128)}),
    (DTypeError, "down_proj_scale",
     arguments() | fp8_scales() | {"down_proj_scale": torch.ones(E, 1, H).half()}),
    (ShapeError, "gate_up_in_scale",
     arguments() | fp8_scales() | {"gate_up_in_scale": torch.ones(T, 1), "down_in_scale": torch.ones(T + 1, 1)}),
    (ShapeError, "down_in_scale",
     arguments() | fp8_scales() | {"gate_up_in_scale": torch.ones(E, 2, 1), "down_in_scale": torch.ones(T + 1, 1)}),
    (ShapeError, "I of gate_up_proj_scale",
     arguments() | {"gate_up_proj_scale": torch.ones(E, 2, 2, 1, 128), "down_proj_scale": torch.ones(E, 1, 2, 128)}),
    (ShapeError, "down_proj_scale",
     arguments(inner=256)
     | {"gate_up_proj_scale": torch.ones(E, 2, 2, 1, 128), "down_proj_scale": torch.ones(E, 2, 1, 128)}),
    (ShapeError, "gate_up_proj_scale",
     arguments(inner=256)
     | {"gate_up_proj_scale": torch.rand(E, 2, 2, 1, 128), "down_proj_scale": torch.ones(E, 1, 2, 128)}),
    (DTypeError, "gate_up_proj_weight",
     arguments() | fp8_scales()
     | {"gate_up_proj_weight": fp8(E, H, 2, I, value=256), "down_proj_weight": fp8(E, I, H)}),
]  # fmt: skip
OPTIONS: list[Case] = [
    (ConfigError, "spec", arguments() | {"spec": "shard_on_i"}),
    *(
        (ConfigError, name, arguments() | {name: value})
        for name, value, got in (
            ("gate_clamp_upper_limit", "7", "'7'"),
            ("gate_clamp_lower_limit", float("nan"), "nan"),
            ("up_clamp_upper_limit", True, "True"),
            ("up_clamp_lower_limit", torch.tensor(7.0), "a Tensor"),
        )
    ),
    *(
        (ConfigError, name, arguments() | {name: "no"})
        for name in ("is_tensor_update_accumulating", "skip_gate_proj", "device_limits")
    ),
    *(
        (ConfigError, "quantization_config",
         arguments() | {"quantization_config": value})
        for value in ({}, {"gate_up_proj_scale": None}, (None, None))
    ),
    (ConfigError, "mx_scale_rule",
     arguments() | {"mx_scale_rule": "floor"}),
    (ConfigError, "mx_scale_rule", static_mx() | {"mx_scale_rule": "floor"}),
    (ConfigError, "activation_function",
     arguments() | {"activation_function": "SiLu"}),
    (ConfigError, "expert_affinities_scaling_mode",
     arguments() | {"expert_affinities_scaling_mode": 1}),
    (ConfigError, "skip_dma", arguments() | {"skip_dma": True}),
    (ConfigError, "compute_dtype",
     arguments() | {"compute_dtype": torch.float16}),
    (ConfigError, "accumulation_dtype",
     arguments() | {"accumulation_dtype": torch.float16}),
    (ConfigError, "convention", arguments() | {"convention": "kernel"}),
    (ConfigError, "mx_scale_rule", arguments() | {"mx_scale_rule": "nki"}),
    (ConfigError, "gate_up_activations_T", arguments() | {"gate_up_activations_T": bf16(1)}),
    (ConfigError, "down_activations", arguments() | {"down_activations": bf16(1)}),
    (ConfigError, "gate_clamp_upper_limit",
     arguments() | {"skip_gate_proj": True, "gate_clamp_upper_limit": 7.0}),
    (ConfigError, "is_tensor_update_accumulating",
     arguments(top_k=2) | {"is_tensor_update_accumulating": False}),
    (ShapeError, "block_to_expert",
     arguments() | {"spec": spec("shard_on_i_dropping"), "device_limits": False,
                    "block_to_expert": torch.tensor([0, 0], dtype=torch.int32)}),
    *(
        (ConfigError, "spec.shard_on_I.checkpoint_activation",
         arguments() | {"spec": spec(kind, checkpoint_activation=True)})
        for kind in ("shard_on_block", "shard_on_i_hybrid")
    ),
]  # fmt: skip
CONDITIONS: list[Case] = [
    (ShapeError, "conditions", arguments() | {"spec": spec("shard_on_i_hybrid")}),
    (ShapeError, "conditions",
     mx_arguments("shard_on_i_mx_hybrid") | {"device_limits": False}),
    (ShapeError, "conditions",
     arguments() | {"spec": spec("shard_on_i_hybrid"), "conditions": conditions(2, 2)}),
    (ShapeError, "conditions",
     mx_arguments() | {"conditions": conditions(3, 2)}),
    (ShapeError, "conditions",
     arguments() | {"spec": spec("shard_on_i_hybrid"), "conditions": conditions(3, 3)}),
    (ShapeError, "conditions",
     arguments() | {"spec": spec("shard_on_i_hybrid"), "conditions": conditions(3, 1)}),
    (ConfigError, "spec.shard_on_I.num_static_block",
     arguments() | {"spec": spec("shard_on_i_hybrid", num_static_block=-1), "conditions": conditions(3, 2)}),
    *(
        (ConfigError, "spec.shard_on_I.num_static_block",
         arguments() | {"spec": spec(kind, num_static_block=count)})
        for kind in ("shard_on_i", "shard_on_i_dropping", "shard_on_block")
        for count in (1, -1)
    ),
    (ConfigError, "spec.shard_on_I.num_static_block",
     arguments() | {"spec": spec("shard_on_i_hybrid", num_static_block=3), "conditions": conditions(3, 2)}),
]  # fmt: skip
HALVES = {"block_sharding_strategy": "HI_LO", "non_overlapping_shards": True}
STATIC = {"n_static_blocks": 1, "n_dynamic_blocks": 3}
SCHEDULING: list[Case] = [
    *(
        (ConfigError, f"spec.shard_on_block.{name}",
         arguments() | {"spec": spec("shard_on_block", **{name: 0})})
        for name in ("n_block_per_iter", "top_k", "ep_degree")
    ),
    (ConfigError, "spec.shard_on_block.block_sharding_strategy",
     arguments() | {"spec": spec("shard_on_block", block_sharding_strategy=BlockShardStrategy.HI_LO)}),
    (ConfigError, "spec.shard_on_block.n_static_blocks",
     mx_arguments(n_static_blocks=1, n_dynamic_blocks=55)),
    *(
        (ConfigError, f"spec.shard_on_block.{name}",
         (mx_arguments(kind) if kind.endswith("mx") else arguments()) | {"spec": spec(kind, **{name: value})})
        for kind, names in (
            ("shard_on_i", {"n_block_per_iter": 0, "top_k": 2, "ep_degree": 2, **HALVES, **STATIC}),
            ("shard_on_i_mx", {"n_block_per_iter": 2, "quantization_type": "ROW", **HALVES, **STATIC}),
            ("shard_on_block_mx", HALVES),
            ("shard_on_block", STATIC | {"quantization_type": "ROW"}),
        )
        for name, value in names.items()
    ),
    (ConfigError, "is_tensor_update_accumulating",
     mx_arguments() | {"is_tensor_update_accumulating": False}),
    (ConfigError, "spec.shard_on_block.quantization_type",
     mx_arguments(quantization_type=QuantizationType.ROW)),
]  # fmt: skip
MX: list[Case] = [
    *(
        (ConfigError, f"spec.shard_on_block.{name}",
         arguments() | {"spec": spec("shard_on_block", **{name: value})})
        for name, value in (
            ("use_packed_scales", True), ("quantization_type", "STATIC_MX"), ("weight_dtype", torch.float8_e5m2),
        )
    ),
    *(
        (ConfigError, "expert_affinities_scaling_mode",
         mx_arguments(kind) | {"expert_affinities_scaling_mode": mode})
        for kind in ("shard_on_block_mx", "shard_on_i_mx")
        for mode in (Mode.NO_SCALE, Mode.PRE_SCALE, Mode.PRE_SCALE_DELAYED)
    ),
    (ConfigError, "spec.shard_on_I.expert_affinity_multiply_on_I",
     mx_arguments(expert_affinity_multiply_on_I=True)),
    (ConfigError, "skip_gate_proj", mx_arguments() | {"skip_gate_proj": True}),
    (ConfigError, "spec.shard_on_I.checkpoint_activation",
     mx_arguments(checkpoint_activation=True)),
    (ConfigError, "gate_up_proj_scale",
     mx_arguments() | {"gate_up_proj_scale": None, "down_proj_scale": None}),
    (DTypeError, "gate_up_proj_scale",
     mx_arguments() | {"gate_up_proj_scale": torch.ones(E, 2, 1)}),
    (ShapeError, "gate_up_proj_scale",
     mx_arguments() | {"gate_up_proj_scale": torch.ones(E, 128, 1, 2, 64, dtype=torch.uint8)}),
    (ShapeError, "down_proj_scale",
     mx_arguments() | {"down_proj_scale": torch.ones(E, 16, 1, H, dtype=torch.uint8)}),
    (DTypeError, "gate_up_proj_weight",
     mx_arguments() | {"gate_up_proj_weight": bf16(E, H, 2, 64)}),
    (ShapeError, "gate_up_proj_weight",
     mx_arguments() | {"gate_up_proj_weight": torch.zeros(E, 128, 2, 2, 64, dtype=torch.int32)}),
    (ShapeError, "down_proj_weight",
     mx_arguments() | {"down_proj_weight": torch.zeros(E, 128, 1, H, dtype=torch.int32)}),
    (DTypeError, "down_proj_weight",
     mx_arguments() | {"down_proj_weight": torch.zeros(E, 16, 1, H, dtype=torch.int16)}),
    (ConfigError, "weight_dtype",
     mx_arguments(weight_dtype=torch.bfloat16)),
    (ConfigError, "weight_dtype",
     mx_arguments(weight_dtype=torch.float8_e5m2)
     | {"gate_up_proj_weight": torch.zeros(E, 128, 2, 1, 64, dtype=torch.int16)}),
    (ShapeError, "gate_and_up_proj_bias",
     mx_arguments() | BIASES | {"gate_and_up_proj_bias": bf16(E, 2, 64)}),
    (ShapeError, "H of hidden_states",
     mx_arguments() | {"hidden_states": bf16(T + 1, 256)}),
    (ConfigError, "gate_up_in_scale",
     mx_arguments() | {"gate_up_in_scale": torch.ones(E, 2, 1)}),
    (ConfigError, "spec.shard_on_block.use_packed_scales",
     mx_arguments("shard_on_i_mx", quantization_type=QuantizationType.MX) | {
         "spec": spec("shard_on_i_mx", use_packed_scales=True),
         "gate_up_proj_scale": torch.ones(E, 128, 1, 2, 64, dtype=torch.uint8),
         "down_proj_scale": torch.ones(E, 128, 1, H, dtype=torch.uint8)}),
    (ConfigError, "gate_up_in_scale",
     static_mx() | {"gate_up_in_scale": None, "down_in_scale": None}),
    (ShapeError, "gate_up_in_scale",
     static_mx() | {"gate_up_in_scale": torch.ones(T + 1, 1)}),
    (ShapeError, "gate_up_in_scale",
     static_mx() | {"gate_up_in_scale": torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(E, 2, 1)}),
    (ShapeError, "gate_up_proj_scale",
     static_mx() | {"gate_up_proj_scale": torch.ones(E, 2)}),
]  # fmt: skip


SUITE: Suite = (moe_cte, dict, [*TENSORS, *PAIRS, *SCALES, *OPTIONS, *CONDITIONS, *SCHEDULING, *MX])


CALLS = broken_calls([SUITE])


@pytest.mark.parametrize("call", CALLS)
def test_refused(call: BrokenCall) -> None:
    call.check()


@pytest.mark.parametrize(
    "given",
    [
        arguments(),
        arguments() | BIASES,
        arguments() | fp8_scales(),
        arguments(inner=256)
        | {"gate_up_proj_scale": torch.ones(E, 2, 2, 1, 128), "down_proj_scale": torch.ones(E, 1, 2, 128)},
        arguments() | {"spec": spec("shard_on_block"), "skip_dma": SkipMode(skip_weight=True)},
        arguments() | {"spec": spec("shard_on_i_hybrid", num_static_block=0), "conditions": conditions(3, 2)},
        arguments(1024) | {"spec": spec("shard_on_i_dropping")},
        arguments() | {"conditions": conditions(3, 2)},
        arguments() | {"spec": spec("shard_on_block"), "conditions": conditions(2, 1)},
        arguments() | {"is_tensor_update_accumulating": False},
        mx_arguments(),
        mx_arguments() | {"conditions": conditions(4, 2)},
        mx_arguments("shard_on_i_mx", inner=1024),
        mx_arguments("shard_on_i_mx_hybrid", inner=1024) | {"conditions": conditions(4, 2)},
        static_mx(),
        arguments()
        | {
            "spec": spec(
                "shard_on_block", block_sharding_strategy=BlockShardStrategy.HI_LO, non_overlapping_shards=True
            )
        },
    ],
)
def test_the_unbroken_calls_are_accepted(given: Arguments) -> None:
    assert moe_cte(**given).output.shape == given["hidden_states"].shape


@pytest.mark.parametrize(
    ("call", "given", "kind", "argument"),
    [
        (direct.bwmm_shard_on_block, arguments(64), ShapeError, "block_size of the plan"),
        (direct.blockwise_mm_baseline_shard_intermediate, arguments(1024), ShapeError, "block_size"),
        (
            direct.blockwise_mm_baseline_shard_intermediate,
            arguments() | fp8_scales() | {"is_block_quant": True},
            ConfigError,
            "is_block_quant",
        ),
        (
            direct.blockwise_mm_baseline_shard_intermediate,
            arguments() | {"gate_up_proj_scale": torch.ones(E, 2, 1), "is_per_tensor": False},
            ConfigError,
            "is_per_tensor",
        ),
        (direct.blockwise_mm_shard_intermediate_dropping, arguments(256), ShapeError, "block_size of the plan"),
        (
            direct.blockwise_mm_baseline_shard_hidden,
            arguments() | {"down_activations": bf16(1, B, H)},
            ShapeError,
            "down_activations",
        ),
        (direct.blockwise_mm_shard_intermediate_mx, mx_arguments(), ConfigError, "expert_affinities_scaling_mode"),
        (
            direct.blockwise_mm_shard_intermediate_mx,
            mx_arguments() | {"use_block128_scales": True},
            ConfigError,
            "use_block128_scales",
        ),
        (direct.bwmm_shard_on_block_mx, mx_arguments() | {"block_size": None}, ShapeError, "block_size"),
    ],
)
def test_direct_kernels_refuse_under_their_own_name(
    call: Callable[..., Any], given: Arguments, kind: type[NeuronMoEError], argument: str
) -> None:
    given = {name: value for name, value in given.items() if name != "spec"}
    if call is direct.blockwise_mm_baseline_shard_hidden:
        given.pop("activation_function")
    message_of(kind, argument, call, **given)


def test_options_are_members_or_their_names() -> None:
    assert MoECTESpec("shard_on_i_mx").implementation is MoECTEImplementation.shard_on_i_mx  # type: ignore[arg-type]
    message_of(ConfigError, "implementation", MoECTESpec, implementation="shard_on_h")
    message_of(ConfigError, "block_sharding_strategy", ShardOnBlockConfig, block_sharding_strategy="HILO")
