"""Enumerations and configuration records of the blockwise MoE kernels, with the documented names and values.

Sources: nki-library 2.29 ``core.moe.moe_cte`` and ``core.utils.common_types``; ``experimental.moe.bwd`` 2.29 for the
backward's options, 2.31 and 2.33 for what came later. The enums keep upstream's member names and numbers.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_flags, check_record, shown
from hf_neuron_moe.errors import ConfigError, naming, nearest, public
from hf_neuron_moe.reference.specification import argument_notes

EnumT = TypeVar("EnumT", bound=Enum)
P = ParamSpec("P")
RecordT = TypeVar("RecordT")
ReturnT = TypeVar("ReturnT")


class ActFnType(Enum):
    """Activation of the gate; ``Swish`` is ``x * sigmoid(1.702 x)`` and not SiLU. SquaredReLU came with 2.33."""

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3
    SquaredReLU = 4


class ExpertAffinityScaleMode(Enum):
    """Where the routing weight multiplies: nowhere, the output, the input, or the input as shard_on_i delays it."""

    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
    PRE_SCALE_DELAYED = 3


class RouterActFnType(Enum):
    """Activation of the router's logits."""

    SIGMOID = 0
    SOFTMAX = 1


class QuantizationType(Enum):
    """What a weight scale means."""

    NONE = 0
    STATIC = 1
    ROW = 2
    MX = 3
    STATIC_MX = 4
    ROW_MX = 5


class MoECTEImplementation(Enum):
    """The seven implementations of ``moe_cte``."""

    shard_on_block = 0
    shard_on_i = 1
    shard_on_i_hybrid = 2
    shard_on_i_dropping = 3
    shard_on_block_mx = 4
    shard_on_i_mx = 5
    shard_on_i_mx_hybrid = 6


class BlockShardStrategy(Enum):
    """How two cores divide the blocks."""

    HI_LO = 0
    PING_PONG = 1


class ShardOption(Enum):
    """What two cores of the backward divide; members and numbers of 2.31 and later."""

    SHARD_ON_FREE = 0
    SHARD_ON_HIDDEN = 1
    SHARD_ON_BLOCK = 2


class ShardOption229(Enum):
    """What two cores of the backward divide; members and numbers of 2.29, which ignores the choice."""

    AUTO = 0
    SHARD_ON_HIDDEN = 1
    SHARD_ON_INTERMEDIATE = 2
    BASELINE_LNC1 = 3


class AffinityOption(Enum):
    """Where the forward multiplied by the routing weight: after the down projection (H) or before it (I)."""

    AFFINITY_ON_H = 0
    AFFINITY_ON_I = 1


class KernelTypeOption(Enum):
    """Which plan the blocks follow."""

    DROPPING = 0
    DROPLESS = 1


def is_number(value: object) -> bool:
    """Return whether `value` can be a clamp limit: an int or a float, no bool and no NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def check_switches(record: Any) -> None:
    """Raise ConfigError for a field of a dataclass that is declared as a bool, or a bool or None, and is none."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type == "bool" or (field.type == "bool | None" and value is not None):
            check_flags({field.name: value})


def as_member(value: object, kind: type[EnumT], *, argument: str) -> EnumT:
    """Return `value`, a member of `kind` or the name of one, as a member; raise ConfigError for anything else."""
    if isinstance(value, kind):
        return value
    names = [member.name for member in kind]
    if isinstance(value, str) and value in names:
        return kind[value]
    fix = f"Pass {kind.__name__}.{names[0]} or another member.{nearest(str(value), names)}"
    raise ConfigError.about(argument, f"a member of {kind.__name__} ({', '.join(names)}) or its name", repr(value), fix)


def missing_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Name all required arguments that a call leaves out; an empty string for a call that is wrong otherwise."""
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return ""
    required = [each.name for each in signature.parameters.values() if each.default is each.empty]
    return f"missing required arguments: {', '.join(repr(name) for name in required if name not in given)}"


def bound(name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of the function `name`, whose name stands in the error of a wrong one."""
    try:
        arguments = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {missing_arguments(signature, args, kwargs) or error}") from None
    arguments.apply_defaults()
    return arguments.arguments


def _annotations(annotations: Mapping[str, Any], form: int) -> dict[str, Any]:
    """Return annotations as Python 3.14 asks for them: their values. From these it makes the other forms itself."""
    if form != 1:  # annotationlib.Format.VALUE
        raise NotImplementedError
    return dict(annotations)


def taking(record: Callable[P, RecordT]) -> Callable[[Callable[[RecordT], ReturnT]], Callable[P, ReturnT]]:
    """Give a function of a record the record's fields as its arguments, with their order, types and defaults.

    Their notes in the specification become the part ``Args`` of its docstring.
    """
    declared = inspect.signature(record)

    def decorate(function: Callable[[RecordT], ReturnT]) -> Callable[P, ReturnT]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> ReturnT:
            bound(function.__name__, declared, args, kwargs)
            return function(record(*args, **kwargs))

        returns = function.__annotations__["return"]
        call.__dict__["__signature__"] = declared.replace(return_annotation=returns)
        hints = get_type_hints(record)
        annotations = {name: hints[name] for name in declared.parameters} | {"return": returns}
        call.__annotations__ = annotations
        if sys.version_info >= (3, 14):  # there this is what functools.wraps copies
            call.__annotate__ = functools.partial(_annotations, annotations)
        notes = argument_notes(function.__name__, declared.parameters)
        fill = textwrap.TextWrapper(116, " " * 4, " " * 8).fill
        lines = [fill(f"{name}: {note}") for name, note in notes.items()]
        # Without indentation, as Python 3.13 and later keep docstrings.
        call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "\nArgs:", *lines])
        return call

    return decorate


class _Checked:
    """A record that checks the types of its switches, counts (whose ranges depend on the call), dtypes and enums."""

    def __post_init__(self) -> None:
        with naming(type(self).__name__):
            check_switches(self)
            for field in fields(self):  # type: ignore[arg-type]
                name, value = field.name, getattr(self, field.name)
                if isinstance(field.default, Enum):  # names become members
                    object.__setattr__(self, name, as_member(value, type(field.default), argument=name))
                elif field.type == "torch.dtype | None":
                    check_record(value, torch.dtype, argument=name)
                elif field.type in ("int", "int | None") and type(value) is not int and value is not field.default:
                    raise ConfigError.about(name, "an int", shown(value), "Pass a count.")


@dataclass(frozen=True)
class SkipMode(_Checked):
    """Which loads of unused slots and repeated experts the kernel skips.

    With `skip_token` unused slots hold -1, and hidden states, affinities and output have no sink row (T' = T).
    `skip_weight` reuses the weights when a core's previous block had the same expert; no effect on values.
    """

    skip_token: bool = False
    skip_weight: bool = False


NO_SKIP = SkipMode()  # the documented default of skip_dma


@dataclass(frozen=True)
class QuantizationConfig:
    """Dequantization scales of the two projections; the direct arguments of 2.30 and later win over it."""

    gate_up_proj_scale: Tensor | None = None
    down_proj_scale: Tensor | None = None


@dataclass(frozen=True)
class ShardOnBlockConfig(_Checked):
    """Options of ``shard_on_block`` and ``shard_on_block_mx``; any that an implementation does not read must be unset.

    Those without a comment schedule work or size static loops and have no effect on values. The MX ones came with 2.31.
    """

    n_block_per_iter: int = 1
    block_sharding_strategy: BlockShardStrategy = BlockShardStrategy.PING_PONG
    n_static_blocks: int = -1
    n_dynamic_blocks: int = 55
    non_overlapping_shards: bool = False
    use_packed_scales: bool = False  # four tiles of MX scale rows per buffer of 128
    # What 32-bit words hold: torch.float8_e4m3fn or torch.float8_e5m2. None means e4m3fn, and e5m2 words read so give
    # wrong numbers without an error: the words themselves cannot tell. 16-bit words are fp4 and take None.
    weight_dtype: torch.dtype | None = None
    top_k: int = 1
    ep_degree: int = 1
    quantization_type: QuantizationType = QuantizationType.MX  # MX or STATIC_MX


@dataclass(frozen=True)
class ShardOnIConfig(_Checked):
    """Options of the implementations that divide the intermediate axis."""

    checkpoint_activation: bool = False  # return the activations the backward needs
    expert_affinity_multiply_on_I: bool = False  # multiply the intermediate by the routing weight, whatever the mode
    num_static_block: int | None = None  # blocks of the hybrid's static loop, no effect on values


@dataclass(frozen=True)
class MoECTESpec:
    """Implementation and its options; a missing configuration is filled with its defaults."""

    implementation: MoECTEImplementation
    shard_on_block: ShardOnBlockConfig = None  # type: ignore[assignment]
    shard_on_I: ShardOnIConfig = None  # type: ignore[assignment]

    @public("MoECTESpec")
    def __post_init__(self) -> None:
        kind = as_member(self.implementation, MoECTEImplementation, argument="implementation")
        object.__setattr__(self, "implementation", kind)
        for name, default in (("shard_on_block", ShardOnBlockConfig), ("shard_on_I", ShardOnIConfig)):
            check_record(getattr(self, name), default, argument=name)
            if getattr(self, name) is None:
                object.__setattr__(self, name, default())


@dataclass(frozen=True)
class ClampLimits:
    """Forward clamp limits as the backward takes them: linear is up, non-linear is gate. Not bounds on gradients."""

    linear_clamp_upper_limit: float | None = None
    linear_clamp_lower_limit: float | None = None
    non_linear_clamp_upper_limit: float | None = None
    non_linear_clamp_lower_limit: float | None = None

    @public("ClampLimits")
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not is_number(value):
                fix = "Pass the limit that the forward clamps to."
                raise ConfigError.about(name, "None or a number", repr(value), fix)
        for branch, (upper, lower) in (("linear", self.up), ("non_linear", self.gate)):
            if upper is not None and lower is not None and upper <= lower:
                expected = f"greater than {branch}_clamp_lower_limit = {lower}"
                raise ConfigError.about(f"{branch}_clamp_upper_limit", expected, upper, "Swap them, or leave one out.")

    @property
    def gate(self) -> tuple[float | None, float | None]:
        """Upper and lower limit of the gate."""
        return self.non_linear_clamp_upper_limit, self.non_linear_clamp_lower_limit

    @property
    def up(self) -> tuple[float | None, float | None]:
        """Upper and lower limit of up."""
        return self.linear_clamp_upper_limit, self.linear_clamp_lower_limit


@dataclass(frozen=True)
class DownProjOutputGradBlocking:
    """Tile counts of the down projection's output gradient. Tuning only."""

    block_h: int = 8


@dataclass(frozen=True)
class GateUpOutputGradBlocking:
    """Tile counts of the gate and up output gradients. Tuning only."""

    block_h: int = 8
    block_b: int = 2
    block_i: int = 2


@dataclass(frozen=True)
class DownWeightGradBlocking:
    """Tile counts of the down projection's weight gradient. Tuning only."""

    block_h: int = 2
    block_b: int = 4
    block_i: int = 8


@dataclass(frozen=True)
class HiddenGradBlocking:
    """Tile counts of the hidden states' gradient. Tuning only."""

    block_h: int = 2
    block_b: int = 4
    block_i: int = 8


@dataclass(frozen=True)
class GateUpWeightGradBlocking:
    """Tile counts of the gate and up weight gradients. Tuning only."""

    block_h: int = 4
    block_b: int = 4
    block_i: int = 4


BLOCKINGS = (
    DownProjOutputGradBlocking,
    GateUpOutputGradBlocking,
    DownWeightGradBlocking,
    HiddenGradBlocking,
    GateUpWeightGradBlocking,
)
