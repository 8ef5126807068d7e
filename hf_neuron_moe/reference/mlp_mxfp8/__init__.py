"""The MXFP8 MLP kernels of nki-library (``experimental.mlp_mxfp8``) as functions.

``mlp_forward_mxfp8`` and ``mlp_backward_mxfp8`` return everything; the ``*_nki`` functions have the documented argument
order and defaults; the ``compute_*`` and ``recompute_*`` functions are the steps both are composed of.

Sources: nki-library 2.30 ``mlp_fwd_mxfp8.py``; 2.30 and 2.31 ``mlp_bwd_mxfp8.py``.
"""

from __future__ import annotations

from hf_neuron_moe.reference.launch_record import KernelLaunch, record_launches
from hf_neuron_moe.reference.mlp_mxfp8.backward import mlp_backward_mxfp8_base_nki, mlp_backward_mxfp8_nki
from hf_neuron_moe.reference.mlp_mxfp8.backward_2_30 import mlp_backward_mxfp8_nki_2_30
from hf_neuron_moe.reference.mlp_mxfp8.forward import mlp_forward_mxfp8
from hf_neuron_moe.reference.mlp_mxfp8.forward_device import compute_fused_gate_up_down_mxfp8, mlp_forward_mxfp8_nki
from hf_neuron_moe.reference.mlp_mxfp8.functional import RELEASES, mlp_backward_mxfp8
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig, MlpBwdMatmulConfig
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
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward, MLPForward
from hf_neuron_moe.reference.mlp_mxfp8.shape_config import (
    MlpBwdConfig,
    MlpFwdConfig,
    get_backward_config_for_shape,
    get_forward_config_for_shape,
)
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import MXOperand, TensorDescriptor

__all__ = [
    "RELEASES",
    "ClampLimits",
    "KernelLaunch",
    "MLPBackward",
    "MLPForward",
    "MXOperand",
    "MatmulMxfp8KernelConfig",
    "MlpBwdConfig",
    "MlpBwdMatmulConfig",
    "MlpFwdConfig",
    "TensorDescriptor",
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
    "record_launches",
]
