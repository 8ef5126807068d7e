"""What each of the seven implementations of ``moe_cte`` takes, and the rules that follow.

Legend: T real tokens, H hidden, I intermediate, N blocks of B slots.

Two kinds of rules. *Always*: combinations that have no defined result, or whose result upstream does not return.
*Device limits*: what the kernels need or get wrong although the mathematics is defined. They hold for what a device can
run (bf16 hidden states) and can be switched with ``device_limits`` or ``limits``. Their figures are data.

Source: nki-library 2.29 ``moe_cte`` kernels; SquaredReLU, non-overlapping shards and STATIC_MX as of 2.31 and 2.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hf_neuron_moe.checks import Rule
from hf_neuron_moe.reference.block_rows import FLOATS
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_types import (
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    QuantizationType,
    ShardOnBlockConfig,
)
from hf_neuron_moe.reference.specification import LIMITS, broken, dtype_name, family, selected

_Impl = MoECTEImplementation
_Mode = ExpertAffinityScaleMode
_PRE = (_Mode.PRE_SCALE, _Mode.PRE_SCALE_DELAYED)
_ROWS = {(column, kind): selected("moe_cte", column, kind.name) for column in LIMITS for kind in _Impl}
MX = frozenset({_Impl.shard_on_block_mx, _Impl.shard_on_i_mx, _Impl.shard_on_i_mx_hybrid})
HYBRID = frozenset({_Impl.shard_on_i_hybrid, _Impl.shard_on_i_mx_hybrid})
BLOCK = frozenset({_Impl.shard_on_block, _Impl.shard_on_block_mx})
CHECKPOINTS = frozenset({_Impl.shard_on_i, _Impl.shard_on_i_dropping})
_READERS: dict[str, list[str]] = family("moe_cte")["readers"]
"""Which implementations read an option of ``ShardOnBlockConfig``."""
_BLOCK_OPTION, _I_OPTION = "spec.shard_on_block.", "spec.shard_on_I."
_MODE, _ON_I = "expert_affinities_scaling_mode", f"{_I_OPTION}expert_affinity_multiply_on_I"
_ON_OUTPUT = "Its kernel multiplies the output by the affinity and ignores or asserts every other place."
_OFF_PAGE = "The page does not document it; limits='kernel' holds a call to the kernel's own limits."
_OFF_DEVICE = "This is a limit of the device kernel; device_limits=False computes the mathematics."


def always(given: Arguments) -> Iterator[Rule]:
    """Rules against what has no defined result."""
    kind, mode, on_i = given.kind, given.expert_affinities_scaling_mode, given.spec.shard_on_I
    without, default = f"False with {kind.name}", f"left at its default with {kind.name}"
    if kind in MX:
        yield Rule(mode is _Mode.POST_SCALE, _MODE, f"POST_SCALE with {kind.name}", mode.name, _ON_OUTPUT)
        yield Rule(not given.on_inner, _ON_I, without, True, _ON_OUTPUT)
        yield Rule(not given.skip_gate_proj, "skip_gate_proj", without, True, "MX kernels have a gate.")
    for name, readers in _READERS.items():  # options that the implementation does not read; upstream ignores them
        value = getattr(given.spec.shard_on_block, name)
        unset = value == getattr(ShardOnBlockConfig, name) or value is QuantizationType.NONE
        fix = f"It is read by {', '.join(readers)}."
        yield Rule(kind.name in readers or unset, _BLOCK_OPTION + name, default, value, fix)
    static, blocks = on_i.num_static_block, given.block_to_expert.numel()
    fix = "Only the hybrids have a static loop before the dynamic one."
    yield Rule(kind in HYBRID or static is None, _I_OPTION + "num_static_block", default, static, fix)
    fits = kind in CHECKPOINTS or not on_i.checkpoint_activation
    fix = "Only shard_on_i and shard_on_i_dropping return activations."
    yield Rule(fits, _I_OPTION + "checkpoint_activation", without, on_i.checkpoint_activation, fix)
    name, fix = "is_tensor_update_accumulating", "The kernel asserts it; accumulating is right for any plan."
    fits = kind is not _Impl.shard_on_block_mx or given.is_tensor_update_accumulating
    yield Rule(fits, name, f"True with {kind.name}", False, fix)
    fits, rule = static is None or 0 <= static <= blocks, f"0 to N = {blocks}"
    yield Rule(fits, _I_OPTION + "num_static_block", rule, static, "None is N - E.")
    if kind in BLOCK:
        yield from _scheduling(given, blocks)


def _scheduling(given: Arguments, blocks: int) -> Iterator[Rule]:
    """Rules of the options that divide the work of the block-sharded kernels; none changes a value."""
    options = given.spec.shard_on_block
    for name in ("n_block_per_iter", "top_k", "ep_degree"):
        value = getattr(options, name)
        yield Rule(value > 0, _BLOCK_OPTION + name, "a positive int", value, "Use 1.")
    fits = options.block_sharding_strategy is not BlockShardStrategy.HI_LO or options.non_overlapping_shards
    fix = "Kernels before 2.31 assert PING_PONG; since then HI_LO needs non_overlapping_shards=True."
    yield Rule(fits, _BLOCK_OPTION + "block_sharding_strategy", "PING_PONG", "HI_LO", fix)
    if given.kind in MX:
        static, dynamic, kind = options.n_static_blocks, options.n_dynamic_blocks, options.quantization_type
        fits = static == -1 or (0 < static < blocks and static + dynamic == blocks)
        rule = f"-1, or between 0 and N = {blocks} with n_static_blocks + n_dynamic_blocks = N"
        yield Rule(fits, _BLOCK_OPTION + "n_static_blocks", rule, f"{static} + {dynamic}", "-1 is automatic.")
        fits = kind in (QuantizationType.NONE, QuantizationType.MX, QuantizationType.STATIC_MX)
        yield Rule(fits, _BLOCK_OPTION + "quantization_type", "MX or STATIC_MX", kind, "Weights here are MX words.")


def device_limits(given: Arguments, sizes: Mapping[str, int]) -> Iterator[Rule]:
    """Rules against what the kernel of this implementation cannot run, or computes wrongly; `sizes` are E and I.

    With ``limits="documented"`` also against what the page does not document. All are in specification/moe_cte.toml.
    """
    values, active = _values(given, sizes), _circumstances(given)
    for column, fix in (("kernel", _OFF_DEVICE), ("documented", _OFF_PAGE)):
        if column == "kernel" or given.limits == column:
            rows = _ROWS[column, given.kind]
            yield from broken(rows, values, fix, active=active, implementation=given.kind.name)


def _values(given: Arguments, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What the constraints are about, by the names in their rows."""
    on_block, hidden = given.spec.shard_on_block, given.hidden_states
    unscaled = given.gate_up_proj_scale is None or "fp8_scales_ignored" in given.upstream_bugs
    found: dict[str, Any] = {
        name: dtype_name(value) for name, value in vars(given).items() if isinstance(value, Tensor)
    }
    return found | {
        "block_size": given.block_size,
        "block_size of the plan": given.block_size,
        "T of hidden_states": given.tokens,
        "H of hidden_states": hidden.shape[1],
        "I of gate_up_proj_weight": sizes["I"],
        "E of gate_up_proj_weight": sizes["E"],
        "activation_function": given.activation_function.name,
        "expert_affinities_scaling_mode": given.expert_affinities_scaling_mode.name,
        _ON_I: given.on_inner,
        "skip_gate_proj": given.skip_gate_proj,
        "skip_dma.skip_weight": given.skip_dma.skip_weight,
        "gate_up_proj_scale": "None" if unscaled else "a scale",
        "accumulation_dtype": dtype_name(given.accumulation_dtype or hidden),
        f"{_BLOCK_OPTION}weight_dtype": str(on_block.weight_dtype).removeprefix("torch."),
    }


def _circumstances(given: Arguments) -> set[str]:
    """The names, in the rows' column `when`, of what this call is."""
    delayed = given.expert_affinities_scaling_mode in _PRE and not given.on_inner
    plain = given.kind not in MX and given.gate_up_proj_weight.dtype in FLOATS
    found = {
        "PRE_SCALE": delayed and "pre_scale_first_tile" not in given.upstream_bugs,
        "affinity not on I": not given.on_inner,
        "plain weights": plain,
        "biases": given.down_proj_bias is not None,
    }
    return {name for name, holds in found.items() if holds}
