"""The kernels behind ``moe_cte`` under their own names, with their own argument orders and defaults.

They compute what :func:`hf_neuron_moe.reference.moe_cte.moe_cte` does for the same implementation and refuse what it
refuses; tensors, options and results are described there. Positions matter here: the order of the up clamp limits is
swapped in the I-sharded kernels, and `block_size` moves behind the scales in the MX ones. The last three keyword
arguments are those of ``moe_cte``.

Where a default differs from upstream, its docstring says so.

Source: nki-library 2.29 ``core.moe.moe_cte.bwmm_shard_on_{block,I}`` and ``experimental.moe.forward.bwmm_shard_on_H``;
arguments of 2.31 and 2.33 where they were appended. The MX kernels are in ``moe_cte_direct_mx``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_shape
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.moe_cte import MoEForward, forward
from hf_neuron_moe.reference.moe_cte_operands import Arguments
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)

_SiLU = ActFnType.SiLU
_Mode = ExpertAffinityScaleMode
_Kind = MoECTEImplementation
_BF16 = torch.bfloat16


@public
def bwmm_shard_on_block(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    down_activations: Tensor | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    n_block_per_iter: int = 1,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    block_sharding_strategy: BlockShardStrategy = BlockShardStrategy.PING_PONG,
    *,
    convention: str = "device",
    device_limits: bool | None = None,
) -> MoEForward:
    """``moe_cte`` with ``shard_on_block``: blocks are divided between two cores.

    `down_activations` must be None (upstream never writes it).
    """
    given = locals()
    config = ShardOnBlockConfig(given.pop("n_block_per_iter"), given.pop("block_sharding_strategy"))
    return _call(given, MoECTESpec(_Kind.shard_on_block, config))


@public
def blockwise_mm_baseline_shard_intermediate(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.PRE_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    checkpoint_activation: bool = False,
    expert_affinity_multiply_on_I: bool = False,
    *,
    gate_up_hidden_scale: Tensor | None = None,
    down_hidden_scale: Tensor | None = None,
    is_block_quant: bool | None = None,
    is_per_tensor: bool | None = None,
    accumulation_dtype: torch.dtype | None = None,
    skip_gate_proj: bool = False,
    convention: str = "device",
    device_limits: bool | None = None,
) -> MoEForward:
    """``moe_cte`` with ``shard_on_i``; the affinity multiplies the pre-activations by default (PRE_SCALE).

    Positions are those of 2.29; what 2.31 and 2.33 inserted is by keyword. `is_block_quant` and `is_per_tensor` are
    read off the scales' shapes; when given, they must agree with them.
    """
    given = locals()
    for name, rank in (("is_block_quant", 5), ("is_per_tensor", 3)):
        _check_kind(name, given.pop(name), gate_up_proj_scale, rank)
    given["gate_up_in_scale"], given["down_in_scale"] = (
        given.pop("gate_up_hidden_scale"),
        given.pop("down_hidden_scale"),
    )
    config = ShardOnIConfig(given.pop("checkpoint_activation"), given.pop("expert_affinity_multiply_on_I"))
    spec = MoECTESpec(_Kind.shard_on_i, shard_on_I=config)
    return _call(given, spec)


@public
def blockwise_mm_baseline_shard_intermediate_hybrid(
    conditions: Tensor,
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    num_static_block: int | None = None,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    gate_up_activations_T: Tensor | None = None,
    down_activations: Tensor | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    *,
    convention: str = "device",
    device_limits: bool | None = None,
) -> MoEForward:
    """``moe_cte`` with ``shard_on_i_hybrid``: static blocks, then a loop over those with tokens.

    Activation buffers must be None.
    """
    given = locals()
    config = ShardOnIConfig(num_static_block=given.pop("num_static_block"))
    spec = MoECTESpec(_Kind.shard_on_i_hybrid, shard_on_I=config)
    return _call(given, spec)


@public
def blockwise_mm_shard_intermediate_dropping(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    activation_function: ActFnType = _SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    expert_affinity_multiply_on_I: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    *,
    convention: str = "device",
    device_limits: bool | None = None,
) -> MoEForward:
    """``moe_cte`` with ``shard_on_i_dropping``: block e is expert e; always returns its activations.

    Upstream's default mode is PRE_SCALE, which this kernel does not read: it multiplies the output. Here the default
    says so.
    """
    given = locals()
    config = ShardOnIConfig(expert_affinity_multiply_on_I=given.pop("expert_affinity_multiply_on_I"))
    spec = MoECTESpec(_Kind.shard_on_i_dropping, shard_on_I=config)
    return _call(given, spec)


@public
def blockwise_mm_baseline_shard_hidden(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    block_size: int,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    gate_up_activations_T: Tensor | None = None,
    down_activations: Tensor | None = None,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = _BF16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = _Mode.POST_SCALE,
    *,
    convention: str = "device",
    device_limits: bool | None = None,
) -> MoEForward:
    """Training forward that divides H between cores: SiLU, no bias, clamp or quantization (experimental upstream).

    Unlike the others it writes the activations into `gate_up_activations_T` ``[N, 2, I, B]`` and `down_activations`
    ``[N, B, H]`` where they are given, and returns those same tensors. Limits are those of ``shard_on_i``.
    """
    where, given = "blockwise_mm_baseline_shard_hidden", locals()
    buffers = {name: given.pop(name) for name in ("gate_up_activations_T", "down_activations")}
    wanted = any(buffer is not None for buffer in buffers.values())
    spec = MoECTESpec(_Kind.shard_on_i, shard_on_I=ShardOnIConfig(checkpoint_activation=wanted))
    result = _call(given, spec)
    returned: list[Tensor | None] = []
    for name, buffer in buffers.items():
        values = getattr(result, name)
        if buffer is not None:
            check_shape(buffer, tuple(values.shape), "the activations", argument=name)
            buffer.copy_(values)
        returned.append(buffer)
    return MoEForward(result.output, *returned)


def _call(given: dict[str, Any], spec: MoECTESpec) -> MoEForward:
    return forward(Arguments(spec=spec, **given))


@public("blockwise_mm_baseline_shard_intermediate")
def _check_kind(name: str, claimed: bool | None, scale: Tensor | None, rank: int) -> None:
    """Refuse a flag that contradicts the scale's shape: ``[E, H/256, 2, I/256, 128]`` or ``[E, 2, 1]``."""
    if claimed is None:
        return
    found = isinstance(scale, Tensor) and scale.dim() == rank and (rank == 5 or scale.shape[1] * scale.shape[2] == 2)
    if claimed is not found:
        raise ConfigError.about(
            name,
            f"{found}, as the shape of gate_up_proj_scale says",
            claimed,
            "Leave it out, or pass scales of the other kind.",
        )
