"""The documented kernels as plain functions: their names, their argument names, their rules, on any device.

    >>> from hf_neuron_moe.kernels import MoECTESpec, build_block_plan, moe_cte

The functions are those of :mod:`hf_neuron_moe.reference` under AWS's names, with the arguments of nki-library 2.31 to
2.33; :mod:`hf_neuron_moe.kernels.release_2_30` has those of 2.30. ``get_config_for_shape`` is the forward's here, as
from 2.31 on there is no other, and the backward's there. ``docs/kernels.md`` lists every argument of
every function.
"""

from __future__ import annotations

from hf_neuron_moe.formats.block_plan import (
    BlockPlan as BlockPlan,
    BlockSizeChoice as BlockSizeChoice,
    build_block_plan as build_block_plan,
    build_dropping_plan as build_dropping_plan,
    choose_block_size as choose_block_size,
    count_blocks as count_blocks,
    dropping_capacity as dropping_capacity,
    expert_mask as expert_mask,
    masked_affinities as masked_affinities,
)
from hf_neuron_moe.reference.block_conditions import block_conditions as block_conditions
from hf_neuron_moe.reference.blockwise_mm_bwd import (
    MoEBackward as MoEBackward,
    MoEBiasBackward as MoEBiasBackward,
    blockwise_mm_bwd as blockwise_mm_bwd,
)
from hf_neuron_moe.reference.blockwise_mxfp8 import (
    MoEForwardMXFP8 as MoEForwardMXFP8,
    blockwise_mm_bwd_mxfp8 as blockwise_mm_bwd_mxfp8,
    blockwise_mm_fwd_mxfp8 as blockwise_mm_fwd_mxfp8,
)
from hf_neuron_moe.reference.described_operand import MXOperand as MXOperand, TensorDescriptor as TensorDescriptor
from hf_neuron_moe.reference.fp8_operators import (
    fp8_division_transpose as fp8_division_transpose,
    fp8_mul_backward as fp8_mul_backward,
    fp8_mul_forward as fp8_mul_forward,
    fp8_silu_backward as fp8_silu_backward,
    fp8_silu_forward as fp8_silu_forward,
)
from hf_neuron_moe.reference.launch_record import KernelLaunch as KernelLaunch, record_launches as record_launches
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    MLPBackward as MLPBackward,
    mlp_backward_mxfp8 as mlp_backward_mxfp8,
    mlp_backward_mxfp8_base_nki as mlp_backward_mxfp8_base_nki,
    mlp_backward_mxfp8_nki as mlp_backward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward_2_30 import mlp_backward_mxfp8_nki_2_30 as mlp_backward_mxfp8_nki_2_30
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    MLPForward as MLPForward,
    compute_fused_gate_up_down_mxfp8 as compute_fused_gate_up_down_mxfp8,
    get_config_for_shape as get_config_for_shape,
    mlp_forward_mxfp8 as mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki as mlp_forward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MatmulMxfp8KernelConfig as MatmulMxfp8KernelConfig,
    MlpBwdConfig as MlpBwdConfig,
    MlpBwdMatmulConfig as MlpBwdMatmulConfig,
    MlpFwdConfig as MlpFwdConfig,
    footprint as footprint,
    get_backward_config_for_shape as get_backward_config_for_shape,
    get_forward_config_for_shape as get_forward_config_for_shape,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_mxfp8 import (
    matmul_mxfp8 as matmul_mxfp8,
    quantize_block_mxfp8_kernel as quantize_block_mxfp8_kernel,
)
from hf_neuron_moe.reference.mlp_mxfp8.on_chip import Footprint as Footprint
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase1_down_proj_mm_grad_mxfp8 as compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8 as compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30 as compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8 as compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8 as compute_phase4_down_weight_grad_mxfp8,
    get_program_sharding_info as get_program_sharding_info,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_gate_act as recompute_gate_act,
    recompute_gate_up_projection as recompute_gate_up_projection,
    recompute_hidden as recompute_hidden,
    recompute_intermediate as recompute_intermediate,
)
from hf_neuron_moe.reference.moe_cte import MoEForward as MoEForward, moe_cte as moe_cte
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_baseline_shard_hidden as blockwise_mm_baseline_shard_hidden,
    blockwise_mm_baseline_shard_intermediate as blockwise_mm_baseline_shard_intermediate,
    blockwise_mm_baseline_shard_intermediate_hybrid as blockwise_mm_baseline_shard_intermediate_hybrid,
    blockwise_mm_shard_intermediate_dropping as blockwise_mm_shard_intermediate_dropping,
    blockwise_mm_shard_intermediate_mx as blockwise_mm_shard_intermediate_mx,
    blockwise_mm_shard_intermediate_mx_hybrid as blockwise_mm_shard_intermediate_mx_hybrid,
    bwmm_shard_on_block as bwmm_shard_on_block,
    bwmm_shard_on_block_mx as bwmm_shard_on_block_mx,
)
from hf_neuron_moe.reference.moe_types import (
    ActFnType as ActFnType,
    AffinityOption as AffinityOption,
    BlockShardStrategy as BlockShardStrategy,
    ClampLimits as ClampLimits,
    DownProjOutputGradBlocking as DownProjOutputGradBlocking,
    DownWeightGradBlocking as DownWeightGradBlocking,
    ExpertAffinityScaleMode as ExpertAffinityScaleMode,
    GateUpOutputGradBlocking as GateUpOutputGradBlocking,
    GateUpWeightGradBlocking as GateUpWeightGradBlocking,
    HiddenGradBlocking as HiddenGradBlocking,
    KernelTypeOption as KernelTypeOption,
    MoECTEImplementation as MoECTEImplementation,
    MoECTESpec as MoECTESpec,
    QuantizationConfig as QuantizationConfig,
    QuantizationType as QuantizationType,
    RouterActFnType as RouterActFnType,
    ShardOnBlockConfig as ShardOnBlockConfig,
    ShardOnIConfig as ShardOnIConfig,
    ShardOption as ShardOption,
    ShardOption229 as ShardOption229,
    SkipMode as SkipMode,
)
from hf_neuron_moe.reference.router_topk import router_topk as router_topk
from hf_neuron_moe.reference.upstream_bugs import known_bugs as known_bugs

__all__ = sorted(
    name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith("hf_neuron_moe.")
)
