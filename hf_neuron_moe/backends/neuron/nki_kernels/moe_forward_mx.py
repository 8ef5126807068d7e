"""``moe_cte`` shard_on_block_mx (nki-library 2.30 and later): experts whose weights are MX words, for inference."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.gates import MX_ACTIVATIONS
from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

moe_cte = nkilib_object("moe_cte")
MoECTESpec = nkilib_object("MoECTESpec")
MoECTEImplementation = nkilib_object("MoECTEImplementation")
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
    """Return ``[2, T + 1, H]``, whose first half is the output.

    Weights are x4 words ``[E, 128, 2, H/512, I]`` and ``[E, pI, ceil(I/512), H]``, scales compact. Biases are
    ``[E, pI, 2, ceil(I/512), 4]`` and ``[E, H]``: without them 2.29's kernel reads a dtype that is not there. Limits
    are those after the biases. `activation` is a place in ``ACTIVATIONS``.
    """
    return moe_cte(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        spec=MoECTESpec(implementation=MoECTEImplementation.shard_on_block_mx),
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
