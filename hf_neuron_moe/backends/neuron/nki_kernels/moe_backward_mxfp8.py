"""``blockwise_mm_bwd_mxfp8`` (nki-library 2.31 and later), with those options that it or its record has.

2.31 takes them as arguments, later releases a record.
"""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.generations import SWIZZLE_MODES
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object
from hf_neuron_moe.backends.neuron.pair_options import pair_options
from hf_neuron_moe.backends.neuron.signatures import has_field, takes

blockwise_mm_bwd_mxfp8 = nkilib_object("blockwise_mm_bwd_mxfp8")
MXFP8MOEBwdConfig: Any = find_object("MXFP8MOEBwdConfig")

TAKES_RECORD = takes(blockwise_mm_bwd_mxfp8, "config")
OPTIONS = pair_options(MXFP8MOEBwdConfig if TAKES_RECORD else blockwise_mm_bwd_mxfp8, "SHARD_ON_FREE")
FOR_ONE_EXPERT = {
    name: False
    for name in ("fast_dma_transpose", "pe_transpose_only")
    if TAKES_RECORD and has_field(MXFP8MOEBwdConfig, name)
}
"""Further options of some records; their defaults may be those of a single dense expert."""

SWIZZLES = {
    name: nkilib_object("SwizzleMode").DGT
    for name in SWIZZLE_MODES
    if TAKES_RECORD and has_field(MXFP8MOEBwdConfig, name)
}


def options() -> dict[str, Any]:
    """Return the options as the installed function takes them; a record is new, since nkilib fills in its fields."""
    if not TAKES_RECORD:
        return OPTIONS
    return {"config": MXFP8MOEBwdConfig(**OPTIONS, **FOR_ONE_EXPERT, **SWIZZLES)}


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

    Weights are the transposes of the forward's. The scaled intermediate stays None, as 2.31 demands.
    """
    return blockwise_mm_bwd_mxfp8(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        **options(),
    )
