"""Enums and records of nkilib per release, and their translation into this package's.

Sources: nki-library 2.29 ``common_types``, ``moe_cte`` and ``moe_bwd_parameters``; additions of 2.31 and 2.33.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections import namedtuple
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

from hf_neuron_moe import kernels
from tests.neuron.double.contract import Release
from tests.neuron.double.memory import DTYPES, DType, KernelTensor

_ACTIVATIONS = {"SiLU": 0, "GELU": 1, "GELU_Tanh_Approx": 2, "Swish": 3}
_IMPLEMENTATIONS = (
    "shard_on_block", "shard_on_i", "shard_on_i_hybrid", "shard_on_i_dropping", "shard_on_block_mx", "shard_on_i_mx",
    "shard_on_i_mx_hybrid",
)  # fmt: skip
_SHARD_2_29 = {"AUTO": 0, "SHARD_ON_HIDDEN": 1, "SHARD_ON_INTERMEDIATE": 2, "BASELINE_LNC1": 3}
_SHARD_2_31 = {"SHARD_ON_FREE": 0, "SHARD_ON_HIDDEN": 1, "SHARD_ON_BLOCK": 2}


def make_enum(name: str, members: Any, module: str) -> type[Enum]:
    """An enum with a documented member list."""
    return enum.Enum(name, members, module=module)


def make_record(name: str, defaults: dict[str, Any], module: str, required: tuple[str, ...] = ()) -> type[Any]:
    """A frozen dataclass with documented fields."""
    specs: list[Any] = [(field, Any) for field in required]
    specs += [(field, Any, default) for field, default in defaults.items()]
    record = make_dataclass(name, specs, frozen=True)
    record.__module__ = module  # Python 3.12 sets the caller's, after the namespace
    return record


def variant(kind: type[Any], form: str, without: frozenset[str]) -> type[Any]:
    """A record like `kind`, of another form, that lacks some fields."""
    kept = {field.name: field.default for field in fields(kind) if field.name not in without}
    home = kind.__module__
    if form == "dataclass":
        return make_record(kind.__name__, kept, home)
    if form == "namedtuple":
        return namedtuple(kind.__name__, kept, defaults=kept.values(), module=home)  # type: ignore[no-any-return]
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=kept[name]) for name in kept]

    def fill(self: Any, **options: Any) -> None:
        vars(self).update(kept | dict(signature.bind(**options).arguments))

    signature = inspect.Signature(parameters)
    return type(kind.__name__, (), {"__init__": fill, "__module__": home, "__signature__": signature})


def _activations(release: Release) -> dict[str, int]:
    return _ACTIVATIONS | ({"SquaredReLU": 4} if release >= (2, 33) else {})


def forward_records(release: Release) -> SimpleNamespace:
    """What ``common_types`` and the ``moe_cte`` package define."""
    types, cte = "nkilib.core.utils.common_types", "nkilib.core.moe.moe_cte.moe_cte"
    utils = "nkilib.core.moe.moe_cte.moe_cte_utils"
    made = SimpleNamespace(
        ActFnType=make_enum("ActFnType", _activations(release), types),
        ExpertAffinityScaleMode=make_enum(
            "ExpertAffinityScaleMode",
            {"NO_SCALE": 0, "POST_SCALE": 1, "PRE_SCALE": 2, "PRE_SCALE_DELAYED": 3},
            types,
        ),
        RouterActFnType=make_enum("RouterActFnType", {"SIGMOID": 0, "SOFTMAX": 1}, types),
        QuantizationType=make_enum(
            "QuantizationType", {"NONE": 0, "STATIC": 1, "ROW": 2, "MX": 3, "STATIC_MX": 4, "ROW_MX": 5}, types
        ),
        MoECTEImplementation=make_enum(
            "MoECTEImplementation", {name: number for number, name in enumerate(_IMPLEMENTATIONS)}, cte
        ),
        BlockShardStrategy=make_enum("BlockShardStrategy", {"HI_LO": 0, "PING_PONG": 1}, utils),
        SkipMode=make_record("SkipMode", {"skip_token": False, "skip_weight": False}, utils),
        QuantizationConfig=make_record(
            "QuantizationConfig", {"gate_up_proj_scale": None, "down_proj_scale": None}, cte
        ),
    )
    block = {
        "n_block_per_iter": 1,
        "block_sharding_strategy": made.BlockShardStrategy.PING_PONG,
        "n_static_blocks": -1,
        "n_dynamic_blocks": 55,
    }
    if release >= (2, 31):
        block |= {
            "non_overlapping_shards": False, "use_packed_scales": False, "weight_dtype": None, "top_k": 1,
            "ep_degree": 1, "quantization_type": made.QuantizationType.MX,
        }  # fmt: skip
    made.ShardOnBlockConfig = make_record("ShardOnBlockConfig", block, cte)
    inner = {"checkpoint_activation": False, "expert_affinity_multiply_on_I": False, "num_static_block": None}
    made.ShardOnIConfig = make_record("ShardOnIConfig", inner, cte)
    made.MoECTESpec = make_record("MoECTESpec", {"shard_on_block": None, "shard_on_I": None}, cte, ("implementation",))
    return made


def backward_records(release: Release) -> SimpleNamespace:
    """What ``moe_bwd_parameters`` defines; its SkipMode is not the forward's."""
    home = "nkilib.experimental.moe.bwd.moe_bwd_parameters"
    limits = ("linear_clamp_upper_limit", "linear_clamp_lower_limit", "non_linear_clamp_upper_limit",
              "non_linear_clamp_lower_limit")  # fmt: skip
    blockings = {
        "DownProjOutputGradBlocking": {"block_h": 8},
        "GateUpOutputGradBlocking": {"block_h": 8, "block_b": 2, "block_i": 2},
        "DownWeightGradBlocking": {"block_h": 2, "block_b": 4, "block_i": 8},
        "HiddenGradBlocking": {"block_h": 2, "block_b": 4, "block_i": 8},
        "GateUpWeightGradBlocking": {"block_h": 4, "block_b": 4, "block_i": 4},
    }
    return SimpleNamespace(
        ActFnType=make_enum("ActFnType", _activations(release), home),
        ShardOption=make_enum("ShardOption", _SHARD_2_31 if release >= (2, 31) else _SHARD_2_29, home),
        AffinityOption=make_enum("AffinityOption", {"AFFINITY_ON_H": 0, "AFFINITY_ON_I": 1}, home),
        KernelTypeOption=make_enum("KernelTypeOption", {"DROPPING": 0, "DROPLESS": 1}, home),
        ClampLimits=make_record("ClampLimits", dict.fromkeys(limits), home),
        SkipMode=make_record("SkipMode", {"skip_token": False, "skip_weight": False}, home),
        **{name: make_record(name, values, home) for name, values in blockings.items()},
    )


def mlp_records(release: Release) -> SimpleNamespace:
    """What the 2.31 backward of the MXFP8 MLP takes as records."""
    home = "nkilib.experimental.mlp_mxfp8.mlp_bwd_mxfp8"
    phases = ("recompute_gate", "recompute_up", "phase1_down_proj", "phase2_hidden_grad", "phase3_wgrad",
              "phase4_wgrad")  # fmt: skip
    limits = ("linear_clamp_upper_limit", "linear_clamp_lower_limit", "non_linear_clamp_upper_limit",
              "non_linear_clamp_lower_limit")  # fmt: skip
    if release < (2, 31):
        return SimpleNamespace()
    return SimpleNamespace(
        MlpBwdMatmulConfig=make_record("MlpBwdMatmulConfig", dict.fromkeys(phases), home),
        ClampLimits=make_record("ClampLimits", dict.fromkeys(limits), home),
    )


def pair_records(backward: SimpleNamespace) -> SimpleNamespace:
    """Configuration records of the MXFP8 expert pair; the defaults are those of one dense expert."""
    utils = "nkilib.experimental.mxfp_utils.mxfp8_utils.common_dataclasses"
    home = "nkilib.experimental.moe_mxfp8"
    orientation = make_enum("TensorOrientation", {"F_BY_K": "f_by_k", "K_BY_F": "k_by_f"}, utils)
    swizzle = make_enum("SwizzleMode", {"DGT": "dgt", "DGT_FAST": "dgt_fast", "PE": "pe"}, utils)
    descriptor = make_record(
        "TensorDescriptor", {"data": None, "scales": None, "orientation": None, "quant_scheme": None}, utils
    )
    common = {
        "compute_dtype": DTYPES["bfloat16"], "fp8_x4_dtype": DTYPES["float8_e4m3fn_x4"],
        "activation_type": backward.ActFnType.SiLU, "affinity_option": backward.AffinityOption.AFFINITY_ON_I,
        "single_expert_dense": True, "fast_dma_transpose": False, "clamp_limits": None, "skip_dma": None, "bias": False,
    }  # fmt: skip
    shards = backward.ShardOption.__members__
    forward = {
        **common, "shard_option": shards.get("SHARD_ON_BLOCK"), "gate_up_config": None, "down_config": None,
        "is_tensor_update_accumulating": False, "checkpoint_config": None, "gate_up_weight_td": None,
        "down_weight_td": None, "gate_up_proj_act_td": descriptor(orientation=orientation.F_BY_K),
        "reuse_spilled_weights": True, "use_1x32_pe_swizzle": True,
    }  # fmt: skip
    operands = ("output_grad", "down_weight", "d_gate_up", "gate_up_weight", "d_gate_up_t", "hidden_states_t",
                "output_grad_t", "scaled_intermediate_t")  # fmt: skip
    back = {
        **common, "shard_option": shards.get("SHARD_ON_FREE"), "accumulate_hidden_states_grad": False,
        "skip_grad_initialization": False, "pe_transpose_only": False,
        **{f"phase{number}_config": None for number in range(1, 5)},
        **{f"{name}_swizzle_mode": swizzle.PE for name in operands},
    }  # fmt: skip
    return SimpleNamespace(
        TensorOrientation=orientation,
        SwizzleMode=swizzle,
        TensorDescriptor=descriptor,
        MXFP8MOEFwdConfig=make_record("MXFP8MOEFwdConfig", forward, f"{home}.fwd.config"),
        MXFP8MOEBwdConfig=make_record("MXFP8MOEBwdConfig", back, f"{home}.bwd.config"),
    )


def checkpoint_record(layout: str) -> type[Any]:
    """What the MXFP8 forward saves; a candidate of 2.33 (nki-library e9ef98fc) names the order, DIRECT by default."""
    home = "nkilib.experimental.moe_mxfp8.moe_mxfp8_checkpoint_config"
    made: dict[str, Any] = {"save_gate_up_proj_act": True, "save_scaled_intermediate": True}
    if layout:
        names = dict.fromkeys(("TRANSPOSED", "DIRECT", layout))
        default = make_enum("CheckpointLayout", list(names), home)[layout]
        made |= {"gate_up_proj_act_layout": default, "scaled_intermediate_layout": default}
    return make_record("MXFP8MOECheckpointConfig", made, home)


@dataclass(frozen=True)
class Library:
    """The records of one release."""

    release: Release
    forward: SimpleNamespace
    backward: SimpleNamespace
    mlp: SimpleNamespace
    pair: SimpleNamespace
    whole_pair: SimpleNamespace

    @classmethod
    def of(cls, release: Release) -> Library:
        """Return them; only the pair's may be changed."""
        made = cls._built(release)
        return replace(made, pair=SimpleNamespace(**vars(made.pair)))

    @classmethod
    @functools.cache
    def _built(cls, release: Release) -> Library:
        backward = backward_records(release)
        pair = pair_records(backward)
        return cls(release, forward_records(release), backward, mlp_records(release), pair, pair)


def to_package(value: Any) -> Any:
    """Translate an argument into what this package's kernels take: by the names of types, members and fields."""
    if isinstance(value, KernelTensor):
        return value.data
    if isinstance(value, DType):
        return value.carrier
    if isinstance(value, Enum):
        name = type(value).__name__
        if name == "ShardOption" and "AUTO" in type(value).__members__:
            name = "ShardOption229"
        return getattr(kernels, name)[value.name]
    if is_dataclass(value) and not isinstance(value, type):
        kind = getattr(kernels, type(value).__name__)
        return kind(**{field.name: to_package(getattr(value, field.name)) for field in fields(value)})
    return value
