"""The MX kernels behind ``moe_cte`` under their own names; see :mod:`hf_neuron_moe.reference.moe_cte_direct`.

Source: nki-library 2.29 ``core.moe.moe_cte.bwmm_shard_on_block_mx`` and ``bwmm_shard_on_I_mx``; what 2.31 inserted or
appended is by keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.moe_cte import MoEForward, forward
from hf_neuron_moe.reference.moe_cte_operands import Arguments
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationType,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)

_SiLU = ActFnType.SiLU
_Mode = ExpertAffinityScaleMode
_Kind = MoECTEImplementation
_BF16 = torch.bfloat16


@public
def bwmm_shard_on_block_mx(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    conditions: Tensor | None = None,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: int | None = None,
    n_static_blocks: int = -1,
    n_dynamic_blocks: int = 55,
    gate_up_activations_T: Tensor | None = None,
    down_activations: Tensor | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    weight_dtype: torch.dtype | None = None,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    *,
    top_k: int = 1,
    ep_degree: int = 1,
    use_packed_scales: bool = False,
    quantization_type: QuantizationType = QuantizationType.NONE,
    gate_up_in_scale: Tensor | None = None,
    down_in_scale: Tensor | None = None,
    accumulation_dtype: torch.dtype | None = None,
    convention: str = "device",
    device_limits: bool | None = None,
    mx_scale_rule: str = "neuron",
) -> MoEForward:
    """``moe_cte`` with ``shard_on_block_mx``; `block_size` is required although its position has a default.

    ``quantization_type=NONE`` means MX, as upstream. Activation buffers must be None.
    """
    given = locals()
    names = ("n_static_blocks", "n_dynamic_blocks", "weight_dtype", "top_k", "ep_degree", "use_packed_scales")
    options = {name: given.pop(name) for name in (*names, "quantization_type")}
    spec = MoECTESpec(_Kind.shard_on_block_mx, ShardOnBlockConfig(**options))
    return _call(given, spec)


@public
def blockwise_mm_shard_intermediate_mx(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: int | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    weight_dtype: torch.dtype | None = None,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.PRE_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    use_block128_scales: bool = False,
    *,
    accumulation_dtype: torch.dtype | None = None,
    convention: str = "device",
    device_limits: bool | None = None,
    mx_scale_rule: str = "neuron",
) -> MoEForward:
    """``moe_cte`` with ``shard_on_i_mx``. The default PRE_SCALE is refused, as upstream asserts: pass POST_SCALE.

    `use_block128_scales` must agree with the shape of `gate_up_proj_scale` (``[E, 4, 2, H/512, ceil(I/128)]``).
    """
    given = locals()
    rows = gate_up_proj_scale.shape[1] if isinstance(gate_up_proj_scale, Tensor) else None
    if given.pop("use_block128_scales") is not (rows == 4):
        raise ConfigError.about(
            "use_block128_scales",
            f"{rows == 4}, as the shape of gate_up_proj_scale says",
            use_block128_scales,
            "One scale byte per 128 x 128 block has four rows, one per group of 8 partitions sixteen.",
        )
    spec = MoECTESpec(_Kind.shard_on_i_mx, ShardOnBlockConfig(weight_dtype=given.pop("weight_dtype")))
    return _call(given, spec)


@public
def blockwise_mm_shard_intermediate_mx_hybrid(
    conditions: Tensor,
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: int | None = None,
    num_static_block: int | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    weight_dtype: torch.dtype | None = None,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    *,
    accumulation_dtype: torch.dtype | None = None,
    convention: str = "device",
    device_limits: bool | None = None,
    mx_scale_rule: str = "neuron",
) -> MoEForward:
    """``moe_cte`` with ``shard_on_i_mx_hybrid``: static blocks, then a loop over those with tokens."""
    given = locals()
    spec = MoECTESpec(
        _Kind.shard_on_i_mx_hybrid,
        ShardOnBlockConfig(weight_dtype=given.pop("weight_dtype")),
        ShardOnIConfig(num_static_block=given.pop("num_static_block")),
    )
    return _call(given, spec)


def _call(given: dict[str, Any], spec: MoECTESpec) -> MoEForward:
    return forward(Arguments(spec=spec, **given))
