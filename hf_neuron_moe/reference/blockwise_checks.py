"""What ``blockwise_mm_bwd`` accepts: operands, options, and what each release's device kernel takes.

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_dtype, check_layouts, check_rules, check_same_device, shown
from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.reference.block_rows import FLOATS, INTEGERS
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

RELEASES = ("2.29", "2.31")
_BLOCK_SIZES = {"2.29": (128, 256, 512, 1024), "2.31": (128, 256, 512, 1024, 2048, 4096)}
_ACTIVATIONS = {
    "2.29": (ActFnType.SiLU, ActFnType.Swish),
    "2.31": (ActFnType.SiLU, ActFnType.Swish, ActFnType.SquaredReLU),
}
_SHARDS: dict[str, type[ShardOption] | type[ShardOption229]] = {"2.29": ShardOption229, "2.31": ShardOption}
_CORES = 2
_OPTIONAL = ("down_proj_act_checkpoint", "down_proj_bias")
_LAYOUTS = {
    "hidden_states": "[T', H]",
    "gate_up_proj_weight": "[E, H, 2, I]",
    "down_proj_weight": "[E, I, H]",
    "expert_affinities_masked": "[T' * E, 1]",
    "gate_up_proj_act_checkpoint_T": "[N, 2, I, B]",
    "output_hidden_states_grad": "[T', H]",
    "down_proj_act_checkpoint": "[N, B, H]",
    "down_proj_bias": "[E, H]",
}
_OFF_DEVICE = "Change it, or pass device_limits=False for the mathematical definition."


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

    @property
    def on_hidden(self) -> bool:
        """Whether the forward multiplied the output by the affinity, not the intermediate."""
        return self.affinity is AffinityOption.AFFINITY_ON_H


def check_operands(operands: Operands, block_size: int) -> dict[str, int]:
    """Raise for operands whose dtypes, shapes or devices do not fit each other; return the sizes of their axes."""
    given = {name: tensor for name, tensor in vars(operands).items() if tensor is not None or name not in _OPTIONAL}
    for name, tensor in given.items():
        check_dtype(tensor, INTEGERS if name in ("token_position_to_id", "block_to_expert") else FLOATS, name)
    check_dtype(operands.down_proj_weight, (operands.gate_up_proj_weight.dtype,), "down_proj_weight")
    check_same_device(given)
    blocks, slots = operands.block_to_expert.numel(), operands.token_position_to_id.numel()
    expected, fits = f"of size N * block_size = {blocks * block_size}", slots == blocks * block_size
    check_rules([Rule(fits, "token_position_to_id", expected, slots, "Use build_block_plan.", ShapeError)])
    return check_layouts(given, _LAYOUTS, N=blocks, B=block_size)


def check_blocking(value: object) -> None:
    """Raise for `blocking_params` that hold anything but blocking records, singly or in a tuple, list or dict."""
    held = value if isinstance(value, list | tuple) else [value]
    held = list(value.values()) if isinstance(value, dict) else held
    counts = [count for item in held if isinstance(item, BLOCKINGS) for count in vars(item).values()]
    known = all(item is None or isinstance(item, BLOCKINGS) for item in held)
    fits = known and all(type(count) is int and count > 0 for count in counts)
    expected = f"None or made of {', '.join(kind.__name__ for kind in BLOCKINGS)} with positive counts"
    fix = "It only tiles the matmuls on the device; leave it None."
    check_rules([Rule(fits, "blocking_params", expected, shown(value), fix)])


def read_shard_option(value: object) -> ShardOption | ShardOption229:
    """Return a shard option of either generation; a name that both have is the newer one's."""
    older = ShardOption229.__members__.keys() - ShardOption.__members__.keys()
    if isinstance(value, ShardOption229) or (isinstance(value, str) and value in older):
        return as_member(value, ShardOption229, argument="shard_option")
    return as_member(value, ShardOption, argument="shard_option")


def check_device_limits(operands: Operands, options: Options, release: str | None) -> None:
    """Raise for what no release's device kernel takes, or `release` does not take; the newest one names the rule."""
    if release not in (None, *RELEASES):
        expected, fix = f"None or one of {', '.join(RELEASES)}", "2.31 stands for the later ones too."
        raise ConfigError.about("release", expected, repr(release), fix)
    if operands.gate_up_proj_act_checkpoint_T.dtype == torch.bfloat16:
        check_bf16_limits(options.clamp_limits)
    releases = RELEASES if release is None else (release,)
    broken = [[rule for rule in _device_rules(operands, options, name) if not rule.holds] for name in releases]
    if all(broken):
        rule = broken[-1][0]
        check_rules([rule._replace(expected=f"{rule.expected} (device limit of nki-library {releases[-1]})")])


def check_bf16_limits(limits: ClampLimits) -> None:
    """Raise for clamp limits that bf16 does not hold.

    The masks compare bf16 checkpoints with the limits. A value clamped to 0.7 is kept as 0.69921875, which would count
    as inside and get a gradient; so forward and backward have to use the rounded limit.
    """
    expected = "a bf16 number (pre-activations are kept in bf16, and clamped ones must equal the limit)"
    for name, limit in vars(limits).items():
        rounded = limit if limit is None else float(torch.tensor(limit, dtype=torch.bfloat16))
        fix = f"Use the bf16 value of the limit, {rounded}, in forward and backward."
        check_rules([Rule(rounded == limit, f"clamp_limits.{name}", expected, repr(limit), fix)])


def _device_rules(operands: Operands, options: Options, release: str) -> Iterator[Rule]:
    """The documented rules of one release, sizes first."""
    old, block, step = release == "2.29", options.block_size, 32 * _CORES
    hidden, inner = operands.hidden_states.shape[1], operands.gate_up_proj_weight.shape[3]
    sizes = _BLOCK_SIZES[release]
    yield Rule(block in sizes, "block_size", f"one of {sizes}", block, _OFF_DEVICE, ShapeError)
    rule = f"a multiple of {step} (32 per core)"
    yield Rule(hidden % step == 0, "H of hidden_states", rule, hidden, _OFF_DEVICE, ShapeError)
    fits = inner % 2 == 0 and (inner % step == 0 or (not old and block == 128))
    rule += ", or even with block_size 128 from 2.31 on"
    yield Rule(fits, "I of gate_up_proj_weight", rule, inner, _OFF_DEVICE, ShapeError)

    shard, members, on_hidden = options.shard.name, _SHARDS[release].__members__, options.on_hidden
    fits, rule = options.kernel_type is not KernelTypeOption.DROPPING, "DROPLESS (no release's kernel has dropping)"
    yield Rule(fits, "kernel_type_option", rule, "DROPPING", _OFF_DEVICE)
    yield Rule(shard in members, "shard_option", f"one of {', '.join(members)}", shard, _OFF_DEVICE)
    rule = "AFFINITY_ON_H (AFFINITY_ON_I is ignored)"
    yield Rule(not old or on_hidden, "affinity_option", rule, options.affinity.name, _OFF_DEVICE)
    rule = "left out (it came with a later release)"
    yield Rule(not (old and options.later), "".join(options.later[:1]), rule, "a value", _OFF_DEVICE)
    fits = old or not on_hidden or shard != "SHARD_ON_HIDDEN"
    rule = "SHARD_ON_FREE or SHARD_ON_BLOCK with AFFINITY_ON_H"
    yield Rule(fits, "shard_option", rule, "SHARD_ON_HIDDEN, the default", _OFF_DEVICE)
    kinds, kind = _ACTIVATIONS[release], options.activation
    rule = f"one of {', '.join(each.name for each in kinds)}"
    yield Rule(kind in kinds, "activation_type", rule, kind.name, _OFF_DEVICE)
