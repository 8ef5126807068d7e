"""The arguments of ``blockwise_mm_bwd``, declared once, and what they and each release's device kernel take.

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_dtype, check_layouts, check_record, check_rules, check_same_device, shown
from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.reference.block_rows import FLOATS, LAYOUTS, ROUTING, BlockRows, check_block_size, execution_rules
from hf_neuron_moe.reference.moe_types import (
    BLOCKINGS,
    ActFnType,
    AffinityOption,
    ClampLimits,
    KernelTypeOption,
    ShardOption,
    ShardOption229,
    SkipMode,
    as_member,
    check_switches,
)
from hf_neuron_moe.reference.specification import broken, check_documented_values, check_limits, dtype_name, selected

RELEASES = ("2.29", "2.31")
_FAMILY = "blockwise_backward"
_ROWS = {release: selected(_FAMILY, "kernel", release=release) for release in RELEASES}
_PAGE_ROWS = selected(_FAMILY, "documented")
_OPTIONAL = ("down_proj_act_checkpoint", "down_proj_bias")
_LAYOUTS = LAYOUTS | {
    "gate_up_proj_act_checkpoint_T": "[N, 2, I, B]",
    "output_hidden_states_grad": "[T', H]",
    "down_proj_act_checkpoint": "[N, B, H]",
    "down_proj_bias": "[E, H]",
}
BUFFERS = {f"{name}_grad_out": layout for name, layout in LAYOUTS.items()}
_LATER = ("skip_grad_initialization", "blocking_params", "accumulation_dtype", "skip_gate_proj", *BUFFERS)
"""Arguments that 2.29 does not have."""
_OFF_PAGE = "The page does not document it; limits='kernel' holds a call to the kernels' own limits."
_OFF_DEVICE = "Change it, or pass device_limits=False for the mathematical definition."


@dataclass(frozen=True)
class BackwardArguments:
    """The arguments of ``blockwise_mm_bwd``: upstream's in the order of 2.31 and later, then this package's."""

    hidden_states: Tensor  # bf16 or fp32 [T', H]; fp32 is computed in fp32, whatever compute_dtype says
    expert_affinities_masked: Tensor  # [T' * E, 1], dense and masked, token-major
    gate_up_proj_weight: Tensor  # [E, H, 2, I], 0 gate and 1 up
    down_proj_weight: Tensor  # [E, I, H]
    gate_up_proj_act_checkpoint_T: Tensor  # [N, 2, I, B] pre-activations after bias and clamp
    down_proj_act_checkpoint: Tensor | None  # [N, B, H] before the affinity; unused by AFFINITY_ON_I
    token_position_to_id: Tensor  # int [N * B]; T (or -1 with skip_token) marks unused slots
    block_to_expert: Tensor  # int [N]
    output_hidden_states_grad: Tensor  # [T', H]; a sink row may hold anything finite here, and is zero in the first two
    block_size: int  # B
    skip_dma: SkipMode | None = None  # skip_weight has no effect on values
    compute_dtype: torch.dtype = torch.bfloat16  # fp32: no rounding between the matmuls of bf16 operands
    is_tensor_update_accumulating: bool = True  # False stores rows of dX, for plans that use every token once
    skip_grad_initialization: bool = False  # add to the four *_grad_out buffers
    shard_option: ShardOption | ShardOption229 | str = ShardOption.SHARD_ON_HIDDEN
    affinity_option: AffinityOption | str = AffinityOption.AFFINITY_ON_H  # where the forward multiplied by the affinity
    kernel_type_option: KernelTypeOption | str = KernelTypeOption.DROPLESS  # DROPPING: block e is expert e
    clamp_limits: ClampLimits | None = None  # the forward's, as strict masks on the checkpoints: no bounds on gradients
    bias: bool = False  # the forward had biases: return their gradients too, and see down_proj_bias
    activation_type: ActFnType | str = ActFnType.SiLU
    block_tile_size: int | None = None  # tiling on the device, a divisor of B; no effect on values
    blocking_params: object = None  # records *Blocking, singly or in a tuple, list or dict; no effect on values
    hidden_states_grad_out: Tensor | None = None  # buffers of the results' shapes, written and returned
    expert_affinities_masked_grad_out: Tensor | None = None
    gate_up_proj_weight_grad_out: Tensor | None = None
    down_proj_weight_grad_out: Tensor | None = None
    accumulation_dtype: torch.dtype | None = None  # of weight and bias gradients without a buffer
    skip_gate_proj: bool = False  # the forward was act(up); gate gradients are zero and up is not masked
    _: KW_ONLY
    down_proj_bias: Tensor | None = None  # [E, H], for the affinity's gradient
    convention: str = "device"  # or "golden"
    upstream_affinity_grad: bool = False  # leave the bias out of the affinity's gradient as upstream does
    device_limits: bool | None = None  # enforce what device kernels take; None: for bf16 hidden_states
    limits: str | None = None  # "kernel": what device_limits=True enforces; "documented": the page's bounds too
    release: str | None = None  # whose limits: "2.29", "2.31" (and later), or None for those of either
    execute: str = "fast"  # "tiles" walks the documented loops, block by block and core by core (blockwise_walk)
    accumulation: str = "convention"  # fp32 sums, rounded once; "device": rounded after every block, by the tiles
    upstream_bugs: tuple[str, ...] = ()  # faults of the kernels to compute, by the names of upstream_bugs.BACKWARD

    @property
    def walks(self) -> bool:
        """Whether the call is computed block by block."""
        return self.execute == "tiles" or self.accumulation == "device"

    @property
    def tokens(self) -> int:
        """T, without the sink row."""
        return len(self.hidden_states) - (self.skip_dma is None or not self.skip_dma.skip_token)

    @property
    def clamps(self) -> ClampLimits:
        """The clamp limits, those that are absent too."""
        return self.clamp_limits or ClampLimits()

    @property
    def limited(self) -> bool:
        """Whether the limits of the device hold."""
        if self.device_limits is not None or self.limits is not None or self.release is not None:
            return self.device_limits is not False or self.release is not None
        return self.hidden_states.dtype == torch.bfloat16


class Options(NamedTuple):
    """The options of which names of members are taken too."""

    shard: ShardOption | ShardOption229
    on_hidden: bool  # whether the forward multiplied the output by the affinity, not the intermediate
    dropping: bool
    activation: ActFnType
    has_down: bool  # whether the down checkpoint is given; with the affinity on I it is not read


def check_options(given: BackwardArguments) -> Options:
    """Check what is no tensor."""
    check_switches(given)
    check_limits(given.limits, given.device_limits)
    check_documented_values(_FAMILY, vars(given))
    _check_blocking(given.blocking_params)
    check_block_size(given.block_size)
    check_record(given.skip_dma, SkipMode, "skip_dma")
    check_record(given.clamp_limits, ClampLimits, "clamp_limits")
    check_rules(_option_rules(given))
    older = ShardOption229.__members__.keys() - ShardOption.__members__.keys()  # a name of both is the newer one's
    of_229 = isinstance(given.shard_option, ShardOption229) or str(given.shard_option) in older
    shards: type[ShardOption | ShardOption229] = ShardOption229 if of_229 else ShardOption
    kernel = as_member(given.kernel_type_option, KernelTypeOption, argument="kernel_type_option")
    affinity = as_member(given.affinity_option, AffinityOption, argument="affinity_option")
    return Options(
        shard=as_member(given.shard_option, shards, argument="shard_option"),
        on_hidden=affinity is AffinityOption.AFFINITY_ON_H,
        dropping=kernel is KernelTypeOption.DROPPING,
        activation=as_member(given.activation_type, ActFnType, argument="activation_type"),
        has_down=given.down_proj_act_checkpoint is not None,
    )


def _option_rules(given: BackwardArguments) -> Iterator[Rule]:
    size, tile = given.block_size, given.block_tile_size
    if tile is not None:
        check_block_size(tile, "block_tile_size")
        fix = "It only tiles the block on the device; leave it None."
        yield Rule(size % tile == 0, "block_tile_size", f"a divisor of block_size = {size}", tile, fix, ShapeError)
    rule, fix = "torch.bfloat16 or torch.float32", "Use the kernels' default, torch.bfloat16."
    yield Rule(given.compute_dtype in FLOATS, "compute_dtype", rule, repr(given.compute_dtype), fix)
    fix = "It says whether the down checkpoint is without the down bias (device) or with it (golden)."
    fits = given.convention in ("device", "golden")
    yield Rule(fits, "convention", "'device' or 'golden'", repr(given.convention), fix)
    yield from execution_rules(given.execute, given.accumulation, given.upstream_bugs)


def check_operands(given: BackwardArguments) -> dict[str, int]:
    """Raise for operands whose dtypes, shapes or devices do not fit each other; return the sizes of their axes."""
    tensors = {name: getattr(given, name) for name in (*_LAYOUTS, *ROUTING)}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None or name not in _OPTIONAL}
    for name, tensor in tensors.items():
        check_dtype(tensor, ROUTING.get(name, FLOATS), name)
    check_dtype(given.down_proj_weight, (given.gate_up_proj_weight.dtype,), "down_proj_weight")
    check_same_device(tensors)
    blocks, slots = given.block_to_expert.numel(), given.token_position_to_id.numel()
    expected, fits = f"of size N * block_size = {blocks * given.block_size}", slots == blocks * given.block_size
    check_rules([Rule(fits, "token_position_to_id", expected, slots, "Use build_block_plan.", ShapeError)])
    return check_layouts(tensors, _LAYOUTS, N=blocks, B=given.block_size)


def _check_blocking(value: object) -> None:
    """Raise for `blocking_params` that hold anything but blocking records, singly or in a tuple, list or dict."""
    held = value if isinstance(value, list | tuple) else [value]
    held = list(value.values()) if isinstance(value, dict) else held
    counts = [count for item in held if isinstance(item, BLOCKINGS) for count in vars(item).values()]
    known = all(item is None or isinstance(item, BLOCKINGS) for item in held)
    fits = known and all(type(count) is int and count > 0 for count in counts)
    expected = f"None or made of {', '.join(kind.__name__ for kind in BLOCKINGS)} with positive counts"
    fix = "It only tiles the matmuls on the device; leave it None."
    check_rules([Rule(fits, "blocking_params", expected, shown(value), fix)])


def check_buffers(given: BackwardArguments, rows: BlockRows, sizes: dict[str, int]) -> None:
    """Raise for buffers that do not fit their operands, and combinations that would compute something else."""
    buffers = {name: getattr(given, name) for name in BUFFERS if getattr(given, name) is not None}
    for name, buffer in buffers.items():
        check_dtype(buffer, FLOATS, name)
        check_layouts(buffers, {name: BUFFERS[name]}, **sizes)
        fix = "Allocate it with torch.empty of that shape."
        strides = f"strides {buffer.stride()}"
        check_rules([Rule(buffer.is_contiguous(), name, "contiguous", strides, fix, ShapeError)])
    check_same_device({"hidden_states": given.hidden_states, **buffers})
    check_rules(_accumulation_rules(given, buffers, rows))


def _accumulation_rules(given: BackwardArguments, buffers: dict[str, Tensor], rows: BlockRows) -> Iterator[Rule]:
    missing = [name for name in BUFFERS if name not in buffers] if given.skip_grad_initialization else []
    fix = "Pass all four *_grad_out buffers to add to."
    yield Rule(not missing, "skip_grad_initialization", f"False without {''.join(missing[:1])}", "True", fix)
    name, dtype, rule = "accumulation_dtype", given.accumulation_dtype, "None, torch.bfloat16 or torch.float32"
    yield Rule(dtype in (None, *FLOATS), name, rule, repr(dtype), "Use torch.float32.")
    wide = [name for name, buffer in buffers.items() if buffer.dtype == torch.float32]
    fits = not wide or dtype != torch.bfloat16
    rule = f"not lower than the buffers' ({''.join(wide[:1])} is fp32)"
    yield Rule(fits, name, rule, "torch.bfloat16", "Leave it None or pass torch.float32.")
    name, rule = "is_tensor_update_accumulating", "True where a token goes to more than one expert"
    fix = "Plain stores keep the last expert's part only; they are for top_k = 1."
    fits = given.is_tensor_update_accumulating or rows.token_R.numel() == rows.token_R.unique().numel()
    yield Rule(fits, name, rule, "False", fix)


def check_device_limits(given: BackwardArguments, options: Options) -> None:
    """Raise for what no release's device kernel takes, or `release` does not take; the newest one names the rule.

    With ``limits="documented"`` also for what the page does not document.
    """
    release = given.release
    if release not in (None, *RELEASES):
        expected, fix = f"None or one of {', '.join(RELEASES)}", "2.31 stands for the later ones too."
        raise ConfigError.about("release", expected, repr(release), fix)
    if given.gate_up_proj_act_checkpoint_T.dtype == torch.bfloat16:
        check_bf16_limits(given.clamps)
    releases = RELEASES if release is None else (release,)
    broken_rules = [[rule for rule in _device_rules(given, options, name) if not rule.holds] for name in releases]
    if all(broken_rules):
        rule = broken_rules[-1][0]
        check_rules([rule._replace(expected=f"{rule.expected} (device limit of nki-library {releases[-1]})")])
    if given.limits == "documented":
        check_rules(broken(_PAGE_ROWS, _values(given, options), _OFF_PAGE))


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


def _values(given: BackwardArguments, options: Options) -> dict[str, object]:
    """What the constraints are about, by the names in their rows."""
    return {
        "activation_type": options.activation.name,
        "block_size": given.block_size,
        "H of hidden_states": given.hidden_states.shape[1],
        "I of gate_up_proj_weight": given.gate_up_proj_weight.shape[3],
        "kernel_type_option": "DROPPING" if options.dropping else "DROPLESS",
        "shard_option": options.shard.name,
        "affinity_option": "AFFINITY_ON_H" if options.on_hidden else "AFFINITY_ON_I",
        "down_proj_act_checkpoint": "a tensor" if options.has_down else "None",
        "hidden_states": dtype_name(given.hidden_states),
    }


def _device_rules(given: BackwardArguments, options: Options, release: str) -> Iterator[Rule]:
    """The rules of one release's kernel: those with figures are rows of specification/blockwise_backward.toml."""
    active = {"block_size 128" if given.block_size == 128 else "other block sizes"}
    yield from broken(_ROWS[release], _values(given, options), _OFF_DEVICE, active=active)
    old, shard = release == RELEASES[0], options.shard.name
    rule = "left out (it came with a later release)"
    for name in _LATER:
        left_out = getattr(given, name) is getattr(BackwardArguments, name)
        yield Rule(left_out or not old, name, rule, "a value", _OFF_DEVICE)
    fits = old or not options.on_hidden or shard != "SHARD_ON_HIDDEN"
    rule = "SHARD_ON_FREE or SHARD_ON_BLOCK with AFFINITY_ON_H"
    yield Rule(fits, "shard_option", rule, "SHARD_ON_HIDDEN, the default", _OFF_DEVICE)
