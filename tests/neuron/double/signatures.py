"""Argument lists of nkilib's functions as documented, per release.

Each list is Python's own argument syntax; defaults are evaluated with the release's records. Where a list differs
between releases the difference is written as documented: inserted after an argument, or appended.

Sources: nki-library 2.29 to 2.33, ``core.moe.moe_cte``, ``experimental.moe``, ``experimental.mlp_mxfp8``,
``experimental.moe_mxfp8``.
"""

from __future__ import annotations

import inspect
from typing import Any

from tests.neuron.double.contract import Release
from tests.neuron.double.memory import DTYPES
from tests.neuron.double.records import Library

FIRST = (
    "hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight, token_position_to_id, "
    "block_to_expert"
)
FIRST_SEVEN = (
    "hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight, block_size, "
    "token_position_to_id, block_to_expert"
)
_CLAMPS = (
    "gate_clamp_upper_limit=None, gate_clamp_lower_limit=None, up_clamp_upper_limit=None, up_clamp_lower_limit=None"
)
_CLAMPS_SWAPPED = (
    "gate_clamp_upper_limit=None, gate_clamp_lower_limit=None, up_clamp_lower_limit=None, up_clamp_upper_limit=None"
)
_BIASES = "gate_and_up_proj_bias=None, down_proj_bias=None"
_SCALES = "gate_up_proj_scale=None, down_proj_scale=None"
_KEPT = "gate_up_activations_T=None, down_activations=None"
_COMMON = "activation_function=SiLU, skip_dma=NO_SKIP, compute_dtype=bf16"


def _insert(text: str, after: str, new: str) -> str:
    """Insert arguments after the one whose name is `after`."""
    parts = [part.strip() for part in text.split(",")]
    place = next(i for i, part in enumerate(parts) if part.split("=")[0] == after)
    return ", ".join([*parts[: place + 1], new, *parts[place + 1 :]])


def moe_cte(release: Release) -> str:
    """The unified forward entry."""
    text = (
        f"{FIRST}, block_size, spec, conditions=None, {_BIASES}, quantization_config=None, {_KEPT}, {_COMMON}, "
        f"is_tensor_update_accumulating=True, expert_affinities_scaling_mode=POST, {_CLAMPS}"
    )
    if release >= (2, 30):
        text = _insert(text, "quantization_config", _SCALES)
    if release >= (2, 31):
        text += ", gate_up_in_scale=None, down_in_scale=None"
    if release >= (2, 33):
        text += ", accumulation_dtype=None, skip_gate_proj=False"
    return text


def direct_forward(release: Release) -> dict[str, str]:
    """The kernels behind the unified entry."""
    later = release >= (2, 31)
    accumulating = "is_tensor_update_accumulating=True"
    extra = "gate_up_hidden_scale=None, down_hidden_scale=None, is_block_quant=False, is_per_tensor=False"
    shard_i = (
        f"{FIRST_SEVEN}, {_BIASES}, {_SCALES}, {extra + ', ' if later else ''}{_COMMON}, {accumulating}, "
        f"expert_affinities_scaling_mode=PRE, {_CLAMPS_SWAPPED}, checkpoint_activation=False, "
        "expert_affinity_multiply_on_I=False"
    )
    shard_i += (", accumulation_dtype=None" if later else "") + (", skip_gate_proj=False" if release >= (2, 33) else "")
    block_mx = (
        f"{FIRST}, conditions=None, {_BIASES}, {_SCALES}, block_size=None, n_static_blocks=-1, "
        f"n_dynamic_blocks={-1 if later else 55}, {'top_k=1, ep_degree=1, ' if later else ''}{_KEPT}, {_COMMON}, "
        f"weight_dtype=None, {accumulating}, expert_affinities_scaling_mode=POST, {_CLAMPS_SWAPPED}"
    )
    if later:
        block_mx += ", use_packed_scales=False, quantization_type=NONE, gate_up_in_scale=None, down_in_scale=None"
    shard_i_mx = (
        f"{FIRST}, {_BIASES}, {_SCALES}, block_size=None, {_COMMON}, weight_dtype=None, {accumulating}, "
        f"expert_affinities_scaling_mode=PRE, {_CLAMPS_SWAPPED}{', use_block128_scales=False' if later else ''}"
    )
    hybrid_mx = (
        f"conditions, {FIRST}, {_BIASES}, {_SCALES}, block_size=None, num_static_block=None, {_COMMON}, "
        f"weight_dtype=None, {accumulating}, expert_affinities_scaling_mode=POST, {_CLAMPS_SWAPPED}"
    )
    return {
        "bwmm_shard_on_block": (
            f"{FIRST_SEVEN}, {_BIASES}, {_SCALES}, down_activations=None, {_COMMON}, {accumulating}, "
            f"expert_affinities_scaling_mode=POST, n_block_per_iter=1, {_CLAMPS}, block_sharding_strategy=PING_PONG"
        ),
        "blockwise_mm_baseline_shard_intermediate": shard_i,
        "blockwise_mm_baseline_shard_intermediate_hybrid": (
            f"conditions, {FIRST_SEVEN}, num_static_block=None, {_BIASES}, {_SCALES}, {_KEPT}, {_COMMON}, "
            f"{accumulating}, expert_affinities_scaling_mode=POST, {_CLAMPS_SWAPPED}"
        ),
        "blockwise_mm_shard_intermediate_dropping": (
            f"{FIRST_SEVEN}, {_BIASES}, {_SCALES}, {_COMMON}, {accumulating}, expert_affinities_scaling_mode=PRE, "
            f"expert_affinity_multiply_on_I=False, {_CLAMPS_SWAPPED}"
        ),
        "blockwise_mm_baseline_shard_hidden": (
            f"{FIRST_SEVEN}, {_KEPT}, skip_dma=NO_SKIP, compute_dtype=bf16, {accumulating}, "
            "expert_affinities_scaling_mode=POST"
        ),
        "bwmm_shard_on_block_mx": block_mx,
        "blockwise_mm_shard_intermediate_mx": shard_i_mx,
        "blockwise_mm_shard_intermediate_mx_hybrid": hybrid_mx,
    }


def blockwise_mm_bwd(release: Release) -> str:
    """The bf16 backward."""
    text = (
        "hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight, "
        "gate_up_proj_act_checkpoint_T, down_proj_act_checkpoint, token_position_to_id, block_to_expert, "
        "output_hidden_states_grad, block_size, skip_dma=None, compute_dtype=bf16, is_tensor_update_accumulating=True, "
        "shard_option=SHARD_ON_HIDDEN, affinity_option=ON_H, kernel_type_option=DROPLESS, clamp_limits=None, "
        "bias=False, activation_type=BWD_SiLU, block_tile_size=None"
    )
    if release >= (2, 30):
        text = _insert(text, "is_tensor_update_accumulating", "skip_grad_initialization=False")
        text += ", blocking_params=None"
    if release >= (2, 31):
        text += (
            ", hidden_states_grad_out=None, expert_affinities_masked_grad_out=None, gate_up_proj_weight_grad_out=None, "
            "down_proj_weight_grad_out=None, accumulation_dtype=None"
        )
    return text + (", skip_gate_proj=False" if release >= (2, 33) else "")


def mlp_forward() -> str:
    """``mlp_forward_mxfp8_nki``: one list for 2.30 to 2.33."""
    return (
        "hidden, gate_up_weights, down_weights, intermediate_hbm, run_with_lnc2=True, gate_up_tiles_m=8, "
        "gate_up_tiles_n=1, gate_up_tiles_k=8, down_tiles_m=8, down_tiles_n=1, down_tiles_k=8, fp8_x4_dtype=fp8_x4, "
        "save_gate_pre=None, save_gate_act=None, save_up=None, save_hidden=None, dtype=bf16, spill_reload=True, "
        "use_scale_packing=True, hidden_scales=None, gate_up_scales=None, down_scales=None, hidden_is_swizzled=False, "
        "gate_up_is_swizzled=False, down_is_swizzled=False"
    )


PAIRS_2_30 = {
    "output_hidden_states_grad": "output_grad",
    "down_proj_weight_T": "down_weight",
    "gate_proj_weight_T": "gate_weight",
    "up_proj_weight_T": "up_weight",
    "hidden_states_T": "hidden_states_T",
    "hidden_states": "hidden_states",
    "gate_up_weights": "gate_up_weights",
    "output_grad_T": "output_grad_T",
    "hidden_T": "hidden_T",
}
"""Operand of the 2.30 backward: prefix of its ``_scales`` and ``_is_swizzled``, in their documented order."""


def mlp_backward(release: Release) -> str:
    """``mlp_backward_mxfp8_nki`` before and after its redesign in 2.31."""
    if release >= (2, 31):
        return (
            "output_grad, hidden_states, down_proj_weight=None, gate_up_weights=None, gate_up_weight_T=None, "
            "gate_up_weight_T_scales=None, gate_up_weights_scales=None, down_weight_T=None, down_weight_T_scales=None, "
            "output_grad_T=None, output_grad_T_scales=None, hidden_states_T=None, hidden_states_T_scales=None, "
            "gate_pre=None, gate_act=None, up=None, intermediate=None, run_with_lnc2=True, matmul_config=None, "
            "fp8_x4_dtype=fp8_x4, spill_reload=True, use_scale_packing=True, clamp_limits=None"
        )
    tiles = {"phase1": 8, "phase2": 8, "phase3": 4, "phase4": 4, "recompute": 8}
    counts = ", ".join(f"{p}_tiles_m={m}, {p}_tiles_n=1, {p}_tiles_k=8" for p, m in tiles.items())
    pairs = ", ".join(f"{p}_scales=None, {p}_is_swizzled=False" for p in PAIRS_2_30.values())
    return (
        "output_hidden_states_grad, hidden_states, gate_proj_weight_T, up_proj_weight_T, down_proj_weight_T, "
        "gate_up_weights, d_gate_scratch, d_up_scratch, hidden_states_T, output_grad_T, hidden_T, "
        "silu_up_mul_gate_grad_T_scratch, gate_pre_scratch, gate_act_scratch, up_scratch, hidden_scratch, "
        f"gate_pre=None, gate_act=None, up=None, hidden=None, run_with_lnc2=True, {counts}, fp8_x4_dtype=fp8_x4, "
        f"spill_reload=True, use_scale_packing=True, {pairs}"
    )


_QUANTIZED = (
    "gate_up_weight_scales=None, gate_up_weight_is_swizzled=False, down_weight_scales=None, "
    "down_weight_is_swizzled=False"
)
_KEPT_MX = (
    "gate_up_proj_act_checkpoint_T=None, gate_act_checkpoint_T=None, intermediate_checkpoint_T=None, "
    "scaled_intermediate_checkpoint_T=None, down_proj_act_checkpoint=None"
)


def moe_mxfp8_forward(config: bool) -> str:
    """``blockwise_mm_fwd_mxfp8`` of 2.32, or of the later generation with a configuration record."""
    if config:
        return (
            f"{FIRST}, block_size=4096, config=None, gate_up_weight_scales=None, down_weight_scales=None, "
            "num_valid_tokens=None"
        )
    return (
        f"{FIRST}, block_size, {_QUANTIZED}, gate_up_config=None, down_config=None, fp8_x4_dtype=fp8_x4, "
        "spill_reload=False, reuse_spilled_weights=False, use_scale_packing=True, fast_dma_transpose=False, "
        "run_with_lnc2=True, shard_option=SHARD_ON_BLOCK, affinity_option=ON_I, compute_dtype=bf16, skip_dma=None, "
        "is_tensor_update_accumulating=True, no_indirect_load=False, clamp_limits=None, activation_type=BWD_SiLU, "
        "bias=False, checkpoint_config=None"
    )


def moe_mxfp8_backward(config: bool) -> str:
    """``blockwise_mm_bwd_mxfp8`` of 2.31, or of the later generation with a configuration record."""
    first = f"{FIRST}, output_hidden_states_grad, block_size"
    if config:
        return f"{first}=4096, {_KEPT_MX}, config=None, gate_up_weight_scales=None, down_weight_scales=None"
    phases = ", ".join(f"phase{number}_config=None" for number in range(1, 5))
    return (
        f"{first}, {_KEPT_MX}, {_QUANTIZED}, {phases}, fp8_x4_dtype=fp8_x4, spill_reload=False, "
        "use_scale_packing=True, run_with_lnc2=True, shard_option=SHARD_ON_FREE, affinity_option=ON_I, "
        "compute_dtype=bf16, skip_dma=None, skip_grad_initialization=False, is_tensor_update_accumulating=True, "
        "clamp_limits=None, activation_type=BWD_SiLU, bias=False"
    )


def parse(text: str, library: Library) -> inspect.Signature:
    """Turn an argument list into a signature."""
    forward, backward = library.forward, library.backward
    shard = backward.ShardOption.__members__
    names: dict[str, Any] = {
        "SiLU": forward.ActFnType.SiLU,
        "NO_SKIP": forward.SkipMode(),
        "POST": forward.ExpertAffinityScaleMode.POST_SCALE,
        "PRE": forward.ExpertAffinityScaleMode.PRE_SCALE,
        "PING_PONG": forward.BlockShardStrategy.PING_PONG,
        "NONE": forward.QuantizationType.NONE,
        "bf16": DTYPES["bfloat16"],
        "fp8_x4": DTYPES["float8_e4m3fn_x4"],
        "BWD_SiLU": backward.ActFnType.SiLU,
        "ON_H": backward.AffinityOption.AFFINITY_ON_H,
        "ON_I": backward.AffinityOption.AFFINITY_ON_I,
        "DROPLESS": backward.KernelTypeOption.DROPLESS,
        **shard,
    }
    return inspect.signature(eval(f"lambda {text}: None", names))
