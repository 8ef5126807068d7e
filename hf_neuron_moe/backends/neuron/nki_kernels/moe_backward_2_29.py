"""``blockwise_mm_bwd`` of nki-library 2.29 and 2.30: the affinity on the output, so it reads the down checkpoint."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object

blockwise_mm_bwd = nkilib_object("blockwise_mm_bwd")
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
    down_proj_act_checkpoint: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    output_hidden_states_grad: Any,
    block_size: int,
) -> Any:
    """Return the gradients of hidden states ``[T, H]``, affinities, gate_up ``[E, H, 2, I]`` and down ``[E, I, H]``."""
    return blockwise_mm_bwd(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint=down_proj_act_checkpoint,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        skip_dma=SkipMode(skip_token=True),
    )


@nki.jit
def moe_backward_gated(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_act_checkpoint_T: Any,
    down_proj_act_checkpoint: Any,
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
        down_proj_act_checkpoint=down_proj_act_checkpoint,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        skip_dma=SkipMode(skip_token=True),
        clamp_limits=ClampLimits(
            linear_clamp_upper_limit=up_clamp_upper_limit,
            linear_clamp_lower_limit=up_clamp_lower_limit,
            non_linear_clamp_upper_limit=gate_clamp_upper_limit,
            non_linear_clamp_lower_limit=gate_clamp_lower_limit,
        ),
        bias=bias,
        activation_type=ActFnType.Swish if swish else ActFnType.SiLU,
    )
