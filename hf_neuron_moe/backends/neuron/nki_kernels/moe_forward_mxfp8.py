"""``blockwise_mm_fwd_mxfp8`` as nki-library 2.32 has it: options as arguments, weights ``[E, 2, I, H]``."""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

blockwise_mm_fwd_mxfp8 = nkilib_object("blockwise_mm_fwd_mxfp8")
AffinityOption = nkilib_object("AffinityOption")
ShardOption = nkilib_object("ShardOption")
SkipMode = nkilib_object("BackwardSkipMode")


@nki.jit
def moe_forward(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
) -> Any:
    """Return output ``[T, H]``, gate and up ``[N, 2, I, B]`` and the scaled intermediate ``[N, I, B]``.

    ``checkpoint_config`` is left at its default, which saves both checkpoints: its class is not documented.
    """
    return blockwise_mm_fwd_mxfp8(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        shard_option=ShardOption.SHARD_ON_BLOCK,
        affinity_option=AffinityOption.AFFINITY_ON_I,
        compute_dtype=nl.bfloat16,
        skip_dma=SkipMode(True, False),
        is_tensor_update_accumulating=True,
    )
