"""What each of the seven implementations of ``moe_cte`` takes, and the refusals that follow.

Legend: T real tokens, H hidden, I intermediate, N blocks of B slots.

Two kinds of rules. *Always*: combinations that have no defined result, or whose result upstream does not return.
*Device limits*: what the kernels need or get wrong although the mathematics is defined; they hold for what a device
can run (bf16 hidden states) and can be switched with ``device_limits``.

Source: nki-library 2.29 ``moe_cte`` kernels; SquaredReLU, non-overlapping shards and STATIC_MX as of 2.31 and 2.33.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationType,
    ShardOnBlockConfig,
    SkipMode,
)

_Impl = MoECTEImplementation
_Mode = ExpertAffinityScaleMode
_PRE = (_Mode.PRE_SCALE, _Mode.PRE_SCALE_DELAYED)
BF16_ACTIVATIONS = frozenset({ActFnType.SiLU, ActFnType.Swish, ActFnType.SquaredReLU})
MX_ACTIVATIONS = frozenset(ActFnType) - {ActFnType.SquaredReLU}
_PRE_SCALE_TOKENS = 512
"""Tokens of one PSUM tile; shard_on_i reads the affinities of the first tile for all of them."""


@dataclass(frozen=True)
class Rules:
    """Device limits of one implementation.

    Attributes:
        block: B is a multiple of this.
        inner: I is a multiple of this.
        modes: affinity scaling modes.
        on_inner: whether multiply-on-I exists.
        fp8: whether FP8 scales are used.
        skip_weight: whether weights can be reused between blocks.
        max_hidden: largest H; the smallest is 512.
    """

    block: int
    inner: int
    modes: Set[ExpertAffinityScaleMode]
    on_inner: bool = False
    fp8: bool = False
    skip_weight: bool = False
    max_hidden: int | None = 8192


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
CONDITION_TAILS = {
    _Impl.shard_on_block_mx: (2,),
    _Impl.shard_on_i_hybrid: (1, 2),
    _Impl.shard_on_i_mx_hybrid: (1, 2),
}
"""Zeros after the N block flags of ``conditions``; a second one is harmless to the I-sharded loops."""


@dataclass(frozen=True)
class Choices:
    """The options the rules speak of, resolved."""

    spec: MoECTESpec
    activation: ActFnType
    mode: ExpertAffinityScaleMode
    skip: SkipMode
    accumulating: bool
    fp8_scales: bool
    skip_gate: bool

    @property
    def on_inner(self) -> bool:
        """Whether the intermediate is multiplied by the affinity."""
        return self.spec.shard_on_I.expert_affinity_multiply_on_I


@dataclass(frozen=True)
class Sizes:
    """T, H, I, B, N of a call."""

    tokens: int
    hidden: int
    inner: int
    block: int
    blocks: int


def check_always(choices: Choices, sizes: Sizes) -> None:
    """Refuse what has no defined result.

    Raises:
        ConfigError: an option that the implementation does not have.
    """
    spec, kind = choices.spec, choices.spec.implementation
    name = kind.name
    if kind in MX:
        post = choices.mode is _Mode.POST_SCALE
        _need(post, "expert_affinities_scaling_mode", f"POST_SCALE with {name}", choices.mode.name, _ON_OUTPUT)
        _need(
            not choices.on_inner,
            "spec.shard_on_I.expert_affinity_multiply_on_I",
            f"False with {name}",
            True,
            _ON_OUTPUT,
        )
        _need(not choices.skip_gate, "skip_gate_proj", f"False with {name}", True, "MX kernels have a gate.")
    _check_unread(choices)
    if kind not in CHECKPOINTS:
        wanted = spec.shard_on_I.checkpoint_activation
        remedy = "Only shard_on_i and shard_on_i_dropping return activations."
        _need(not wanted, "spec.shard_on_I.checkpoint_activation", f"False with {name}", wanted, remedy)
    if kind is _Impl.shard_on_block_mx:
        remedy = "The kernel asserts it; accumulating is right for any plan."
        _need(choices.accumulating, "is_tensor_update_accumulating", f"True with {name}", False, remedy)
    _check_scheduling(choices, sizes)


def check_device_limits(choices: Choices, sizes: Sizes) -> None:
    """Refuse what the kernel of this implementation cannot run, or computes wrongly.

    Raises:
        ShapeError: T, H, I or B breaks a limit.
        ConfigError: an option does.
    """
    kind = choices.spec.implementation
    rules, name = RULES[kind], kind.name
    _multiple(sizes.block, rules.block, "block_size of the plan", f"{name}'s row tiles")
    _multiple(sizes.hidden, 512, "H of hidden_states", f"{name}'s tiles along H")
    if rules.max_hidden is not None and sizes.hidden > rules.max_hidden:
        raise _size("H of hidden_states", f"512 to {rules.max_hidden} ({name})", sizes.hidden)
    inner_step = 512 if kind is _Impl.shard_on_block_mx and sizes.inner >= 512 else rules.inner
    _multiple(sizes.inner, inner_step, "I of gate_up_proj_weight", f"{name}'s tiles along I")
    if kind is _Impl.shard_on_block:
        _multiple(sizes.tokens, 128, "T of hidden_states", "its last reduction covers whole tiles of rows")
    allowed = MX_ACTIVATIONS if kind in MX else BF16_ACTIVATIONS
    _need(
        choices.activation in allowed,
        "activation_function",
        f"one of {', '.join(sorted(a.name for a in allowed))} with {name}",
        choices.activation.name,
        "The kernel leaves its buffer unwritten for others; in fp32 they are computed.",
    )
    _check_affinity_limits(choices, rules, sizes)
    fits = not choices.skip_gate or kind is _Impl.shard_on_i
    _need(fits, "skip_gate_proj", f"False with {name}", True, "Only shard_on_i has it (2.33).")
    _need(
        rules.fp8 or not choices.fp8_scales or kind in MX,
        "gate_up_proj_scale",
        f"None with {name}",
        "a scale",
        "This kernel accepts FP8 scales and ignores them; use shard_on_i or shard_on_i_hybrid.",
    )
    _need(
        rules.skip_weight or not choices.skip.skip_weight,
        "skip_dma.skip_weight",
        f"False with {name}",
        True,
        "Only the block-sharded kernels reuse weights; it has no effect on values.",
    )


_BLOCK_MX = frozenset({_Impl.shard_on_block_mx})
_READERS: dict[str, Set[MoECTEImplementation]] = {
    "n_block_per_iter": BLOCK,
    "block_sharding_strategy": frozenset({_Impl.shard_on_block}),
    "n_static_blocks": _BLOCK_MX,
    "n_dynamic_blocks": _BLOCK_MX,
    "non_overlapping_shards": frozenset({_Impl.shard_on_block}),
    "use_packed_scales": _BLOCK_MX,
    "weight_dtype": MX,
    "top_k": BLOCK,
    "ep_degree": BLOCK,
    "quantization_type": _BLOCK_MX,
}
"""Which implementations read an option of ``ShardOnBlockConfig``."""


def _check_unread(choices: Choices) -> None:
    """Refuse options that the implementation does not read; upstream ignores them silently."""
    spec, kind = choices.spec, choices.spec.implementation
    defaults, rule = ShardOnBlockConfig(), f"left at its default with {kind.name}"
    for name, readers in _READERS.items():
        given = getattr(spec.shard_on_block, name)
        same = given == getattr(defaults, name) or given is QuantizationType.NONE
        names = ", ".join(sorted(reader.name for reader in readers))
        _need(kind in readers or same, f"spec.shard_on_block.{name}", rule, given, f"It is read by {names}.")
    static = spec.shard_on_I.num_static_block
    remedy = "Only the hybrids have a static loop before the dynamic one."
    _need(kind in HYBRID or static is None, "spec.shard_on_I.num_static_block", rule, static, remedy)


def _check_affinity_limits(choices: Choices, rules: Rules, sizes: Sizes) -> None:
    name = choices.spec.implementation.name
    _need(
        choices.mode in rules.modes or choices.on_inner,
        "expert_affinities_scaling_mode",
        f"one of {', '.join(sorted(mode.name for mode in rules.modes))} with {name}",
        choices.mode.name,
        "The kernel has no other.",
    )
    _need(
        rules.on_inner or not choices.on_inner,
        "spec.shard_on_I.expert_affinity_multiply_on_I",
        f"False with {name}",
        True,
        _ON_OUTPUT,
    )
    reads_one_tile = choices.spec.implementation in (_Impl.shard_on_i, _Impl.shard_on_i_hybrid)
    if reads_one_tile and choices.mode in _PRE and not choices.on_inner and sizes.block > _PRE_SCALE_TOKENS:
        expected = f"at most {_PRE_SCALE_TOKENS} with PRE_SCALE and {name}"
        raise _size("block_size", f"{expected} (it reuses the first 512 affinities)", sizes.block)


def _check_scheduling(choices: Choices, sizes: Sizes) -> None:
    """Check the options that divide the work; none changes a value."""
    spec, kind, block = choices.spec, choices.spec.implementation, choices.spec.shard_on_block
    if kind in HYBRID and spec.shard_on_I.num_static_block is not None:
        static = spec.shard_on_I.num_static_block
        fits = 0 <= static <= sizes.blocks
        _need(fits, "spec.shard_on_I.num_static_block", f"0 to N = {sizes.blocks}", static, "None is N - E.")
    if kind not in BLOCK:
        return
    for name in ("n_block_per_iter", "top_k", "ep_degree"):
        value = getattr(block, name)
        _need(value > 0, f"spec.shard_on_block.{name}", "a positive int", value, "Use 1.")
    halves = block.block_sharding_strategy is BlockShardStrategy.HI_LO
    remedy = "Kernels before 2.31 assert PING_PONG; since then HI_LO needs non_overlapping_shards=True."
    fits = not halves or block.non_overlapping_shards
    _need(fits, "spec.shard_on_block.block_sharding_strategy", "PING_PONG", "HI_LO", remedy)
    if kind is _Impl.shard_on_block_mx:
        static, dynamic, blocks = block.n_static_blocks, block.n_dynamic_blocks, sizes.blocks
        fits = static == -1 or (0 < static < blocks and static + dynamic == blocks)
        rule = f"-1, or between 0 and N = {blocks} with n_static_blocks + n_dynamic_blocks = N"
        _need(fits, "spec.shard_on_block.n_static_blocks", rule, f"{static} + {dynamic}", "-1 is automatic.")
        allowed = (QuantizationType.NONE, QuantizationType.MX, QuantizationType.STATIC_MX)
        fits = block.quantization_type in allowed
        rule, got = "MX or STATIC_MX", block.quantization_type
        _need(fits, "spec.shard_on_block.quantization_type", rule, got, "Weights here are MX words.")


_ON_OUTPUT = "Its kernel multiplies the output by the affinity and ignores or asserts every other place."


def _need(condition: bool, argument: str, expected: str, got: object, remedy: str) -> None:
    if not condition:
        raise ConfigError.about(argument, expected, got, remedy)


def _multiple(size: int, of: int, argument: str, rule: str) -> None:
    if size <= 0 or size % of:
        raise _size(argument, f"a positive multiple of {of} ({rule})", size)


def _size(argument: str, expected: str, got: int) -> ShapeError:
    remedy = "This is a limit of the device kernel; device_limits=False computes the mathematics."
    return ShapeError.about(argument, expected, str(got), remedy)
