"""The argument sets of the nkilib functions this package calls, release by release.

Sources: nki-library 2.29 to 2.33.
"""

from __future__ import annotations

from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ROUTED = _names(
    "hidden_states expert_affinities_masked gate_up_proj_weight down_proj_weight token_position_to_id block_to_expert "
    "block_size"
)
_MLP_SAVES = _names("save_gate_pre save_up use_scale_packing gate_up_scales down_scales")
_CHECKPOINTS = _names("gate_pre gate_act up run_with_lnc2")
_BACKWARD = _ROUTED | {"gate_up_proj_act_checkpoint_T", "output_hidden_states_grad"}
_BWD_OPTIONS = _names(
    "down_proj_act_checkpoint skip_dma compute_dtype is_tensor_update_accumulating affinity_option activation_type"
)
_CTE_OPTIONS = _names(
    "spec activation_function skip_dma compute_dtype is_tensor_update_accumulating expert_affinities_scaling_mode"
)
_MX_OPTIONS = _names("shard_option affinity_option compute_dtype skip_dma")


@dataclass(frozen=True)
class Generation:
    """One argument set of an nkilib function.

    Attributes:
        name: the first release with it.
        module: our module of wrapper kernels, in ``nki_kernels``.
        passed: the arguments the wrappers pass.
        marks: arguments they do not pass, but which only this generation has.
        records: configuration records the wrappers make, with the fields they set.
    """

    name: str
    module: str
    passed: frozenset[str]
    marks: frozenset[str] = frozenset()
    records: tuple[tuple[str, frozenset[str]], ...] = ()


_FWD_CONFIG = _names(
    "shard_option affinity_option is_tensor_update_accumulating single_expert_dense skip_dma gate_up_proj_act_td "
    "fast_dma_transpose reuse_spilled_weights use_1x32_pe_swizzle"
)
_BWD_CONFIG = _names(
    "shard_option affinity_option accumulate_hidden_states_grad single_expert_dense fast_dma_transpose skip_dma"
)
_BWD_SWIZZLES = _names(
    "pe_transpose_only output_grad_swizzle_mode down_weight_swizzle_mode d_gate_up_swizzle_mode "
    "gate_up_weight_swizzle_mode d_gate_up_t_swizzle_mode hidden_states_t_swizzle_mode output_grad_t_swizzle_mode "
    "scaled_intermediate_t_swizzle_mode"
)

FUNCTIONS: dict[str, tuple[str, tuple[Generation, ...]]] = {
    "mlp_forward": (
        "mlp_forward_mxfp8_nki",
        (
            Generation(
                "2.30",
                "mlp_forward",
                _names("hidden gate_up_weights down_weights intermediate_hbm run_with_lnc2") | _MLP_SAVES,
            ),
        ),
    ),
    "mlp_backward": (
        "mlp_backward_mxfp8_nki",
        (
            Generation(
                "2.31",
                "mlp_backward",
                _CHECKPOINTS | _names("output_grad hidden_states down_proj_weight gate_up_weights intermediate"),
            ),
            Generation(
                "2.30",
                "mlp_backward_2_30",
                _CHECKPOINTS
                | _names(
                    "output_hidden_states_grad hidden_states gate_proj_weight_T up_proj_weight_T down_proj_weight_T "
                    "gate_up_weights d_gate_scratch d_up_scratch hidden_states_T output_grad_T hidden_T "
                    "silu_up_mul_gate_grad_T_scratch gate_pre_scratch gate_act_scratch up_scratch hidden_scratch "
                    "hidden"
                ),
            ),
        ),
    ),
    "moe_forward": (
        "moe_cte",
        (
            Generation(
                "2.29",
                "moe_forward",
                _ROUTED | _CTE_OPTIONS,
            ),
        ),
    ),
    "moe_backward": (
        "blockwise_mm_bwd",
        (
            Generation(
                "2.31",
                "moe_backward",
                _BACKWARD | _BWD_OPTIONS | {"shard_option"},
                marks=frozenset({"hidden_states_grad_out"}),
            ),
            Generation("2.29", "moe_backward_2_29", _BACKWARD | _BWD_OPTIONS),
        ),
    ),
    "moe_forward_mxfp8": (
        "blockwise_mm_fwd_mxfp8",
        (
            Generation(
                "2.33",
                "moe_forward_mxfp8_config",
                _ROUTED | {"config"},
                records=(
                    ("MXFP8MOEFwdConfig", _FWD_CONFIG),
                    ("TensorDescriptor", frozenset({"orientation"})),
                    ("TensorOrientation", frozenset()),
                ),
            ),
            Generation(
                "2.32", "moe_forward_mxfp8", _ROUTED | _MX_OPTIONS | frozenset({"is_tensor_update_accumulating"})
            ),
        ),
    ),
    "moe_backward_mxfp8": (
        "blockwise_mm_bwd_mxfp8",
        (
            Generation(
                "2.33, swizzle modes",
                "moe_backward_mxfp8_swizzle_modes",
                _BACKWARD | {"config"},
                records=(("MXFP8MOEBwdConfig", _BWD_CONFIG | _BWD_SWIZZLES), ("SwizzleMode", frozenset())),
            ),
            Generation(
                "2.33",
                "moe_backward_mxfp8_config",
                _BACKWARD | {"config"},
                records=(("MXFP8MOEBwdConfig", _BWD_CONFIG),),
            ),
            Generation("2.31", "moe_backward_mxfp8", _BACKWARD | _MX_OPTIONS),
        ),
    ),
    "moe_forward_mx": (
        "moe_cte",
        (
            Generation(
                "2.30",
                "moe_forward_mx",
                _ROUTED
                | _CTE_OPTIONS
                | _names("gate_and_up_proj_bias down_proj_bias gate_up_proj_scale down_proj_scale"),
            ),
        ),
    ),
}
"""By what this package needs: the name of nkilib's function, and its generations, the newest first."""
