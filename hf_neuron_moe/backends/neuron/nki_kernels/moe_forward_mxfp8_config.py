"""``blockwise_mm_fwd_mxfp8`` of later nki-library releases: options in a record, weights ``[E, I, 2, H]``.

The record is made anew in the kernel, since nkilib fills in its fields while it traces.
"""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

blockwise_mm_fwd_mxfp8 = nkilib_object("blockwise_mm_fwd_mxfp8")
MXFP8MOEFwdConfig = nkilib_object("MXFP8MOEFwdConfig")
TensorDescriptor = nkilib_object("TensorDescriptor")
TensorOrientation = nkilib_object("TensorOrientation")
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
    """Return output ``[T, H]``, gate and up ``[N, 2, I, B]`` and whatever other checkpoints the release saves.

    The record's defaults are those of a single dense expert; everything that belongs to it is switched off. The
    orientation asks for the token axis innermost, which is how the backward reads the checkpoint.
    """
    return blockwise_mm_fwd_mxfp8(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        config=MXFP8MOEFwdConfig(
            shard_option=ShardOption.SHARD_ON_BLOCK,
            affinity_option=AffinityOption.AFFINITY_ON_I,
            is_tensor_update_accumulating=True,
            single_expert_dense=False,
            skip_dma=SkipMode(True, False),
            gate_up_proj_act_td=TensorDescriptor(orientation=TensorOrientation.K_BY_F),
            fast_dma_transpose=False,
            reuse_spilled_weights=False,
            use_1x32_pe_swizzle=False,
        ),
    )
