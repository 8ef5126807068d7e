"""The MXFP8 training pair of the blockwise experts: ``blockwise_mm_fwd_mxfp8`` and ``blockwise_mm_bwd_mxfp8``.

Letters: T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I intermediate,
E experts, N blocks of B slots.

Every matmul's operands are rounded to MXFP8 along its contraction axis (block scales of nki 0.5 and later), along the
token axis block by block. The roundings to bf16 in between are those of ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8`` (2.31).

Not known of upstream's pair, and an error here: the layout of pre-quantized weights and their scales, and biases (nor
whether checkpoints would include one). Argument names beyond those of ``moe_cte`` and ``blockwise_mm_bwd`` are not
known either; these functions use the same names. Sources: nki-library 2.31 and 2.32 ``experimental.moe_mxfp8``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import RowSums, stacked
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.tiles import Loader, Span, tile_loader
from hf_neuron_moe.checks import (
    Rule,
    check_dtype,
    check_layouts,
    check_multiple,
    check_record,
    check_rules,
    check_same_device,
)
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.reference.block_rows import LAYOUTS, ROUTING, BlockRows, block_rows, check_block_size, check_sink_row
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments, check_bf16_limits, check_operands
from hf_neuron_moe.reference.blockwise_grads import BackwardCall, run_backward
from hf_neuron_moe.reference.blockwise_mm_bwd import MoEBackward
from hf_neuron_moe.reference.moe_cte_saved import clamp_, fill_blocks
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    AffinityOption,
    ClampLimits,
    ShardOption,
    SkipMode,
    as_member,
    check_switches,
    taking,
)
from hf_neuron_moe.reference.specification import constraints

_PAIR = {row.symbol: row for row in constraints("blockwise_backward") if row.implementations}
_UNKNOWN = dict.fromkeys(
    ("gate_up_proj_scale", "down_proj_scale"),
    "The layout of pre-quantized weights is not documented; pass bf16 weights.",
) | dict.fromkeys(
    ("gate_and_up_proj_bias", "down_proj_bias", "bias"), "Upstream documents no biases for the MXFP8 training pair."
)
"""Arguments whose meaning upstream does not document, and what to do without them."""
_ONLY: dict[str, Enum] = {
    "activation_function": ActFnType.SiLU,
    "activation_type": ActFnType.SiLU,
    "shard_option": ShardOption.SHARD_ON_FREE,
    "affinity_option": AffinityOption.AFFINITY_ON_I,
}
"""Options that the pair knows a single member of."""
_LAYOUTS = LAYOUTS | {"gate_up_proj_weight": "[E, 2, I, H]", "down_proj_weight": "[E, H, I]"}
"""Of the forward's tensors."""


class MoEForwardMXFP8(NamedTuple):
    """Output ``[T', H]``, clamped pre-activations ``[N, 2, I, B]``, intermediate times affinity ``[N, I, B]``.

    All bf16. Slots without a token are zero.
    """

    output: Tensor
    gate_up_activations_T: Tensor
    intermediate_T: Tensor


@dataclass(frozen=True)
class ForwardMXFP8:
    """The arguments of ``blockwise_mm_fwd_mxfp8``; H and I are multiples of 128."""

    hidden_states: Tensor  # bf16 [T', H]
    expert_affinities_masked: Tensor  # bf16 or fp32 [T' * E, 1], dense and masked, token-major
    gate_up_proj_weight: Tensor  # bf16 [E, 2, I, H], 0 gate and 1 up: the stock fused layout
    down_proj_weight: Tensor  # bf16 [E, H, I]
    token_position_to_id: Tensor  # int [N * B]; T (or -1 with skip_token) marks unused slots, which come last
    block_to_expert: Tensor  # int [N]
    block_size: int  # B
    _: KW_ONLY
    skip_dma: SkipMode | None = None  # skip_weight has no effect on values
    activation_function: ActFnType | str = ActFnType.SiLU
    clamp_limits: ClampLimits | None = None  # of gate and up, before the activation
    gate_up_proj_scale: Tensor | None = None
    down_proj_scale: Tensor | None = None
    gate_and_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None
    device_limits: bool | None = None


@dataclass(frozen=True)
class BackwardMXFP8:
    """The arguments of ``blockwise_mm_bwd_mxfp8``: the forward's but for those with a comment."""

    hidden_states: Tensor
    expert_affinities_masked: Tensor
    gate_up_proj_weight: Tensor  # bf16 [E, H, 2, I]
    down_proj_weight: Tensor  # bf16 [E, I, H]
    gate_up_proj_act_checkpoint_T: Tensor  # [N, 2, I, B], required
    token_position_to_id: Tensor
    block_to_expert: Tensor
    output_hidden_states_grad: Tensor  # bf16 [T', H]
    block_size: int
    _: KW_ONLY
    skip_dma: SkipMode | None = None
    shard_option: ShardOption | str = ShardOption.SHARD_ON_FREE
    affinity_option: AffinityOption | str = AffinityOption.AFFINITY_ON_I
    clamp_limits: ClampLimits | None = None  # strict masks here
    bias: bool = False
    activation_type: ActFnType | str = ActFnType.SiLU
    gate_up_proj_scale: Tensor | None = None
    down_proj_scale: Tensor | None = None
    device_limits: bool | None = None


@public
@taking(ForwardMXFP8)
@torch.no_grad()
def blockwise_mm_fwd_mxfp8(given: ForwardMXFP8) -> MoEForwardMXFP8:
    """Forward of the experts in MXFP8, the affinity on the intermediate; see :class:`ForwardMXFP8`."""
    limits = _checked_options(given)
    names = ("hidden_states", "gate_up_proj_weight", "down_proj_weight", *ROUTING)
    _check_dtypes(given, names)
    check_same_device({name: getattr(given, name) for name in names})
    sizes = check_layouts(vars(given), _LAYOUTS)
    rows = _checked_rows(given, sizes)
    stack = stacked(given.gate_up_proj_weight.flatten(1, 2), given.down_proj_weight, transposed=False)
    scale_R = rows.affinity(given.expert_affinities_masked, sizes["E"])
    hidden_states, inner, device = given.hidden_states, sizes["I"], given.hidden_states.device
    total_TH = torch.zeros(hidden_states.shape, dtype=torch.float32, device=device)
    gate_up_N2IB = hidden_states.new_zeros((rows.blocks, 2, inner, rows.block_size))
    inter_NIB = hidden_states.new_zeros((rows.blocks, inner, rows.block_size))
    loader, idle_I = tile_loader("mxfp8", device), hidden_states.new_zeros(inner)
    x, emit = RowSource(hidden_states, rows.token_R), RowSums(total_TH, rows.token_R)
    for (expert, start, end), first in zip(rows.runs, rows.first_slots, strict=True):
        gate_RI, up_RI, inter_RI = (hidden_states.new_empty((end - start, inner)) for _ in range(3))
        out_RH = loader.scratch.get("expert_out", (end - start, hidden_states.shape[1]), torch.float32)
        ffn_forward(
            x.rows(start, end),
            stack.expert(expert),
            loader,
            out_RH,
            save=Checkpoints(gate_RI, up_RI),
            block_size=rows.block_size,
            epilogue=_Epilogue(loader, scale_R[start:end, None], inter_RI, limits),
        )
        emit(start, end, out_RH)
        for target, values_RI in ((gate_up_N2IB[:, 0], gate_RI), (gate_up_N2IB[:, 1], up_RI), (inter_NIB, inter_RI)):
            fill_blocks(target.transpose(1, 2), values_RI, first // rows.block_size, idle_I)
    return MoEForwardMXFP8(total_TH.to(hidden_states.dtype), gate_up_N2IB, inter_NIB)


@dataclass(frozen=True)
class _Epilogue:
    """Clamp, ``silu(gate) * up * affinity``, save it in bf16, and quantize it along the intermediate axis."""

    loader: Loader
    scale_R1: Tensor
    inter_RI: Tensor
    limits: ClampLimits
    needs_gate: bool = True

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        clamp_(gate_RI, *self.limits.gate)
        clamp_(up_RI, *self.limits.up)

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        part = slice(rows.start, rows.stop)
        product = F.silu(gate_RI, inplace=True).mul_(up_RI).mul_(self.scale_R1[part])
        saved = self.inter_RI[part, columns.start : columns.stop].copy_(product)
        buffer = self.loader.scratch.get("inter", (rows.length, columns.size), torch.float32)
        self.loader.fill(buffer, saved)
        return self.loader.quantize(buffer, axis=1)


@public
@taking(BackwardMXFP8)
def blockwise_mm_bwd_mxfp8(given: BackwardMXFP8) -> MoEBackward:
    """Gradients of :func:`blockwise_mm_fwd_mxfp8` from its pre-activations; see :class:`BackwardMXFP8`.

    A token's MX groups along the token axis lie in its block. Returns ``[T', H]``, ``[T' * E, 1]``, ``[E, H, 2, I]``
    and ``[E, I, H]`` in their operands' dtypes.
    """
    limits = _checked_options(given)
    _check_dtypes(given, ("hidden_states", "gate_up_proj_weight", "down_proj_weight", "output_hidden_states_grad"))
    shared = {field.name for field in fields(BackwardArguments)} & vars(given).keys()
    arguments = BackwardArguments(down_proj_act_checkpoint=None, **{name: getattr(given, name) for name in shared})
    rows = _checked_rows(given, check_operands(arguments))
    gating = Gating(gate_limits=limits.gate, up_limits=limits.up)
    call = BackwardCall(arguments, rows, "mxfp8", on_hidden=False, gating=gating, affinity_bias=None)
    return MoEBackward(*run_backward(call))


def _checked_options(given: ForwardMXFP8 | BackwardMXFP8) -> ClampLimits:
    """Check what is no tensor; return the limits."""
    for name, fix in _UNKNOWN.items():
        unset = False if name == "bias" else None
        value = getattr(given, name, unset)
        got = "a tensor" if isinstance(value, Tensor) else repr(value)
        check_rules([Rule(value is unset, name, repr(unset), got, fix)])
    for name, member in _ONLY.items():
        value = getattr(given, name, member)
        expected = f"{member.name} (the MXFP8 training pair has no other)"
        fix = "Use moe_cte and blockwise_mm_bwd for the others."
        check_rules([Rule(as_member(value, type(member), argument=name) is member, name, expected, value, fix)])
    size, fix = given.block_size, "Build the plan with one of these."
    check_block_size(size)
    sizes = _PAIR["B"].one_of
    check_rules([Rule(size in sizes, "block_size", f"one of {sizes}", size, fix, ShapeError)])
    check_record(given.skip_dma, SkipMode, "skip_dma")
    check_record(given.clamp_limits, ClampLimits, "clamp_limits")
    check_switches(given)
    if given.clamp_limits is not None and given.device_limits is not False:
        check_bf16_limits(given.clamp_limits)
    return given.clamp_limits or ClampLimits()


def _check_dtypes(given: ForwardMXFP8 | BackwardMXFP8, names: tuple[str, ...]) -> None:
    for name in names:
        check_dtype(getattr(given, name), ROUTING.get(name, (torch.bfloat16,)), name)


def _checked_rows(given: ForwardMXFP8 | BackwardMXFP8, sizes: dict[str, int]) -> BlockRows:
    """Check sizes, sink row and plan; return the plan's rows."""
    check_multiple(sizes["H"], _PAIR["H"].multiple_of, "H of hidden_states", "MX groups need whole tiles")
    check_multiple(sizes["I"], _PAIR["I"].multiple_of, "I of gate_up_proj_weight", "MX groups need whole tiles")
    check_sink_row(vars(given), given.skip_dma)
    tokens = sizes["T'"] - int(given.skip_dma is None or not given.skip_dma.skip_token)
    plan = (given.token_position_to_id, given.block_to_expert)
    return block_rows(*plan, given.block_size, tokens, sizes["E"], without_gaps=True)
