"""The device limits of every implementation of ``moe_cte``, each broken once, and lifted."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, NeuronMoEError, ShapeError
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    SkipMode,
)
from tests.kernels.moe_cte_calls import (
    Arguments,
    Mode,
    arguments,
    conditions,
    fp8_scales,
    mx_arguments,
    spec,
)
from tests.refusals import refused

Case = tuple[type[NeuronMoEError], str, str, Arguments]

LIMITS: list[Case] = [
    *(
        (ShapeError, "block_size of the plan", f"{step} .{kind}",
         arguments(block) | {"spec": spec(kind), "conditions": conditions(3, 2)})
        for kind, block, step in (
            ("shard_on_block", 64, 128), ("shard_on_i", 128, 256), ("shard_on_i_hybrid", 128, 256),
            ("shard_on_i_dropping", 512, 1024),
        )
    ),
    *(
        (ShapeError, "block_size of the plan", f"{step} .{kind}",
         mx_arguments(kind, block) | {"conditions": conditions(blocks + 2, 2)})
        for kind, block, step, blocks in (
            ("shard_on_block_mx", 64, 128, 3), ("shard_on_i_mx", 128, 256, 2), ("shard_on_i_mx_hybrid", 128, 256, 2),
        )
    ),
    (ShapeError, "H of hidden_states", "got 256", arguments(hidden=256)),
    (ShapeError, "H of hidden_states", "got 8704", arguments(hidden=8704)),
    (ShapeError, "I of gate_up_proj_weight", "got 24", arguments(inner=24)),
    (ShapeError, "I of gate_up_proj_weight", "an MX group", mx_arguments(inner=48)),
    (ShapeError, "I of gate_up_proj_weight", "512 .shard_on_block_mx",
     mx_arguments(inner=544)),
    (ShapeError, "I of gate_up_proj_weight", "1024 .shard_on_i_mx",
     mx_arguments("shard_on_i_mx", inner=512)),
    (ShapeError, "T of hidden_states", "got 100",
     arguments(tokens=100) | {"spec": spec("shard_on_block")}),
    *(
        (ConfigError, "activation_function", f"got {name}",
         arguments() | {"activation_function": ActFnType[name]})
        for name in ("GELU", "GELU_Tanh_Approx")
    ),
    (ConfigError, "activation_function", "got SquaredReLU",
     mx_arguments() | {"activation_function": ActFnType.SquaredReLU}),
    (ConfigError, "expert_affinities_scaling_mode", "got PRE_SCALE_DELAYED",
     arguments() | {"spec": spec("shard_on_block"), "expert_affinities_scaling_mode": Mode.PRE_SCALE_DELAYED}),
    (ConfigError, "expert_affinities_scaling_mode", "got PRE_SCALE_DELAYED",
     arguments() | {"spec": spec("shard_on_i_hybrid"), "conditions": conditions(3, 2),
                    "expert_affinities_scaling_mode": Mode.PRE_SCALE_DELAYED}),
    (ConfigError, "expert_affinities_scaling_mode", "",
     arguments(1024) | {"spec": spec("shard_on_i_dropping"), "expert_affinities_scaling_mode": Mode.PRE_SCALE}),
    *(
        (ConfigError, "spec.shard_on_I.expert_affinity_multiply_on_I", "",
         arguments() | {"spec": spec(kind, expert_affinity_multiply_on_I=True), "conditions": conditions(3, 2)})
        for kind in ("shard_on_block", "shard_on_i_hybrid")
    ),
    (ShapeError, "block_size", "got 1024",
     arguments(1024) | {"expert_affinities_scaling_mode": Mode.PRE_SCALE}),
    *(
        (ConfigError, "gate_up_proj_scale", "",
         arguments(block) | fp8_scales() | {"spec": spec(kind)})
        for kind, block in (("shard_on_block", 256), ("shard_on_i_dropping", 1024))
    ),
    *(
        (ConfigError, "skip_dma.skip_weight", "",
         arguments(block)
         | {"spec": spec(kind), "skip_dma": SkipMode(skip_weight=True), "conditions": conditions(3, 2)})
        for kind, block in (("shard_on_i", 256), ("shard_on_i_hybrid", 256), ("shard_on_i_dropping", 1024))
    ),
    (ConfigError, "skip_gate_proj", "",
     arguments() | {"spec": spec("shard_on_block"), "skip_gate_proj": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "argument", "says", "given"), LIMITS)
def test_limits(kind: type[NeuronMoEError], argument: str, says: str, given: Arguments) -> None:
    with refused(kind, argument, says, where="moe_cte"):
        moe_cte(**given)


@pytest.mark.parametrize(("kind", "argument", "says", "given"), LIMITS)
def test_device_limits_can_be_lifted_where_the_mathematics_is_defined(
    kind: type[NeuronMoEError], argument: str, says: str, given: Arguments
) -> None:
    if says == "an MX group":
        with refused(kind, argument, says):
            moe_cte(**given, device_limits=False)
        return
    assert moe_cte(**given, device_limits=False).output.isfinite().all()


@pytest.mark.parametrize("given", [arguments(128), arguments() | {"activation_function": ActFnType.GELU}])
def test_fp32_and_the_golden_convention_know_no_device_limits(given: Arguments) -> None:
    names = ("hidden_states", "gate_up_proj_weight", "down_proj_weight")
    in_fp32 = given | {name: given[name].float() for name in names}
    assert moe_cte(**in_fp32).output.dtype == torch.float32
    assert moe_cte(**given, convention="golden").output.dtype == torch.bfloat16
    with pytest.raises(NeuronMoEError):
        moe_cte(**in_fp32, device_limits=True)
