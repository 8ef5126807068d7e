"""What each of the seven implementations of ``moe_cte`` takes, and the rules that follow.

Legend: T real tokens, H hidden, I intermediate, N blocks of B slots.

Two kinds of rules. *Always*: combinations that have no defined result, or whose result upstream does not return.
*Device limits*: what the kernels need or get wrong although the mathematics is defined; they hold for what a device
can run (bf16 hidden states) and can be switched with ``device_limits``.

Source: nki-library 2.29 ``moe_cte`` kernels; SquaredReLU, non-overlapping shards and STATIC_MX as of 2.31 and 2.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from hf_neuron_moe.checks import Rule
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    QuantizationType,
    ShardOnBlockConfig,
)

_Impl = MoECTEImplementation
_Mode = ExpertAffinityScaleMode
_PRE = (_Mode.PRE_SCALE, _Mode.PRE_SCALE_DELAYED)
BF16_ACTIVATIONS = frozenset({ActFnType.SiLU, ActFnType.Swish, ActFnType.SquaredReLU})
MX_ACTIVATIONS = frozenset(ActFnType) - {ActFnType.SquaredReLU}
_PRE_SCALE_TOKENS = 512  # of one PSUM tile; shard_on_i reads the affinities of the first tile for all of them


@dataclass(frozen=True)
class Rules:
    """Device limits of one implementation."""

    block: int  # B is a multiple of this
    inner: int  # I is a multiple of this
    modes: Set[ExpertAffinityScaleMode]  # affinity scaling modes
    on_inner: bool = False  # whether multiply-on-I exists
    fp8: bool = False  # whether FP8 scales are used
    skip_weight: bool = False  # whether weights can be reused between blocks
    max_hidden: int | None = 8192  # largest H; the smallest is 512


_POST_PRE_NO = frozenset({_Mode.POST_SCALE, _Mode.PRE_SCALE, _Mode.NO_SCALE})
_POST = frozenset({_Mode.POST_SCALE})
RULES = {
    _Impl.shard_on_block: Rules(128, 16, _POST_PRE_NO, skip_weight=True),
    _Impl.shard_on_i: Rules(256, 16, frozenset(_Mode), on_inner=True, fp8=True),
    _Impl.shard_on_i_hybrid: Rules(256, 16, _POST_PRE_NO, fp8=True),
    _Impl.shard_on_i_dropping: Rules(1024, 16, _POST, on_inner=True),
    _Impl.shard_on_block_mx: Rules(128, 32, _POST, skip_weight=True),
    _Impl.shard_on_i_mx: Rules(256, 1024, _POST, max_hidden=None),
    _Impl.shard_on_i_mx_hybrid: Rules(256, 1024, _POST, max_hidden=None),
}
MX = frozenset({_Impl.shard_on_block_mx, _Impl.shard_on_i_mx, _Impl.shard_on_i_mx_hybrid})
HYBRID = frozenset({_Impl.shard_on_i_hybrid, _Impl.shard_on_i_mx_hybrid})
BLOCK = frozenset({_Impl.shard_on_block, _Impl.shard_on_block_mx})
CHECKPOINTS = frozenset({_Impl.shard_on_i, _Impl.shard_on_i_dropping})
_READERS: dict[str, Set[MoECTEImplementation]] = {
    "n_block_per_iter": BLOCK,
    "block_sharding_strategy": BLOCK - MX,
    "n_static_blocks": BLOCK & MX,
    "n_dynamic_blocks": BLOCK & MX,
    "non_overlapping_shards": BLOCK - MX,
    "use_packed_scales": BLOCK & MX,
    "weight_dtype": MX,
    "top_k": BLOCK,
    "ep_degree": BLOCK,
    "quantization_type": BLOCK & MX,
}
"""Which implementations read an option of ``ShardOnBlockConfig``."""
_BLOCK_OPTION, _I_OPTION = "spec.shard_on_block.", "spec.shard_on_I."
_MODE, _ON_I = "expert_affinities_scaling_mode", f"{_I_OPTION}expert_affinity_multiply_on_I"
_ON_OUTPUT = "Its kernel multiplies the output by the affinity and ignores or asserts every other place."
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
        names = ", ".join(sorted(reader.name for reader in readers))
        yield Rule(kind in readers or unset, _BLOCK_OPTION + name, default, value, f"It is read by {names}.")
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


def device_limits(given: Arguments, inner: int) -> Iterator[Rule]:
    """Rules against what the kernel of this implementation cannot run, or computes wrongly."""
    kind, name, rules, block = given.kind, given.kind.name, RULES[given.kind], given.block_size
    without, hidden = f"False with {name}", given.hidden_states.shape[1]
    yield _multiple(block, rules.block, "block_size of the plan", f"{name}'s row tiles")
    yield _multiple(hidden, 512, "H of hidden_states", f"{name}'s tiles along H")
    fits = rules.max_hidden is None or hidden <= rules.max_hidden
    yield _size(fits, "H of hidden_states", f"512 to {rules.max_hidden} ({name})", hidden)
    step = 512 if kind is _Impl.shard_on_block_mx and inner >= 512 else rules.inner
    yield _multiple(inner, step, "I of gate_up_proj_weight", f"{name}'s tiles along I")
    if kind is _Impl.shard_on_block:
        yield _multiple(given.tokens, 128, "T of hidden_states", "its last reduction covers whole tiles of rows")
    activation, allowed = given.activation_function, MX_ACTIVATIONS if kind in MX else BF16_ACTIVATIONS
    rule = f"one of {', '.join(sorted(each.name for each in allowed))} with {name}"
    fix = "The kernel leaves its buffer unwritten for others; in fp32 they are computed."
    yield Rule(activation in allowed, "activation_function", rule, activation.name, fix)
    mode = given.expert_affinities_scaling_mode
    rule = f"one of {', '.join(sorted(each.name for each in rules.modes))} with {name}"
    yield Rule(mode in rules.modes or given.on_inner, _MODE, rule, mode.name, "The kernel has no other.")
    yield Rule(rules.on_inner or not given.on_inner, _ON_I, without, True, _ON_OUTPUT)
    if kind in (_Impl.shard_on_i, _Impl.shard_on_i_hybrid) and mode in _PRE and not given.on_inner:
        rule = f"at most {_PRE_SCALE_TOKENS} with PRE_SCALE and {name} (it reuses the first 512 affinities)"
        fits = block <= _PRE_SCALE_TOKENS or "pre_scale_first_tile" in given.upstream_bugs
        yield _size(fits, "block_size", rule, block)
    fits = not given.skip_gate_proj or kind is _Impl.shard_on_i
    yield Rule(fits, "skip_gate_proj", without, True, "Only shard_on_i has it (2.33).")
    fits = rules.fp8 or given.gate_up_proj_scale is None or kind in MX or "fp8_scales_ignored" in given.upstream_bugs
    fix = "This kernel accepts FP8 scales and ignores them; use shard_on_i or shard_on_i_hybrid."
    yield Rule(fits, "gate_up_proj_scale", f"None with {name}", "a scale", fix)
    fix = "Only the block-sharded kernels reuse weights; it has no effect on values."
    yield Rule(rules.skip_weight or not given.skip_dma.skip_weight, "skip_dma.skip_weight", without, True, fix)


def _multiple(size: int, of: int, argument: str, rule: str) -> Rule:
    return _size(size > 0 and size % of == 0, argument, f"a positive multiple of {of} ({rule})", size)


def _size(fits: bool, argument: str, expected: str, got: int) -> Rule:
    return Rule(fits, argument, expected, got, _OFF_DEVICE, ShapeError)
