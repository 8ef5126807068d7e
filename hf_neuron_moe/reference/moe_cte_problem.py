"""From the documented arguments of the blockwise MoE forward to a checked problem.

Legend: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots, R real (token, expert)
pairs. Source: nki-library 2.29 ``moe_cte``; FP8 dtypes and block scales as of 2.31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import stacked
from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import Rule, check_dtype, check_layouts, check_rules, check_same_device
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.constants import ScaleRule, choose
from hf_neuron_moe.formats.moe_mx import moe_bias_from_lanes
from hf_neuron_moe.reference.block_rows import (
    FLOATS,
    INTEGERS,
    LAYOUTS,
    ROUTING,
    BlockRows,
    block_rows,
    check_one_block_per_expert,
    check_sink_row,
)
from hf_neuron_moe.reference.moe_cte_arguments import Arguments, require_pair, resolved
from hf_neuron_moe.reference.moe_cte_rules import BLOCK, HYBRID, MX, always, device_limits
from hf_neuron_moe.reference.moe_cte_scales import FP8, SCALE_BLOCK, Scales, read_scales
from hf_neuron_moe.reference.moe_types import ExpertAffinityScaleMode, MoECTEImplementation
from hf_neuron_moe.reference.mx_experts import MX_LAYOUTS, read_mx_weights

_ALIKE = "Pass both projections in one dtype; FP8 codes come from a quantization, with their scales."
_LARGEST_E4M3 = 0x77
"""Code of 240, the largest finite value of the device's e4m3; 256 to 448 of e4m3fn are its infinity and NaNs."""


class Place(Enum):
    """What the affinity multiplies."""

    NOTHING = auto()
    OUTPUT = auto()
    INPUT = auto()
    PRE_ACTIVATIONS = auto()
    INTERMEDIATE = auto()


@dataclass(frozen=True)
class Problem:
    """A checked call."""

    given: Arguments
    rows: BlockRows  # the plan's real slots
    affinity_R: Tensor  # fp32
    weights: Callable[[int], FFNWeights]  # one expert's projections
    experts: int
    inner: int
    bias_E2I: Tensor | None  # fp32
    down_bias_EH: Tensor | None  # fp32
    scales: Scales  # FP8 scales
    place: Place  # what the affinity multiplies
    mx: bool  # whether the weights are MX words, dequantized to fp32 for every expert
    mx_rule: ScaleRule  # of the online quantization

    @property
    def hidden(self) -> Tensor:
        """``[T', H]``."""
        return self.given.hidden_states

    @property
    def golden(self) -> bool:
        """Whether to compute what the numpy reference does where the device differs."""
        return self.given.convention == "golden"

    @property
    def rounded(self) -> torch.dtype:
        """Dtype that values between matmuls are rounded to."""
        return torch.float32 if torch.float32 in (self.hidden.dtype, self.given.compute_dtype) else torch.bfloat16

    @property
    def rounded_pre_activations(self) -> torch.dtype:
        """Dtype that pre-activations are rounded to; the device keeps those that it does not save in fp32."""
        kept = self.given.accumulation == "device" and not self.saves
        return torch.float32 if self.mx or kept else self.rounded

    @property
    def saves(self) -> bool:
        """Whether to return the activations."""
        always_saves = self.given.kind is MoECTEImplementation.shard_on_i_dropping
        return always_saves or self.given.spec.shard_on_I.checkpoint_activation

    @property
    def saved_dtype(self) -> torch.dtype:
        """Dtype of the returned activations."""
        weight_dtype = self.given.gate_up_proj_weight.dtype
        return self.rounded if self.rounded == torch.bfloat16 or weight_dtype not in FLOATS else weight_dtype


def check_arguments(given: Arguments) -> Problem:
    """Check a call against the documented rules and resolve its options."""
    given = resolved(given)
    for name in ("hidden_states", *ROUTING):
        check_dtype(getattr(given, name), ROUTING.get(name, FLOATS), name)
    check_layouts(vars(given), {"hidden_states": "[T', H]"})
    check_same_device({name: value for name, value in vars(given).items() if isinstance(value, Tensor)})
    if given.kind not in MX:
        check_dtype(given.gate_up_proj_weight, (*FLOATS, FP8), "gate_up_proj_weight", _ALIKE)
        check_dtype(given.down_proj_weight, (given.gate_up_proj_weight.dtype,), "down_proj_weight", _ALIKE)
    mx = read_mx_weights(given) if given.kind in MX else None
    sizes = check_layouts(vars(given), LAYOUTS if mx is None else MX_LAYOUTS)
    experts, inner = sizes["E"], sizes["I"]
    scales = read_scales(given, experts, inner)
    check_rules(always(given))
    check_sink_row(vars(given), given.skip_dma)
    if given.limited:
        check_rules(device_limits(given, sizes))
        for name in ("gate_up_proj_weight", "down_proj_weight"):
            weight = getattr(given, name)
            if weight.dtype == FP8 and bool(((weight.view(torch.uint8) & 0x7F) > _LARGEST_E4M3).any()):
                expected = "made of magnitudes up to 240 (the device's e4m3 has no 256 to 448)"
                raise DTypeError.about(name, expected, "a larger one", "Quantize to a range of 240.")
    plan = block_rows(given.token_position_to_id, given.block_to_expert, given.block_size, given.tokens, experts)
    _check_plan(plan, given, experts)
    check_rules(_condition_rules(given, plan, experts))
    bias, down_bias = _read_biases(given, sizes)
    return Problem(
        given=given,
        rows=plan,
        affinity_R=plan.affinity(given.expert_affinities_masked, experts),
        weights=_expert_weights(given, scales) if mx is None else mx.expert,
        experts=experts,
        inner=inner,
        bias_E2I=bias,
        down_bias_EH=down_bias,
        scales=scales,
        place=_place(given),
        mx=mx is not None,
        mx_rule=_mx_rule(given, online=mx is not None and scales.static_inputs is None),
    )


def _expert_weights(given: Arguments, scales: Scales) -> Callable[[int], FFNWeights]:
    """Return a function from an expert's number to its projections; block scales are multiplied in, in fp32."""
    gate_up, down = given.gate_up_proj_weight, given.down_proj_weight
    experts, hidden, _, inner = gate_up.shape
    if scales.gate_up_block is None or scales.down_block is None:
        return stacked(gate_up.reshape(experts, hidden, 2 * inner), down, transposed=True).expert
    gate_up_block, down_block = scales.gate_up_block, scales.down_block

    def dequantize(number: int) -> FFNWeights:
        tiles = gate_up[number].float().view(-1, SCALE_BLOCK, 2, inner // SCALE_BLOCK, SCALE_BLOCK)
        gate_up_H2I = tiles.mul_(gate_up_block[number][:, None, :, :, None]).view(hidden, 2, inner)
        down_tiles = down[number].float().view(-1, SCALE_BLOCK, hidden // SCALE_BLOCK, SCALE_BLOCK)
        down_IH = down_tiles.mul_(down_block[number][:, None, :, None]).view(inner, hidden)
        return FFNWeights(gate_up_H2I[:, 0].t(), gate_up_H2I[:, 1].t(), down_IH.t())

    return dequantize


def _read_biases(given: Arguments, sizes: dict[str, int]) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases as fp32 ``[E, 2, I]`` (with MX words, I padded to whole tiles) and ``[E, H]``."""
    gate_up, down = given.gate_and_up_proj_bias, given.down_proj_bias
    names = ("gate_and_up_proj_bias", "down_proj_bias")
    require_pair(gate_up, down, names)
    if gate_up is None or down is None:
        return None, None
    check_dtype(gate_up, FLOATS, names[0])
    check_dtype(down, FLOATS, names[1])
    mx = given.kind in MX
    layout = "[E, pI, 2, ceil(I/512), 4]" if mx else "[E, 2, I]"
    check_layouts(vars(given), {names[1]: "[E, H]", names[0]: layout}, **sizes)
    return (moe_bias_from_lanes(gate_up) if mx else gate_up).float(), down.float()


def _check_plan(plan: BlockRows, given: Arguments, experts: int) -> None:
    """Check what an implementation needs of its plan."""
    if given.kind is MoECTEImplementation.shard_on_i_dropping:
        expected = "0..E-1 with shard_on_i_dropping (block e is expert e)"
        fix = "Lay the tokens out with one block per expert."
        check_one_block_per_expert(given.block_to_expert, experts, expected, fix)
    accumulates = given.is_tensor_update_accumulating
    if not accumulates and len(plan.token_R) and int(torch.bincount(plan.token_R).max()) > 1:
        fix = "Without accumulation the last block's result would replace the others'."
        expected = "True where a token goes to several experts"
        raise ConfigError.about("is_tensor_update_accumulating", expected, "False", fix)


def _condition_rules(given: Arguments, plan: BlockRows, experts: int) -> Iterator[Rule]:
    """Rules of ``conditions``: N flags, one zero (two for shard_on_block_mx), and every block with tokens is computed.

    A second zero is harmless to the other kernels. shard_on_block's generator makes one flag per pair of blocks, which
    no kernel reads: only its length is checked. The hybrid kernels compute ``num_static_block`` blocks (default N - E),
    then go on up to the sum of the conditions.
    """
    kind, blocks, name = given.kind, plan.blocks, "conditions"
    fix = "build_block_plan returns them: 1 for blocks with tokens, 0 for spare ones, then zeros."
    if given.conditions is None:
        yield Rule(kind not in HYBRID, name, f"given with {kind.name}", None, fix, ShapeError)
        return
    check_dtype(given.conditions, (*INTEGERS, torch.bool, torch.uint8), name)
    flags = given.conditions.reshape(-1)
    lengths = [blocks + 2] if kind in BLOCK & MX else [blocks + 1, blocks + 2]
    if kind in BLOCK - MX and len(flags) == -(-blocks // 2) + 1 and len(flags) not in lengths:
        return
    expected = f"of length {' or '.join(map(str, lengths))} (N = {blocks})"
    yield Rule(len(flags) in lengths, name, expected, len(flags), fix, ShapeError)
    expected = "zero after the N flags of the blocks"
    yield Rule(not bool(flags[blocks:].any()), name, expected, flags.tolist(), fix, ShapeError)
    used = plan.used_blocks()
    expected, fits = "nonzero for every block with tokens", not bool((used & (flags[:blocks] == 0)).any())
    yield Rule(fits, name, expected, flags.tolist(), fix, ShapeError)
    if kind in HYBRID:
        static = given.spec.shard_on_I.num_static_block
        reached = max(blocks - experts if static is None else static, int((flags != 0).sum()))
        last = int(used.nonzero().max()) if bool(used.any()) else -1
        expected = (
            f"a plan whose first {reached} blocks have all the tokens (max of the static blocks and the "
            f"number of flags set, {reached}, is where {kind.name} stops)"
        )
        fix = (
            'Hybrids take no spare blocks in between: build the plan with spare_blocks="last", not "split", '
            f"or set spec.shard_on_I.num_static_block to {last + 1} or more."
        )
        yield Rule(last < reached, name, expected, f"tokens in block {last}, counted from 0", fix, ShapeError)


def _mx_rule(given: Arguments, *, online: bool) -> ScaleRule:
    """Return the rule of the online quantization; raise for a choice where nothing is quantized by it."""
    rule = choose(ScaleRule, given.mx_scale_rule, argument="mx_scale_rule")
    if not online and rule is not ScaleRule.NEURON:
        expected = "left at its default without online MX quantization"
        fix = "Only the MX implementations quantize by it, and not with quantization_type=STATIC_MX."
        raise ConfigError.about("mx_scale_rule", expected, repr(given.mx_scale_rule), fix)
    return rule


def _place(given: Arguments) -> Place:
    """Return what the affinity multiplies: PRE_SCALE means two things upstream."""
    mode, modes = given.expert_affinities_scaling_mode, ExpertAffinityScaleMode
    if given.on_inner:
        return Place.INTERMEDIATE
    if mode in (modes.NO_SCALE, modes.POST_SCALE):
        return Place.OUTPUT if mode is modes.POST_SCALE else Place.NOTHING
    on_input = given.convention == "golden" or given.kind is MoECTEImplementation.shard_on_block
    return Place.INPUT if on_input else Place.PRE_ACTIVATIONS
