"""``blockwise_mm_bwd`` of nki-library 2.31 and later: the affinity on the intermediate, so no down checkpoint."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object

blockwise_mm_bwd = nkilib_object("blockwise_mm_bwd")
AffinityOption = nkilib_object("AffinityOption")
ShardOption = nkilib_object("ShardOption")
SkipMode = nkilib_object("BackwardSkipMode")
ActFnType: Any = find_object("BackwardActFnType")
ClampLimits: Any = find_object("ClampLimits")


@nki.jit
def moe_backward(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_act_checkpoint_T: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    output_hidden_states_grad: Any,
    block_size: int,
) -> Any:
    """Return the gradients of hidden states ``[T, H]``, affinities, gate_up ``[E, H, 2, I]`` and down ``[E, I, H]``.

    Unused slots hold -1. ``SHARD_ON_FREE`` is named because the entry's own defaults contradict each other.
    """
    return blockwise_mm_bwd(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint=None,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        skip_dma=SkipMode(skip_token=True),
        shard_option=ShardOption.SHARD_ON_FREE,
        affinity_option=AffinityOption.AFFINITY_ON_I,
    )


@nki.jit
def moe_backward_gated(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_act_checkpoint_T: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    output_hidden_states_grad: Any,
    block_size: int,
    swish: bool,
    bias: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return the same of another gate, and with `bias` gradients ``[E, 2, I]`` and ``[E, H]`` of the biases.

    Limits are those of the forward. The gradient of affinities lacks the down bias.
    """
    return blockwise_mm_bwd(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint=None,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        skip_dma=SkipMode(skip_token=True),
        shard_option=ShardOption.SHARD_ON_FREE,
        affinity_option=AffinityOption.AFFINITY_ON_I,
        clamp_limits=ClampLimits(
            linear_clamp_upper_limit=up_clamp_upper_limit,
            linear_clamp_lower_limit=up_clamp_lower_limit,
            non_linear_clamp_upper_limit=gate_clamp_upper_limit,
            non_linear_clamp_lower_limit=gate_clamp_lower_limit,
        ),
        bias=bias,
        activation_type=ActFnType.Swish if swish else ActFnType.SiLU,
    )


@nki.jit
def moe_backward_ungated(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_act_checkpoint_T: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    output_hidden_states_grad: Any,
    block_size: int,
    skip_gate_proj: bool,
    bias: bool = False,
) -> Any:
    """Return the same without a gate projection (2.33); the gate's half of the gate_up gradient is zero."""
    return blockwise_mm_bwd(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint=None,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        skip_dma=SkipMode(skip_token=True),
        shard_option=ShardOption.SHARD_ON_FREE,
        affinity_option=AffinityOption.AFFINITY_ON_I,
        bias=bias,
        activation_type=ActFnType.SquaredReLU,
        skip_gate_proj=skip_gate_proj,
    )
