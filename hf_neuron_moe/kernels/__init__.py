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
    from hf_neuron_moe.kernels.blockwise_mm_bwd import MoEBackward, MoEBiasBackward, blockwise_mm_bwd
    from hf_neuron_moe.kernels.fp8_mul import (
        fp8_division_transpose,
        fp8_mul_backward,
        fp8_mul_forward,
        fp8_silu_backward,
        fp8_silu_forward,
    )
    from hf_neuron_moe.kernels.mlp_mxfp8 import MLPBackward, MLPForward, mlp_backward_mxfp8, mlp_forward_mxfp8
    from hf_neuron_moe.kernels.moe_cte import MoEForward, moe_cte
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
    from hf_neuron_moe.kernels.router_topk import router_topk
    from hf_neuron_moe.kernels.routing import BlockPlan, build_block_plan, count_blocks, expert_mask, masked_affinities

__all__ = [
    "ActFnType",
    "AffinityOption",
    "BlockPlan",
    "BlockShardStrategy",
    "ClampLimits",
    "DownProjOutputGradBlocking",
    "DownWeightGradBlocking",
    "ExpertAffinityScaleMode",
    "GateUpOutputGradBlocking",
    "GateUpWeightGradBlocking",
    "HiddenGradBlocking",
    "KernelTypeOption",
    "MLPBackward",
    "MLPForward",
    "MoEBackward",
    "MoEBiasBackward",
    "MoECTEImplementation",
    "MoECTESpec",
    "MoEForward",
    "QuantizationConfig",
    "QuantizationType",
    "RouterActFnType",
    "ShardOnBlockConfig",
    "ShardOnIConfig",
    "ShardOption",
    "ShardOption229",
    "SkipMode",
    "blockwise_mm_bwd",
    "build_block_plan",
    "count_blocks",
    "expert_mask",
    "fp8_division_transpose",
    "fp8_mul_backward",
    "fp8_mul_forward",
    "fp8_silu_backward",
    "fp8_silu_forward",
    "masked_affinities",
    "mlp_backward_mxfp8",
    "mlp_forward_mxfp8",
    "moe_cte",
    "router_topk",
]

_NAMES = {
    "blockwise_mm_bwd": ("MoEBackward", "MoEBiasBackward", "blockwise_mm_bwd"),
    "fp8_mul": (
        "fp8_division_transpose",
        "fp8_mul_backward",
        "fp8_mul_forward",
        "fp8_silu_backward",
        "fp8_silu_forward",
    ),
    "mlp_mxfp8": ("MLPBackward", "MLPForward", "mlp_backward_mxfp8", "mlp_forward_mxfp8"),
    "moe_cte": ("MoEForward", "moe_cte"),
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
    "router_topk": ("router_topk",),
    "routing": ("BlockPlan", "build_block_plan", "count_blocks", "expert_mask", "masked_affinities"),
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
