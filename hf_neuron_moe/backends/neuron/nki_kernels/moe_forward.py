"""``moe_cte`` (nki-library 2.29 and later), bf16 experts; its records are made inside the kernel, which gets none."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object

moe_cte = nkilib_object("moe_cte")
MoECTESpec = nkilib_object("MoECTESpec")
MoECTEImplementation = nkilib_object("MoECTEImplementation")
ShardOnIConfig = nkilib_object("ShardOnIConfig")
ActFnType: Any = find_object("ActFnType")


@nki.jit
def moe_forward(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    checkpoint: bool,
    affinity_on_i: bool,
) -> Any:
    """Return the output ``[T + 1, H]`` of shard_on_i; with `checkpoint` also the activations that the backward needs.

    Those are gate and up ``[N, 2, I, B]`` and, unless `affinity_on_i`, the down projection ``[N, B, H]``. Accumulating
    updates zero the output first, so tokens without an expert of this rank are zero even where top-k is 1.
    """
    return moe_cte(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        spec=MoECTESpec(
            implementation=MoECTEImplementation.shard_on_i,
            shard_on_I=ShardOnIConfig(checkpoint_activation=checkpoint, expert_affinity_multiply_on_I=affinity_on_i),
        ),
    )


@nki.jit
def moe_forward_gated(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    checkpoint: bool,
    affinity_on_i: bool,
    swish: bool,
    gate_and_up_proj_bias: Any = None,
    down_proj_bias: Any = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return the same of another gate: `swish` is ``x sigmoid(1.702 x)``, biases are fp32 ``[E, 2, I]`` and ``[E, H]``.

    Limits are those after the biases; the kernel takes the upper one first.
    """
    return moe_cte(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        spec=MoECTESpec(
            implementation=MoECTEImplementation.shard_on_i,
            shard_on_I=ShardOnIConfig(checkpoint_activation=checkpoint, expert_affinity_multiply_on_I=affinity_on_i),
        ),
        gate_and_up_proj_bias=gate_and_up_proj_bias,
        down_proj_bias=down_proj_bias,
        activation_function=ActFnType.Swish if swish else ActFnType.SiLU,
        gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit,
        up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit,
    )


@nki.jit
def moe_forward_ungated(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    checkpoint: bool,
    affinity_on_i: bool,
    skip_gate_proj: bool,
    gate_and_up_proj_bias: Any = None,
    down_proj_bias: Any = None,
) -> Any:
    """Return the same without a gate projection (2.33): ``max(u, 0)`` squared; `skip_gate_proj` is True."""
    return moe_cte(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        spec=MoECTESpec(
            implementation=MoECTEImplementation.shard_on_i,
            shard_on_I=ShardOnIConfig(checkpoint_activation=checkpoint, expert_affinity_multiply_on_I=affinity_on_i),
        ),
        gate_and_up_proj_bias=gate_and_up_proj_bias,
        down_proj_bias=down_proj_bias,
        activation_function=ActFnType.SquaredReLU,
        skip_gate_proj=skip_gate_proj,
    )
