"""``blockwise_mm_shard_intermediate_mx``: ``moe_cte`` lists it as shard_on_i_mx, and has no branch for it."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.gates import MX_ACTIVATIONS
from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

blockwise_mm_shard_intermediate_mx = nkilib_object("blockwise_mm_shard_intermediate_mx")
ExpertAffinityScaleMode = nkilib_object("ExpertAffinityScaleMode")
ACTIVATIONS = tuple(getattr(nkilib_object("ActFnType"), name) for name in MX_ACTIVATIONS.values())


@nki.jit
def moe_forward(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_scale: Any,
    down_proj_scale: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    activation: int,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return the output ``[T + 1, H]``.

    Weights are x4 words ``[E, 128, 2, H/512, I]`` and ``[E, 128, I/512, H]``, scales compact. Biases are named because
    they are listed without defaults, and the affinity's place because the function's default is one that it refuses.
    """
    return blockwise_mm_shard_intermediate_mx(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        gate_and_up_proj_bias=None,
        down_proj_bias=None,
        gate_up_proj_scale=gate_up_proj_scale,
        down_proj_scale=down_proj_scale,
        expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
        activation_function=ACTIVATIONS[activation],
        gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit,
        up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit,
    )
