"""The documented kernels as plain functions: their names, their argument names, their rules, on any device.

    >>> from hf_neuron_moe.kernels import MoECTESpec, build_block_plan, moe_cte

Names are loaded when they are first used, and importing this package imports no torch. ``docs/kernels.md`` lists every
argument of every function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_neuron_moe.kernels.block_conditions import block_conditions
    from hf_neuron_moe.kernels.blockwise_mm_bwd import MoEBackward, MoEBiasBackward, blockwise_mm_bwd
    from hf_neuron_moe.kernels.blockwise_mxfp8 import MoEForwardMXFP8, blockwise_mm_bwd_mxfp8, blockwise_mm_fwd_mxfp8
    from hf_neuron_moe.kernels.fp8_mul import (
        fp8_division_transpose,
        fp8_mul_backward,
        fp8_mul_forward,
        fp8_silu_backward,
        fp8_silu_forward,
    )
    from hf_neuron_moe.kernels.launch_record import KernelLaunch, record_launches
    from hf_neuron_moe.kernels.mlp_mxfp8 import (
        MatmulMxfp8KernelConfig,
        MLPBackward,
        MlpBwdConfig,
        MlpBwdMatmulConfig,
        MLPForward,
        MlpFwdConfig,
        compute_fused_gate_up_down_mxfp8,
        compute_phase1_down_proj_mm_grad_mxfp8,
        compute_phase2_hidden_states_grad_mxfp8,
        compute_phase2_hidden_states_grad_mxfp8_2_30,
        compute_phase3_gate_up_weight_grad_mxfp8,
        compute_phase4_down_weight_grad_mxfp8,
        get_backward_config_for_shape,
        get_forward_config_for_shape,
        get_program_sharding_info,
        mlp_backward_mxfp8,
        mlp_backward_mxfp8_base_nki,
        mlp_backward_mxfp8_nki,
        mlp_backward_mxfp8_nki_2_30,
        mlp_forward_mxfp8,
        mlp_forward_mxfp8_nki,
        recompute_gate_act,
        recompute_gate_up_projection,
        recompute_hidden,
        recompute_intermediate,
    )
    from hf_neuron_moe.kernels.moe_cte import MoEForward, moe_cte
    from hf_neuron_moe.kernels.moe_cte_direct import (
        blockwise_mm_baseline_shard_hidden,
        blockwise_mm_baseline_shard_intermediate,
        blockwise_mm_baseline_shard_intermediate_hybrid,
        blockwise_mm_shard_intermediate_dropping,
        bwmm_shard_on_block,
    )
    from hf_neuron_moe.kernels.moe_cte_direct_mx import (
        blockwise_mm_shard_intermediate_mx,
        blockwise_mm_shard_intermediate_mx_hybrid,
        bwmm_shard_on_block_mx,
    )
    from hf_neuron_moe.kernels.moe_types import (
        ActFnType,
        AffinityOption,
        BlockShardStrategy,
        ClampLimits,
        DownProjOutputGradBlocking,
        DownWeightGradBlocking,
        ExpertAffinityScaleMode,
        GateUpOutputGradBlocking,
        GateUpWeightGradBlocking,
        HiddenGradBlocking,
        KernelTypeOption,
        MoECTEImplementation,
        MoECTESpec,
        QuantizationConfig,
        QuantizationType,
        RouterActFnType,
        ShardOnBlockConfig,
        ShardOnIConfig,
        ShardOption,
        ShardOption229,
        SkipMode,
    )
    from hf_neuron_moe.kernels.mx_operand import MXOperand, TensorDescriptor
    from hf_neuron_moe.kernels.router_topk import router_topk
    from hf_neuron_moe.kernels.routing import (
        BlockPlan,
        BlockSizeChoice,
        build_block_plan,
        build_dropping_plan,
        choose_block_size,
        count_blocks,
        dropping_capacity,
        expert_mask,
        masked_affinities,
    )

__all__ = [
    "ActFnType",
    "AffinityOption",
    "BlockPlan",
    "BlockShardStrategy",
    "BlockSizeChoice",
    "ClampLimits",
    "DownProjOutputGradBlocking",
    "DownWeightGradBlocking",
    "ExpertAffinityScaleMode",
    "GateUpOutputGradBlocking",
    "GateUpWeightGradBlocking",
    "HiddenGradBlocking",
    "KernelLaunch",
    "KernelTypeOption",
    "MLPBackward",
    "MLPForward",
    "MXOperand",
    "MatmulMxfp8KernelConfig",
    "MlpBwdConfig",
    "MlpBwdMatmulConfig",
    "MlpFwdConfig",
    "MoEBackward",
    "MoEBiasBackward",
    "MoECTEImplementation",
    "MoECTESpec",
    "MoEForward",
    "MoEForwardMXFP8",
    "QuantizationConfig",
    "QuantizationType",
    "RouterActFnType",
    "ShardOnBlockConfig",
    "ShardOnIConfig",
    "ShardOption",
    "ShardOption229",
    "SkipMode",
    "TensorDescriptor",
    "block_conditions",
    "blockwise_mm_baseline_shard_hidden",
    "blockwise_mm_baseline_shard_intermediate",
    "blockwise_mm_baseline_shard_intermediate_hybrid",
    "blockwise_mm_bwd",
    "blockwise_mm_bwd_mxfp8",
    "blockwise_mm_fwd_mxfp8",
    "blockwise_mm_shard_intermediate_dropping",
    "blockwise_mm_shard_intermediate_mx",
    "blockwise_mm_shard_intermediate_mx_hybrid",
    "build_block_plan",
    "build_dropping_plan",
    "bwmm_shard_on_block",
    "bwmm_shard_on_block_mx",
    "choose_block_size",
    "compute_fused_gate_up_down_mxfp8",
    "compute_phase1_down_proj_mm_grad_mxfp8",
    "compute_phase2_hidden_states_grad_mxfp8",
    "compute_phase2_hidden_states_grad_mxfp8_2_30",
    "compute_phase3_gate_up_weight_grad_mxfp8",
    "compute_phase4_down_weight_grad_mxfp8",
    "count_blocks",
    "dropping_capacity",
    "expert_mask",
    "fp8_division_transpose",
    "fp8_mul_backward",
    "fp8_mul_forward",
    "fp8_silu_backward",
    "fp8_silu_forward",
    "get_backward_config_for_shape",
    "get_forward_config_for_shape",
    "get_program_sharding_info",
    "masked_affinities",
    "mlp_backward_mxfp8",
    "mlp_backward_mxfp8_base_nki",
    "mlp_backward_mxfp8_nki",
    "mlp_backward_mxfp8_nki_2_30",
    "mlp_forward_mxfp8",
    "mlp_forward_mxfp8_nki",
    "moe_cte",
    "recompute_gate_act",
    "recompute_gate_up_projection",
    "recompute_hidden",
    "recompute_intermediate",
    "record_launches",
    "router_topk",
]

_NAMES = {
    "block_conditions": ("block_conditions",),
    "blockwise_mm_bwd": ("MoEBackward", "MoEBiasBackward", "blockwise_mm_bwd"),
    "blockwise_mxfp8": ("MoEForwardMXFP8", "blockwise_mm_bwd_mxfp8", "blockwise_mm_fwd_mxfp8"),
    "fp8_mul": (
        "fp8_division_transpose",
        "fp8_mul_backward",
        "fp8_mul_forward",
        "fp8_silu_backward",
        "fp8_silu_forward",
    ),
    "launch_record": ("KernelLaunch", "record_launches"),
    "mlp_mxfp8": (
        "MLPBackward",
        "MLPForward",
        "MatmulMxfp8KernelConfig",
        "MlpBwdConfig",
        "MlpBwdMatmulConfig",
        "MlpFwdConfig",
        "compute_fused_gate_up_down_mxfp8",
        "compute_phase1_down_proj_mm_grad_mxfp8",
        "compute_phase2_hidden_states_grad_mxfp8",
        "compute_phase2_hidden_states_grad_mxfp8_2_30",
        "compute_phase3_gate_up_weight_grad_mxfp8",
        "compute_phase4_down_weight_grad_mxfp8",
        "get_backward_config_for_shape",
        "get_forward_config_for_shape",
        "get_program_sharding_info",
        "mlp_backward_mxfp8",
        "mlp_backward_mxfp8_base_nki",
        "mlp_backward_mxfp8_nki",
        "mlp_backward_mxfp8_nki_2_30",
        "mlp_forward_mxfp8",
        "mlp_forward_mxfp8_nki",
        "recompute_gate_act",
        "recompute_gate_up_projection",
        "recompute_hidden",
        "recompute_intermediate",
    ),
    "moe_cte": ("MoEForward", "moe_cte"),
    "moe_cte_direct": (
        "blockwise_mm_baseline_shard_hidden",
        "blockwise_mm_baseline_shard_intermediate",
        "blockwise_mm_baseline_shard_intermediate_hybrid",
        "blockwise_mm_shard_intermediate_dropping",
        "bwmm_shard_on_block",
    ),
    "moe_cte_direct_mx": (
        "blockwise_mm_shard_intermediate_mx",
        "blockwise_mm_shard_intermediate_mx_hybrid",
        "bwmm_shard_on_block_mx",
    ),
    "moe_types": (
        "ActFnType",
        "AffinityOption",
        "BlockShardStrategy",
        "ClampLimits",
        "DownProjOutputGradBlocking",
        "DownWeightGradBlocking",
        "ExpertAffinityScaleMode",
        "GateUpOutputGradBlocking",
        "GateUpWeightGradBlocking",
        "HiddenGradBlocking",
        "KernelTypeOption",
        "MoECTEImplementation",
        "MoECTESpec",
        "QuantizationConfig",
        "QuantizationType",
        "RouterActFnType",
        "ShardOnBlockConfig",
        "ShardOnIConfig",
        "ShardOption",
        "ShardOption229",
        "SkipMode",
    ),
    "mx_operand": ("MXOperand", "TensorDescriptor"),
    "router_topk": ("router_topk",),
    "routing": (
        "BlockPlan",
        "BlockSizeChoice",
        "build_block_plan",
        "build_dropping_plan",
        "choose_block_size",
        "count_blocks",
        "dropping_capacity",
        "expert_mask",
        "masked_affinities",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


class _Kernels(ModuleType):
    """A package in which a function wins over the submodule of the same name, whichever was imported first."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds every submodule to its name in here: ``moe_cte`` would stop being the function.
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Kernels


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
