"""``bwmm_shard_on_block_mx`` itself, for nki-library 2.29: its ``moe_cte`` takes no scales as arguments."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.gates import MX_ACTIVATIONS
from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

bwmm_shard_on_block_mx = nkilib_object("bwmm_shard_on_block_mx")
ACTIVATIONS = tuple(getattr(nkilib_object("ActFnType"), name) for name in MX_ACTIVATIONS.values())


@nki.jit
def moe_forward(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_scale: Any,
    down_proj_scale: Any,
    gate_and_up_proj_bias: Any,
    down_proj_bias: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    activation: int,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return ``[2, T + 1, H]``, whose first half is the output; operands as ``moe_forward_mx.py`` has them."""
    return bwmm_shard_on_block_mx(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        gate_and_up_proj_bias=gate_and_up_proj_bias,
        down_proj_bias=down_proj_bias,
        gate_up_proj_scale=gate_up_proj_scale,
        down_proj_scale=down_proj_scale,
        activation_function=ACTIVATIONS[activation],
        gate_clamp_upper_limit=gate_clamp_upper_limit,
        gate_clamp_lower_limit=gate_clamp_lower_limit,
        up_clamp_upper_limit=up_clamp_upper_limit,
        up_clamp_lower_limit=up_clamp_lower_limit,
    )
