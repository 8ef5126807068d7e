"""The documented kernels as plain functions: their names, their argument names, their rules, on any device.

    >>> from hf_neuron_moe.kernels import MoECTESpec, build_block_plan, moe_cte

The functions are those of :mod:`hf_neuron_moe.reference` under AWS's names. ``docs/kernels.md`` lists every argument of
every function.
"""

from __future__ import annotations

from hf_neuron_moe.formats.block_plan import (
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
from hf_neuron_moe.reference.block_conditions import block_conditions
from hf_neuron_moe.reference.blockwise_mm_bwd import MoEBackward, MoEBiasBackward, blockwise_mm_bwd
from hf_neuron_moe.reference.blockwise_mxfp8 import MoEForwardMXFP8, blockwise_mm_bwd_mxfp8, blockwise_mm_fwd_mxfp8
from hf_neuron_moe.reference.described_operand import MXOperand, TensorDescriptor
from hf_neuron_moe.reference.fp8_operators import (
    fp8_division_transpose,
    fp8_mul_backward,
    fp8_mul_forward,
    fp8_silu_backward,
    fp8_silu_forward,
)
from hf_neuron_moe.reference.launch_record import KernelLaunch, record_launches
from hf_neuron_moe.reference.mlp_mxfp8.backward import (
    MLPBackward,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_base_nki,
    mlp_backward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.backward_2_30 import mlp_backward_mxfp8_nki_2_30
from hf_neuron_moe.reference.mlp_mxfp8.forward import (
    MLPForward,
    compute_fused_gate_up_down_mxfp8,
    mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MatmulMxfp8KernelConfig,
    MlpBwdConfig,
    MlpBwdMatmulConfig,
    MlpFwdConfig,
    get_backward_config_for_shape,
    get_forward_config_for_shape,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    get_program_sharding_info,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import (
    recompute_gate_act,
    recompute_gate_up_projection,
    recompute_hidden,
    recompute_intermediate,
)
from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_cte_direct import (
    blockwise_mm_baseline_shard_hidden,
    blockwise_mm_baseline_shard_intermediate,
    blockwise_mm_baseline_shard_intermediate_hybrid,
    blockwise_mm_shard_intermediate_dropping,
    blockwise_mm_shard_intermediate_mx,
    blockwise_mm_shard_intermediate_mx_hybrid,
    bwmm_shard_on_block,
    bwmm_shard_on_block_mx,
)
from hf_neuron_moe.reference.moe_types import (
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
from hf_neuron_moe.reference.router_topk import router_topk

__all__ = sorted(
    name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith("hf_neuron_moe.")
)
