"""``blockwise_mm_bwd_mxfp8`` (nki-library 2.31 and later), with those options that it or, later, its record has."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.generations import SWIZZLE_MODES
from hf_neuron_moe.backends.neuron.mxfp8_pair import pair_options
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object

ClampLimits: Any = find_object("ClampLimits")
blockwise_mm_bwd_mxfp8 = nkilib_object("blockwise_mm_bwd_mxfp8")
RECORD, OPTIONS = pair_options(
    blockwise_mm_bwd_mxfp8,
    find_object("MXFP8MOEBwdConfig"),
    "SHARD_ON_FREE",
    fast_dma_transpose=False,
    pe_transpose_only=False,
    **dict.fromkeys(SWIZZLE_MODES, getattr(find_object("SwizzleMode"), "DGT", None)),
)


def options(limits: Any = None) -> dict[str, Any]:
    """Return the options as the installed function takes them; a record is new, since nkilib fills in its fields."""
    given = OPTIONS if limits is None else {**OPTIONS, "clamp_limits": limits}
    return given if RECORD is None else {"config": RECORD(**given)}


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


@nki.jit
def moe_backward_clamped(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    gate_up_proj_act_checkpoint_T: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    output_hidden_states_grad: Any,
    block_size: int,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return the same with limits on gate and up, those of the forward."""
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
        **options(
            ClampLimits(
                linear_clamp_upper_limit=up_clamp_upper_limit,
                linear_clamp_lower_limit=up_clamp_lower_limit,
                non_linear_clamp_upper_limit=gate_clamp_upper_limit,
                non_linear_clamp_lower_limit=gate_clamp_lower_limit,
            )
        ),
    )
