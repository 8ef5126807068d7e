"""``blockwise_mm_bwd_mxfp8`` whose record says how each operand is swizzled: only DGT knows several experts.

The record is made anew in the kernel, since nkilib fills in its fields while it traces. Its defaults may be those of a
single dense expert; everything that belongs to it is switched off.
"""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

blockwise_mm_bwd_mxfp8 = nkilib_object("blockwise_mm_bwd_mxfp8")
MXFP8MOEBwdConfig = nkilib_object("MXFP8MOEBwdConfig")
AffinityOption = nkilib_object("AffinityOption")
ShardOption = nkilib_object("ShardOption")
SkipMode = nkilib_object("BackwardSkipMode")
SwizzleMode = nkilib_object("SwizzleMode")


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
    """Return the gradients of hidden states ``[T, H]``, affinities, gate_up ``[E, H, 2, I]`` and down ``[E, I, H]``."""
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
        config=MXFP8MOEBwdConfig(
            shard_option=ShardOption.SHARD_ON_FREE,
            affinity_option=AffinityOption.AFFINITY_ON_I,
            accumulate_hidden_states_grad=True,
            single_expert_dense=False,
            fast_dma_transpose=False,
            skip_dma=SkipMode(True, False),
            pe_transpose_only=False,
            output_grad_swizzle_mode=SwizzleMode.DGT,
            down_weight_swizzle_mode=SwizzleMode.DGT,
            d_gate_up_swizzle_mode=SwizzleMode.DGT,
            gate_up_weight_swizzle_mode=SwizzleMode.DGT,
            d_gate_up_t_swizzle_mode=SwizzleMode.DGT,
            hidden_states_t_swizzle_mode=SwizzleMode.DGT,
            output_grad_t_swizzle_mode=SwizzleMode.DGT,
            scaled_intermediate_t_swizzle_mode=SwizzleMode.DGT,
        ),
    )
