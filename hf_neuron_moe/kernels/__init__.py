"""The documented kernels as plain functions: their names, their argument names, their rules, on any device.

    >>> from hf_neuron_moe.kernels import (MoECTESpec as MoECTESpec, build_block_plan as build_block_plan, moe_cte as moe_cte)

The functions are those of :mod:`hf_neuron_moe.reference` under AWS's names. ``docs/kernels.md`` lists every argument of
every function.
"""

from __future__ import annotations

from hf_neuron_moe.formats.block_plan import (
    BlockPlan as BlockPlan,
)
from hf_neuron_moe.formats.block_plan import (
    BlockSizeChoice as BlockSizeChoice,
)
from hf_neuron_moe.formats.block_plan import (
    build_block_plan as build_block_plan,
)
from hf_neuron_moe.formats.block_plan import (
    build_dropping_plan as build_dropping_plan,
)
from hf_neuron_moe.formats.block_plan import (
    choose_block_size as choose_block_size,
)
from hf_neuron_moe.formats.block_plan import (
    count_blocks as count_blocks,
)
from hf_neuron_moe.formats.block_plan import (
    dropping_capacity as dropping_capacity,
)
from hf_neuron_moe.formats.block_plan import (
    expert_mask as expert_mask,
)
from hf_neuron_moe.formats.block_plan import (
    masked_affinities as masked_affinities,
)
from hf_neuron_moe.reference.block_conditions import block_conditions as block_conditions
from hf_neuron_moe.reference.blockwise_mm_bwd import (
    MoEBackward as MoEBackward,
)
from hf_neuron_moe.reference.blockwise_mm_bwd import (
    MoEBiasBackward as MoEBiasBackward,
)
from hf_neuron_moe.reference.blockwise_mm_bwd import (
    blockwise_mm_bwd as blockwise_mm_bwd,
)
from hf_neuron_moe.reference.blockwise_mxfp8 import (
    MoEForwardMXFP8 as MoEForwardMXFP8,
)
from hf_neuron_moe.reference.blockwise_mxfp8 import (
    blockwise_mm_bwd_mxfp8 as blockwise_mm_bwd_mxfp8,
)
from hf_neuron_moe.reference.blockwise_mxfp8 import (
    blockwise_mm_fwd_mxfp8 as blockwise_mm_fwd_mxfp8,
)
from hf_neuron_moe.reference.described_operand import MXOperand as MXOperand
from hf_neuron_moe.reference.described_operand import TensorDescriptor as TensorDescriptor
from hf_neuron_moe.reference.fp8_operators import (
    fp8_division_transpose as fp8_division_transpose,
)
from hf_neuron_moe.reference.fp8_operators import (
    fp8_mul_backward as fp8_mul_backward,
)
from hf_neuron_moe.reference.fp8_operators import (
    fp8_mul_forward as fp8_mul_forward,
)
from hf_neuron_moe.reference.fp8_operators import (
    fp8_silu_backward as fp8_silu_backward,
)
from hf_neuron_moe.reference.fp8_operators import (
    fp8_silu_forward as fp8_silu_forward,
)
from hf_neuron_moe.reference.launch_record import KernelLaunch as KernelLaunch
from hf_neuron_moe.reference.launch_record import record_launches as record_launches
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    MLPBackward as MLPBackward,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    mlp_backward_mxfp8 as mlp_backward_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    mlp_backward_mxfp8_base_nki as mlp_backward_mxfp8_base_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    mlp_backward_mxfp8_nki as mlp_backward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward_2_30 import mlp_backward_mxfp8_nki_2_30 as mlp_backward_mxfp8_nki_2_30
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    MLPForward as MLPForward,
)
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    compute_fused_gate_up_down_mxfp8 as compute_fused_gate_up_down_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    mlp_forward_mxfp8 as mlp_forward_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    mlp_forward_mxfp8_nki as mlp_forward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MatmulMxfp8KernelConfig as MatmulMxfp8KernelConfig,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MlpBwdConfig as MlpBwdConfig,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MlpBwdMatmulConfig as MlpBwdMatmulConfig,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MlpFwdConfig as MlpFwdConfig,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    get_backward_config_for_shape as get_backward_config_for_shape,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    get_forward_config_for_shape as get_forward_config_for_shape,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase1_down_proj_mm_grad_mxfp8 as compute_phase1_down_proj_mm_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase2_hidden_states_grad_mxfp8 as compute_phase2_hidden_states_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase2_hidden_states_grad_mxfp8_2_30 as compute_phase2_hidden_states_grad_mxfp8_2_30,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase3_gate_up_weight_grad_mxfp8 as compute_phase3_gate_up_weight_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase4_down_weight_grad_mxfp8 as compute_phase4_down_weight_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    get_program_sharding_info as get_program_sharding_info,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_gate_act as recompute_gate_act,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_gate_up_projection as recompute_gate_up_projection,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_hidden as recompute_hidden,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_intermediate as recompute_intermediate,
)
from hf_neuron_moe.reference.moe_cte import MoEForward as MoEForward
from hf_neuron_moe.reference.moe_cte import moe_cte as moe_cte
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_baseline_shard_hidden as blockwise_mm_baseline_shard_hidden,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_baseline_shard_intermediate as blockwise_mm_baseline_shard_intermediate,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_baseline_shard_intermediate_hybrid as blockwise_mm_baseline_shard_intermediate_hybrid,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_shard_intermediate_dropping as blockwise_mm_shard_intermediate_dropping,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_shard_intermediate_mx as blockwise_mm_shard_intermediate_mx,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_shard_intermediate_mx_hybrid as blockwise_mm_shard_intermediate_mx_hybrid,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    bwmm_shard_on_block as bwmm_shard_on_block,
)
from hf_neuron_moe.reference.moe_cte_direct import (
    bwmm_shard_on_block_mx as bwmm_shard_on_block_mx,
)
from hf_neuron_moe.reference.moe_types import (
    ActFnType as ActFnType,
)
from hf_neuron_moe.reference.moe_types import (
    AffinityOption as AffinityOption,
)
from hf_neuron_moe.reference.moe_types import (
    BlockShardStrategy as BlockShardStrategy,
)
from hf_neuron_moe.reference.moe_types import (
    ClampLimits as ClampLimits,
)
from hf_neuron_moe.reference.moe_types import (
    DownProjOutputGradBlocking as DownProjOutputGradBlocking,
)
from hf_neuron_moe.reference.moe_types import (
    DownWeightGradBlocking as DownWeightGradBlocking,
)
from hf_neuron_moe.reference.moe_types import (
    ExpertAffinityScaleMode as ExpertAffinityScaleMode,
)
from hf_neuron_moe.reference.moe_types import (
    GateUpOutputGradBlocking as GateUpOutputGradBlocking,
)
from hf_neuron_moe.reference.moe_types import (
    GateUpWeightGradBlocking as GateUpWeightGradBlocking,
)
from hf_neuron_moe.reference.moe_types import (
    HiddenGradBlocking as HiddenGradBlocking,
)
from hf_neuron_moe.reference.moe_types import (
    KernelTypeOption as KernelTypeOption,
)
from hf_neuron_moe.reference.moe_types import (
    MoECTEImplementation as MoECTEImplementation,
)
from hf_neuron_moe.reference.moe_types import (
    MoECTESpec as MoECTESpec,
)
from hf_neuron_moe.reference.moe_types import (
    QuantizationConfig as QuantizationConfig,
)
from hf_neuron_moe.reference.moe_types import (
    QuantizationType as QuantizationType,
)
from hf_neuron_moe.reference.moe_types import (
    RouterActFnType as RouterActFnType,
)
from hf_neuron_moe.reference.moe_types import (
    ShardOnBlockConfig as ShardOnBlockConfig,
)
from hf_neuron_moe.reference.moe_types import (
    ShardOnIConfig as ShardOnIConfig,
)
from hf_neuron_moe.reference.moe_types import (
    ShardOption as ShardOption,
)
from hf_neuron_moe.reference.moe_types import (
    ShardOption229 as ShardOption229,
)
from hf_neuron_moe.reference.moe_types import (
    SkipMode as SkipMode,
)
from hf_neuron_moe.reference.router_topk import router_topk as router_topk

__all__ = sorted(
    name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith("hf_neuron_moe.")
)
