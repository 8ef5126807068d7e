"""The argument sets of the nkilib functions this package calls, release by release.

An option whose documented default is what is wanted is not passed, so it need not exist; its default is looked at where
it does. An option without a documented default is passed where the installed function has it.

Sources: nki-library 2.29 to 2.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KERNEL_PRECISIONS = ("bf16", "mxfp8")  # those that some kernel pair computes in
BF16_OPEN = (
    "the documents leave open whether the bf16 experts' forward, which takes a row of zeros behind the tokens, and "
    "their backward, which takes none, fit together; hf-neuron-moe verify-device checks it"
)
"""About ``moe_forward`` and ``moe_backward``."""

_SWIZZLED = "output_grad down_weight d_gate_up gate_up_weight d_gate_up_t hidden_states_t output_grad_t"
SWIZZLE_MODES = tuple(f"{operand}_swizzle_mode" for operand in (*_SWIZZLED.split(), "scaled_intermediate_t"))
"""Options of the backward: only the mode DGT knows several experts, and the default may be another one."""

OPTION_RECORDS = ("MXFP8MOEFwdConfig", "MXFP8MOEBwdConfig")
"""Records in whose fields a kernel takes its options."""

COMPANIONS = {"gate_up_proj_act_td": ("TensorOrientation", "K_BY_F"), "_swizzle_mode": ("SwizzleMode", "DGT")}
"""By the end of a record's field: an enum and the member that the field must be set to."""

_Defaults = Mapping[str, bool | str]


@dataclass(frozen=True)
class Generation:
    """One argument set of an nkilib function."""

    name: str  # the first release with it
    module: str  # our module of wrapper kernels, in nki_kernels
    needed: frozenset[str]  # arguments that the wrappers pass and the function must have
    offered: frozenset[str] = frozenset()  # arguments that the wrappers pass if the function has them
    # Arguments that the wrappers leave alone, with the documented default: a truth value, or an enum member's name.
    defaults: _Defaults = field(default_factory=dict, hash=False)
    foreign: frozenset[str] = frozenset()  # arguments that only other generations have
    members: tuple[tuple[str, str], ...] = ()  # pairs of an enum and a member that it must have
    records: tuple[tuple[str, str], ...] = ()  # pairs of a record that the wrappers make and fields it must have
    function: str = ""  # nkilib's, where it is not the one of the other generations
    checkpoint: bool = False  # the function's checkpoint of gate and up may have either order

    @property
    def passed(self) -> frozenset[str]:
        """Everything that the wrappers may pass."""
        return self.needed | self.offered


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ROUTED = _names(
    "hidden_states expert_affinities_masked gate_up_proj_weight down_proj_weight token_position_to_id block_to_expert "
    "block_size"
)
_BACKWARD = _ROUTED | {"gate_up_proj_act_checkpoint_T", "output_hidden_states_grad"}
_TRANSPOSES_AND_SCRATCH = _names(
    "output_hidden_states_grad hidden_states gate_proj_weight_T up_proj_weight_T down_proj_weight_T gate_up_weights "
    "d_gate_scratch d_up_scratch hidden_states_T output_grad_T hidden_T silu_up_mul_gate_grad_T_scratch "
    "gate_pre_scratch gate_act_scratch up_scratch hidden_scratch hidden"
)
_CHECKPOINTS = _names("gate_pre gate_act up run_with_lnc2")
_MLP_FORWARD = _names("hidden gate_up_weights down_weights intermediate_hbm run_with_lnc2")
_MX_WORDS = _ROUTED | _names(
    "gate_up_proj_scale down_proj_scale gate_and_up_proj_bias down_proj_bias activation_function "
    "gate_clamp_upper_limit gate_clamp_lower_limit up_clamp_upper_limit up_clamp_lower_limit"
)
_SKIPS = (("BackwardSkipMode", "skip_token"),)
_ON_BLOCK, _ON_FREE = (("ShardOption", "SHARD_ON_BLOCK"),), (("ShardOption", "SHARD_ON_FREE"),)

_CTE_DEFAULTS: _Defaults = {
    "activation_function": "SiLU",
    "expert_affinities_scaling_mode": "POST_SCALE",
    "skip_dma": False,
    "is_tensor_update_accumulating": True,
    "skip_gate_proj": False,
}
_MX_DEFAULTS = {key: value for key, value in _CTE_DEFAULTS.items() if key != "activation_function"}
_PAIR_DEFAULTS: _Defaults = {"activation_type": "SiLU", "skip_grad_initialization": False, "bias": False}
_BWD_DEFAULTS: _Defaults = {
    **_PAIR_DEFAULTS,
    "is_tensor_update_accumulating": True,
    "kernel_type_option": "DROPLESS",
    "skip_gate_proj": False,
}
_AS_ARGUMENTS: dict[str, Any] = {
    # Documents name these without a signature, and some under two names.
    "offered": _names(
        "shard_option affinity_option skip_dma is_tensor_update_accumulating accumulate_hidden_states_grad "
        "no_indirect_load single_expert_dense"
    ),
    "defaults": _PAIR_DEFAULTS,
    "foreign": frozenset({"config"}),
    "records": _SKIPS,
    "checkpoint": True,
}
"""The pair before 2.33; later its options are the fields of a record."""

_MLP_FORWARD_2_30 = Generation("2.30", "mlp_forward", _MLP_FORWARD | {"save_gate_pre", "save_up"})
_MLP_FORWARD_QUANTIZED_2_30 = Generation(
    "2.30",
    "mlp_forward_quantized",
    _MLP_FORWARD | _names("gate_up_scales down_scales"),
    defaults={"use_scale_packing": True},
)
_MLP_BACKWARD_2_31 = Generation(
    "2.31",
    "mlp_backward",
    _CHECKPOINTS | _names("output_grad hidden_states down_proj_weight gate_up_weights intermediate"),
)
_MLP_BACKWARD_2_30 = Generation("2.30", "mlp_backward_2_30", _CHECKPOINTS | _TRANSPOSES_AND_SCRATCH)
_MOE_FORWARD_2_29 = Generation(
    "2.29",
    "moe_forward",
    _ROUTED | {"spec"},
    defaults=_CTE_DEFAULTS,
    members=(("MoECTEImplementation", "shard_on_i"),),
    records=(
        ("MoECTESpec", "implementation shard_on_I"),
        ("ShardOnIConfig", "checkpoint_activation expert_affinity_multiply_on_I"),
    ),
)
_MOE_BACKWARD_2_31 = Generation(
    "2.31",
    "moe_backward",
    _BACKWARD | _names("down_proj_act_checkpoint skip_dma shard_option affinity_option"),
    defaults=_BWD_DEFAULTS,
    members=(*_ON_FREE, ("AffinityOption", "AFFINITY_ON_I")),
    records=_SKIPS,
)
_MOE_BACKWARD_2_29 = Generation(
    "2.29",
    "moe_backward_2_29",
    _BACKWARD | _names("down_proj_act_checkpoint skip_dma"),
    defaults={**_BWD_DEFAULTS, "affinity_option": "AFFINITY_ON_H"},
    foreign=_names("hidden_states_grad_out accumulation_dtype"),
    records=_SKIPS,
)
_MOE_FORWARD_MXFP8_2_33 = Generation(
    "2.33",
    "moe_forward_mxfp8",
    _ROUTED | {"config"},
    members=_ON_BLOCK,
    records=(*_SKIPS, ("MXFP8MOEFwdConfig", "")),
    checkpoint=True,
)
_MOE_FORWARD_MXFP8_2_32 = Generation("2.32", "moe_forward_mxfp8", _ROUTED, members=_ON_BLOCK, **_AS_ARGUMENTS)
_MOE_BACKWARD_MXFP8_2_33 = Generation(
    "2.33",
    "moe_backward_mxfp8",
    _BACKWARD | {"config"},
    members=_ON_FREE,
    records=(*_SKIPS, ("MXFP8MOEBwdConfig", "")),
    checkpoint=True,
)
_MOE_BACKWARD_MXFP8_2_31 = Generation(
    "2.31",
    "moe_backward_mxfp8",
    _BACKWARD,
    members=_ON_FREE,
    **_AS_ARGUMENTS | {"defaults": {**_PAIR_DEFAULTS, **dict.fromkeys(SWIZZLE_MODES, "DGT")}},
)
_MOE_FORWARD_MX_2_30 = Generation(
    "2.30",
    "moe_forward_mx",
    _MX_WORDS | {"spec"},
    defaults=_MX_DEFAULTS,
    members=(("MoECTEImplementation", "shard_on_block_mx"),),
    records=(("MoECTESpec", "implementation"),),
)
_MOE_FORWARD_MX_2_29 = Generation(
    "2.29", "moe_forward_mx_direct", _MX_WORDS, defaults=_MX_DEFAULTS, function="bwmm_shard_on_block_mx"
)
_MOE_FORWARD_MX_WIDE_2_29 = Generation(
    "2.29",
    "moe_forward_mx_wide",
    _MX_WORDS | {"expert_affinities_scaling_mode"},
    defaults={key: value for key, value in _MX_DEFAULTS.items() if "scaling" not in key},
    members=(("ExpertAffinityScaleMode", "POST_SCALE"),),
)

FUNCTIONS: dict[str, tuple[str, tuple[Generation, ...]]] = {
    "mlp_forward": ("mlp_forward_mxfp8_nki", (_MLP_FORWARD_2_30,)),
    "mlp_forward_quantized": ("mlp_forward_mxfp8_nki", (_MLP_FORWARD_QUANTIZED_2_30,)),
    "mlp_backward": ("mlp_backward_mxfp8_nki", (_MLP_BACKWARD_2_31, _MLP_BACKWARD_2_30)),
    "moe_forward": ("moe_cte", (_MOE_FORWARD_2_29,)),
    "moe_backward": ("blockwise_mm_bwd", (_MOE_BACKWARD_2_31, _MOE_BACKWARD_2_29)),
    "moe_forward_mxfp8": ("blockwise_mm_fwd_mxfp8", (_MOE_FORWARD_MXFP8_2_33, _MOE_FORWARD_MXFP8_2_32)),
    "moe_backward_mxfp8": ("blockwise_mm_bwd_mxfp8", (_MOE_BACKWARD_MXFP8_2_33, _MOE_BACKWARD_MXFP8_2_31)),
    "moe_forward_mx": ("moe_cte", (_MOE_FORWARD_MX_2_30, _MOE_FORWARD_MX_2_29)),
    "moe_forward_mx_wide": ("blockwise_mm_shard_intermediate_mx", (_MOE_FORWARD_MX_WIDE_2_29,)),
}
"""By what this package needs: the name of nkilib's function, and its generations, the newest first."""
