"""What ``blockwise_mm_bwd`` accepts: operands, options, and what each release's device kernel takes.

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_same_device, check_shape, shown
from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.reference.moe_types import (
    BLOCKINGS,
    ActFnType,
    AffinityOption,
    ClampLimits,
    KernelTypeOption,
    ShardOption,
    ShardOption229,
    as_member,
)

FLOATS = (torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
RELEASES = ("2.29", "2.31")
_BLOCK_SIZES = {"2.29": (128, 256, 512, 1024), "2.31": (128, 256, 512, 1024, 2048, 4096)}
_ACTIVATIONS = {
    "2.29": (ActFnType.SiLU, ActFnType.Swish),
    "2.31": (ActFnType.SiLU, ActFnType.Swish, ActFnType.SquaredReLU),
}
_CORES = 2
_OPTIONAL = ("down_proj_act_checkpoint", "down_proj_bias")


@dataclass(frozen=True)
class Operands:
    """The tensors that forward and backward share, and the backward's own."""

    hidden_states: Tensor
    expert_affinities_masked: Tensor
    gate_up_proj_weight: Tensor
    down_proj_weight: Tensor
    gate_up_proj_act_checkpoint_T: Tensor
    down_proj_act_checkpoint: Tensor | None
    token_position_to_id: Tensor
    block_to_expert: Tensor
    output_hidden_states_grad: Tensor
    down_proj_bias: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The checked options; `later` names the arguments given that 2.29 does not have."""

    block_size: int
    shard: ShardOption | ShardOption229
    affinity: AffinityOption
    kernel_type: KernelTypeOption
    activation: ActFnType
    clamp_limits: ClampLimits
    skip_token: bool
    later: tuple[str, ...]


def check_operands(operands: Operands, block_size: int) -> None:
    """Refuse operands whose dtypes, shapes or devices do not fit each other.

    Raises:
        DTypeError, ShapeError, DeviceError: otherwise.
    """
    given = {name: tensor for name, tensor in vars(operands).items() if tensor is not None or name not in _OPTIONAL}
    for name, tensor in given.items():
        kinds = INTEGERS if name in ("token_position_to_id", "block_to_expert") else FLOATS
        check_dtype(tensor, kinds, argument=name)
    check_dtype(operands.down_proj_weight, (operands.gate_up_proj_weight.dtype,), argument="down_proj_weight")
    check_same_device(given)
    check_shape(operands.hidden_states, (None, None), "[T', H]", argument="hidden_states")
    rows, hidden = operands.hidden_states.shape
    weight = operands.gate_up_proj_weight
    check_shape(weight, (None, hidden, 2, None), "[E, H, 2, I]", argument="gate_up_proj_weight")
    experts, inner, blocks = weight.shape[0], weight.shape[3], operands.block_to_expert.numel()
    shapes: dict[str, tuple[tuple[int | None, ...], str]] = {
        "down_proj_weight": ((experts, inner, hidden), "[E, I, H]"),
        "expert_affinities_masked": ((rows * experts, 1), "[T' * E, 1]"),
        "gate_up_proj_act_checkpoint_T": ((blocks, 2, inner, block_size), "[N, 2, I, B]"),
        "output_hidden_states_grad": ((rows, hidden), "[T', H]"),
        "down_proj_act_checkpoint": ((blocks, block_size, hidden), "[N, B, H]"),
        "down_proj_bias": ((experts, hidden), "[E, H]"),
    }
    slots = operands.token_position_to_id.numel()
    if slots != blocks * block_size:
        raise ShapeError.about(
            "token_position_to_id",
            f"of size N * block_size = {blocks * block_size}",
            str(slots),
            "Use build_block_plan.",
        )
    for name, (shape, words) in shapes.items():
        if name in given:
            check_shape(given[name], shape, words, argument=name)


def check_block_size(block_size: int, block_tile_size: int | None) -> None:
    """Refuse sizes that are no positive ints, and tiles that do not divide the block.

    Raises:
        ShapeError: otherwise.
    """
    for name, value in (("block_size", block_size), ("block_tile_size", block_tile_size)):
        if (value is not None or name == "block_size") and (type(value) is not int or value <= 0):
            raise ShapeError.about(name, "a positive int", repr(value), "Pass the block size the plan was made with.")
    if block_tile_size is not None and block_size % block_tile_size:
        raise ShapeError.about(
            "block_tile_size",
            f"a divisor of block_size = {block_size}",
            str(block_tile_size),
            "It only tiles the block on the device; leave it None.",
        )


def check_blocking(value: object) -> None:
    """Refuse `blocking_params` that hold anything but the blocking records, singly or in a tuple, list or dict.

    Raises:
        ConfigError: otherwise, or if a tile count is no positive int.
    """
    held = value if isinstance(value, list | tuple) else [value]
    held = list(value.values()) if isinstance(value, dict) else held
    counts = [count for item in held if isinstance(item, BLOCKINGS) for count in vars(item).values()]
    known = all(item is None or isinstance(item, BLOCKINGS) for item in held)
    if not known or any(type(count) is not int or count <= 0 for count in counts):
        raise ConfigError.about(
            "blocking_params",
            f"None or made of {', '.join(kind.__name__ for kind in BLOCKINGS)} with positive counts",
            shown(value),
            "It only tiles the matmuls on the device; leave it None.",
        )


def shard_option(value: object) -> ShardOption | ShardOption229:
    """Return a shard option of either generation; a name that both have is the newer one's.

    Raises:
        ConfigError: it is none.
    """
    older = ShardOption229.__members__.keys() - ShardOption.__members__.keys()
    if isinstance(value, ShardOption229) or (isinstance(value, str) and value in older):
        return as_member(value, ShardOption229, argument="shard_option")
    return as_member(value, ShardOption, argument="shard_option")


def check_dropping_plan(block_to_expert: Tensor, experts: int) -> None:
    """Refuse a dropping plan that is not one block per expert, in order.

    Raises:
        ShapeError: otherwise.
    """
    owners = block_to_expert.reshape(-1)
    if owners.numel() != experts or not bool((owners == torch.arange(experts, device=owners.device)).all()):
        raise ShapeError.about(
            "block_to_expert",
            f"0..{experts - 1} with kernel_type_option DROPPING (block e is expert e)",
            str(owners.tolist()),
            "Use build_dropping_plan, or KernelTypeOption.DROPLESS.",
        )


def check_device_limits(operands: Operands, options: Options, release: str | None) -> None:
    """Refuse what no release's device kernel takes (or what `release` does not take).

    Raises:
        ConfigError, ShapeError: naming the argument and the rule of `release`, or of the newest one.
    """
    if release not in (None, *RELEASES):
        raise ConfigError.about(
            "release", f"None or one of {', '.join(RELEASES)}", repr(release), "2.31 stands for the later ones too."
        )
    if operands.gate_up_proj_act_checkpoint_T.dtype == torch.bfloat16:
        check_bf16_limits(options.clamp_limits)
    broken = [_broken_rule(operands, options, name) for name in (RELEASES if release is None else (release,))]
    if None in broken:
        return
    kind, argument, expected, got = next(rule for rule in reversed(broken) if rule is not None)
    raise kind.about(
        argument,
        f"{expected} (device limit of nki-library {release or RELEASES[-1]})",
        got,
        "Change it, or pass device_limits=False for the mathematical definition.",
    )


def check_bf16_limits(limits: ClampLimits) -> None:
    """Refuse clamp limits that bf16 does not hold.

    The masks compare bf16 checkpoints with the limits. A value clamped to 0.7 is kept as 0.69921875, which would count
    as inside and get a gradient; so forward and backward have to use the rounded limit.

    Raises:
        ConfigError: naming the limit and its bf16 value.
    """
    for name, limit in vars(limits).items():
        rounded = limit if limit is None else float(torch.tensor(limit, dtype=torch.bfloat16))
        if rounded != limit:
            raise ConfigError.about(
                f"clamp_limits.{name}",
                "a bf16 number (pre-activations are kept in bf16, and clamped ones must equal the limit)",
                repr(limit),
                f"Use the bf16 value of the limit, {rounded}, in forward and backward.",
            )


_Rule = tuple[type[ConfigError] | type[ShapeError], str, str, str]


def _broken_rule(operands: Operands, options: Options, release: str) -> _Rule | None:
    """Return the first documented rule of `release` that the call breaks."""
    return _broken_size(operands, options, release) or _broken_option(options, release)


def _broken_option(options: Options, release: str) -> _Rule | None:
    shard, on_hidden = options.shard.name, options.affinity is AffinityOption.AFFINITY_ON_H
    old = release == "2.29"
    members = ShardOption229 if old else ShardOption
    if options.kernel_type is KernelTypeOption.DROPPING:
        return ConfigError, "kernel_type_option", "DROPLESS (no release's kernel has dropping)", "DROPPING"
    if shard not in members.__members__:
        return ConfigError, "shard_option", f"one of {', '.join(members.__members__)}", shard
    if old and not on_hidden:
        return ConfigError, "affinity_option", "AFFINITY_ON_H (AFFINITY_ON_I is ignored)", options.affinity.name
    if old and options.later:
        return ConfigError, options.later[0], "left out (it came with a later release)", "a value"
    if not old and on_hidden and shard == "SHARD_ON_HIDDEN":
        rule = "SHARD_ON_FREE or SHARD_ON_BLOCK with AFFINITY_ON_H"
        return ConfigError, "shard_option", rule, "SHARD_ON_HIDDEN, the default"
    if options.activation not in _ACTIVATIONS[release]:
        names = ", ".join(kind.name for kind in _ACTIVATIONS[release])
        return ConfigError, "activation_type", f"one of {names}", options.activation.name
    return None


def _broken_size(operands: Operands, options: Options, release: str) -> _Rule | None:
    if options.block_size not in _BLOCK_SIZES[release]:
        return ShapeError, "block_size", f"one of {_BLOCK_SIZES[release]}", str(options.block_size)
    step = 32 * _CORES
    hidden, inner = operands.hidden_states.shape[1], operands.gate_up_proj_weight.shape[3]
    if hidden % step:
        return ShapeError, "H of hidden_states", f"a multiple of {step} (32 per core)", str(hidden)
    small_block = release != "2.29" and options.block_size == 128
    if inner % 2 or (inner % step and not small_block):
        rule = f"a multiple of {step} (32 per core), or even with block_size 128 from 2.31 on"
        return ShapeError, "I of gate_up_proj_weight", rule, str(inner)
    return None
