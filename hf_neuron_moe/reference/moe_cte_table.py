"""The kernels behind ``moe_cte`` as a table: their argument orders, other names and other defaults.

A row is everything that a direct kernel of :mod:`hf_neuron_moe.reference.moe_cte_direct` has of its own; types and
defaults that a row does not name are those of ``moe_cte`` and of the option records.

Source: nki-library 2.29 ``core.moe.moe_cte.bwmm_shard_on_{block,I,block_mx,I_mx}`` and
``experimental.moe.forward.bwmm_shard_on_H``. Positions are those of 2.29; what 2.31 and 2.33 inserted is by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import Any, NamedTuple

from torch import Tensor

from hf_neuron_moe.checks import Rule, check_rules, check_shape
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.moe_cte import MoEForward, forward
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_rules import MX
from hf_neuron_moe.reference.moe_types import (
    ExpertAffinityScaleMode as _Mode,
    MoECTEImplementation as _Kind,
    MoECTESpec,
    QuantizationType,
    ShardOnBlockConfig,
    ShardOnIConfig,
    bound,
)

_CONFIGS = (ShardOnBlockConfig, ShardOnIConfig)
_OPTIONS = {kind: [field.name for field in fields(kind)] for kind in _CONFIGS}
# Names of the direct kernels for arguments of moe_cte.
_RENAMED = {"gate_up_hidden_scale": "gate_up_in_scale", "down_hidden_scale": "down_in_scale"}
_CLAIMS = {
    "is_block_quant": Parameter("is_block_quant", Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"),
    "is_per_tensor": Parameter("is_per_tensor", Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"),
    "use_block128_scales": Parameter("use_block128_scales", Parameter.KEYWORD_ONLY, default=False, annotation="bool"),
}
"""Arguments that only repeat what the shape of ``gate_up_proj_scale`` says, and must agree with it."""

_TENSORS = "hidden_states expert_affinities_masked gate_up_proj_weight down_proj_weight"
_PLAN = "token_position_to_id block_to_expert"
_BF16 = f"{_TENSORS} block_size {_PLAN}"
_PROJECTIONS = "gate_and_up_proj_bias down_proj_bias gate_up_proj_scale down_proj_scale"
_BUFFERS = "gate_up_activations_T down_activations"
_DTYPES = "activation_function skip_dma compute_dtype"
_AFFINITY = "is_tensor_update_accumulating expert_affinities_scaling_mode"
_GATE = "gate_clamp_upper_limit gate_clamp_lower_limit"
_CLAMPS = f"{_GATE} up_clamp_lower_limit up_clamp_upper_limit"


class Kernel(NamedTuple):
    """One direct kernel."""

    implementation: _Kind
    text: str  # its docstring
    positional: str  # arguments in order
    keywords: str = ""  # arguments by keyword, before ``convention``
    defaults: Mapping[str, object] = {}  # where they differ; Parameter.empty makes an argument required
    writes: bool = False  # the activations go to the caller's buffers


KERNELS = {
    "bwmm_shard_on_block": Kernel(
        _Kind.shard_on_block,
        "``moe_cte`` with ``shard_on_block``: blocks are divided between two cores. `down_activations` must be None.",
        f"{_BF16} {_PROJECTIONS} down_activations {_DTYPES} {_AFFINITY} n_block_per_iter {_GATE} up_clamp_upper_limit "
        "up_clamp_lower_limit block_sharding_strategy",
    ),
    "blockwise_mm_baseline_shard_intermediate": Kernel(
        _Kind.shard_on_i,
        "``moe_cte`` with ``shard_on_i``; the affinity multiplies the pre-activations by default (PRE_SCALE).",
        f"{_BF16} {_PROJECTIONS} {_DTYPES} {_AFFINITY} {_CLAMPS} checkpoint_activation expert_affinity_multiply_on_I",
        "gate_up_hidden_scale down_hidden_scale is_block_quant is_per_tensor accumulation_dtype skip_gate_proj",
        {"expert_affinities_scaling_mode": _Mode.PRE_SCALE},
    ),
    "blockwise_mm_baseline_shard_intermediate_hybrid": Kernel(
        _Kind.shard_on_i_hybrid,
        "``moe_cte`` with ``shard_on_i_hybrid``: static blocks, then a loop over those with tokens.",
        f"conditions {_BF16} num_static_block {_PROJECTIONS} {_BUFFERS} {_DTYPES} {_AFFINITY} {_CLAMPS}",
        defaults={"conditions": Parameter.empty},
    ),
    "blockwise_mm_shard_intermediate_dropping": Kernel(
        _Kind.shard_on_i_dropping,
        "``moe_cte`` with ``shard_on_i_dropping``: block e is expert e; always returns its activations.",
        # Upstream's default mode is PRE_SCALE, which its kernel does not read: it multiplies the output.
        f"{_BF16} {_PROJECTIONS} {_DTYPES} {_AFFINITY} expert_affinity_multiply_on_I {_CLAMPS}",
    ),
    "blockwise_mm_baseline_shard_hidden": Kernel(
        _Kind.shard_on_i,
        "Training forward that divides H between cores: SiLU, no bias, clamp or quantization (experimental upstream). "
        "Writes `gate_up_activations_T` ``[N, 2, I, B]`` and `down_activations` ``[N, B, H]`` where they are given "
        "and returns those same tensors. Limits are those of ``shard_on_i``.",
        f"{_BF16} {_BUFFERS} skip_dma compute_dtype {_AFFINITY}",
        writes=True,
    ),
    "bwmm_shard_on_block_mx": Kernel(
        _Kind.shard_on_block_mx,
        "``moe_cte`` with ``shard_on_block_mx``. `block_size` is required; ``quantization_type=NONE`` means MX.",
        f"{_TENSORS} {_PLAN} conditions {_PROJECTIONS} block_size n_static_blocks n_dynamic_blocks {_BUFFERS} "
        f"{_DTYPES} weight_dtype {_AFFINITY} {_CLAMPS}",
        "top_k ep_degree use_packed_scales quantization_type gate_up_in_scale down_in_scale accumulation_dtype",
        {"block_size": None, "quantization_type": QuantizationType.NONE},
    ),
    "blockwise_mm_shard_intermediate_mx": Kernel(
        _Kind.shard_on_i_mx,
        "``moe_cte`` with ``shard_on_i_mx``. The default PRE_SCALE is an error, as upstream asserts: pass POST_SCALE.",
        f"{_TENSORS} {_PLAN} {_PROJECTIONS} block_size {_DTYPES} weight_dtype {_AFFINITY} {_CLAMPS} "
        "use_block128_scales",
        "accumulation_dtype",
        {"block_size": None, "expert_affinities_scaling_mode": _Mode.PRE_SCALE},
    ),
    "blockwise_mm_shard_intermediate_mx_hybrid": Kernel(
        _Kind.shard_on_i_mx_hybrid,
        "``moe_cte`` with ``shard_on_i_mx_hybrid``: static blocks, then a loop over those with tokens.",
        f"conditions {_TENSORS} {_PLAN} {_PROJECTIONS} block_size num_static_block {_DTYPES} "
        f"weight_dtype {_AFFINITY} {_CLAMPS}",
        "accumulation_dtype",
        {"conditions": Parameter.empty, "block_size": None},
    ),
}


def signature_of(kernel: Kernel) -> inspect.Signature:
    """Return a kernel's signature; types and defaults come from the records unless its row has others."""
    known = dict(_CLAIMS)
    for record in (Arguments, *_CONFIGS):
        known |= inspect.signature(record).parameters
    ending = "convention device_limits limits execute accumulation upstream_bugs" + (
        " mx_scale_rule" if kernel.implementation in MX else ""
    )
    parameters = []
    for names, kind in (
        (kernel.positional, Parameter.POSITIONAL_OR_KEYWORD),
        (f"{kernel.keywords} {ending}", Parameter.KEYWORD_ONLY),
    ):
        for name in names.split():
            declared = known[_RENAMED.get(name, name)]
            default = kernel.defaults.get(name, declared.default)
            annotation = declared.annotation
            if default is None and "None" not in str(annotation):
                annotation = f"{annotation} | None"
            parameters.append(declared.replace(name=name, kind=kind, default=default, annotation=annotation))
    return inspect.Signature(parameters, return_annotation="MoEForward")


def direct(name: str, module: str) -> Callable[..., MoEForward]:
    """Return the kernel `name` as a function of `module`."""
    kernel = KERNELS[name]
    signature = signature_of(kernel)

    def call(*args: object, **kwargs: object) -> MoEForward:
        return _run(kernel, bound(name, signature, args, kwargs))

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = module, kernel.text
    call.__dict__["__signature__"] = signature
    return public(call)


def _run(kernel: Kernel, given: dict[str, Any]) -> MoEForward:
    """Check and compute a call, by ``moe_cte``."""
    scale = given.get("gate_up_proj_scale")
    check_rules(_claim(claim, given.pop(claim), scale) for claim in _CLAIMS if claim in given)
    given = {_RENAMED.get(name, name): value for name, value in given.items()}
    buffers: dict[str, Tensor | None] = {}
    if kernel.writes:
        buffers = {name: given.pop(name) for name in _BUFFERS.split()}
        given["checkpoint_activation"] = any(buffer is not None for buffer in buffers.values())
    on_block, on_i = ({name: given.pop(name) for name in _OPTIONS[kind] if name in given} for kind in _CONFIGS)
    spec = MoECTESpec(kernel.implementation, ShardOnBlockConfig(**on_block), ShardOnIConfig(**on_i))
    result = forward(Arguments(spec=spec, **given), shard_hidden=kernel.writes)
    for name, buffer in buffers.items():
        if buffer is not None:
            values = getattr(result, name)
            check_shape(buffer, tuple(values.shape), "the activations", name)
            buffer.copy_(values)
    return MoEForward(result.output, *buffers.values()) if kernel.writes else result


def _claim(name: str, claimed: object, scale: object) -> Rule:
    """A claim on the shape of the gate and up scale: ``[E, H/256, 2, I/256, 128]``, ``[E, 2, 1]``, four block rows."""
    shape = tuple(scale.shape) if isinstance(scale, Tensor) else ()
    fix = "Leave it out, or pass scales of the other kind."
    if name == "use_block128_scales":
        fix = "One scale byte per 128 x 128 block has four rows, one per group of 8 partitions sixteen."
    found = {
        "is_block_quant": len(shape) == 5,
        "is_per_tensor": len(shape) == 3 and shape[1] * shape[2] == 2,
        "use_block128_scales": len(shape) > 1 and shape[1] == 4,
    }[name]
    holds = claimed is found or (claimed is None and name != "use_block128_scales")
    return Rule(holds, name, f"{found}, as the shape of gate_up_proj_scale says", claimed, fix)
