"""``blockwise_mm_fwd_mxfp8`` (nki-library 2.32 and later), with those options that it or its record has.

2.32 takes its options as arguments and weights ``[E, 2, I, H]``, later releases a record and weights ``[E, I, 2, H]``.
The default of ``checkpoint_config`` saves the checkpoints; in which order is read off it (``mxfp8_pair.py``).
"""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.mxfp8_pair import pair_options
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object
from hf_neuron_moe.backends.neuron.signatures import keywords

blockwise_mm_fwd_mxfp8 = nkilib_object("blockwise_mm_fwd_mxfp8")
ClampLimits: Any = find_object("ClampLimits")
TensorDescriptor: Any = find_object("TensorDescriptor")
TensorOrientation: Any = find_object("TensorOrientation")

RECORD, OPTIONS = pair_options(
    blockwise_mm_fwd_mxfp8,
    find_object("MXFP8MOEFwdConfig"),
    "SHARD_ON_BLOCK",
    fast_dma_transpose=False,
    reuse_spilled_weights=False,
    use_1x32_pe_swizzle=False,
)
ORIENTED = RECORD is not None and "gate_up_proj_act_td" in (keywords(RECORD) or ())


def options(limits: Any = None) -> dict[str, Any]:
    """Return the options as the installed function takes them; a record is new, since nkilib fills in its fields.

    Where it has an orientation of the checkpoint, the token axis is asked for innermost: the backward reads it so.
    """
    given = OPTIONS if limits is None else {**OPTIONS, "clamp_limits": limits}
    if RECORD is None:
        return given
    if not ORIENTED:
        return {"config": RECORD(**given)}
    return {"config": RECORD(gate_up_proj_act_td=TensorDescriptor(orientation=TensorOrientation.K_BY_F), **given)}


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
    """Return output ``[T, H]``, gate and up in the release's order and whatever other checkpoints it saves."""
    return blockwise_mm_fwd_mxfp8(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        **options(),
    )


@nki.jit
def moe_forward_clamped(
    hidden_states: Any,
    expert_affinities_masked: Any,
    gate_up_proj_weight: Any,
    down_proj_weight: Any,
    token_position_to_id: Any,
    block_to_expert: Any,
    block_size: int,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
) -> Any:
    """Return the same with limits on gate and up, those of the forward."""
    return blockwise_mm_fwd_mxfp8(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        **options(
            ClampLimits(
                linear_clamp_upper_limit=up_clamp_upper_limit,
                linear_clamp_lower_limit=up_clamp_lower_limit,
                non_linear_clamp_upper_limit=gate_clamp_upper_limit,
                non_linear_clamp_lower_limit=gate_clamp_lower_limit,
            )
        ),
    )
