"""From the documented arguments of the blockwise MoE forward to a checked problem.

Legend: T real tokens, T' rows of the token tensors (T + 1 with a sink row, T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots, R real (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import check_rules, check_shape
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats.constants import ScaleRule, choose
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows
from hf_neuron_moe.reference.moe_cte_arguments import FLOATS, Arguments, Sizes, resolved
from hf_neuron_moe.reference.moe_cte_operands import (
    check_conditions,
    check_fp8_range,
    check_plan,
    check_tokens,
    check_weights,
    expert_weights,
    mx_experts,
    read_biases,
    refuse_input_scales,
    require_fp8_scales,
    static_input_scales,
)
from hf_neuron_moe.reference.moe_cte_rules import MX, always, device_limits
from hf_neuron_moe.reference.moe_cte_scales import Scales, read_scales
from hf_neuron_moe.reference.moe_types import ExpertAffinityScaleMode, MoECTEImplementation, QuantizationType
from hf_neuron_moe.reference.mx_experts import MXExperts

StaticScales = tuple[list[float], list[float]]
"""STATIC_MX input scales, ``(gate_up [E], down [E])``."""


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
    block_to_expert: Tensor  # int64 [N], ids below E
    affinity_R: Tensor  # fp32
    weights: Callable[[int], FFNWeights]  # one expert's projections
    experts: int
    inner: int
    bias_E2I: Tensor | None  # fp32
    down_bias_EH: Tensor | None  # fp32
    scales: Scales  # FP8 scales
    place: Place  # what the affinity multiplies
    mx: MXExperts | None  # the MX weights
    static_inputs: StaticScales | None
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
    def weights_are_exact(self) -> bool:
        """Whether the weights are fp32 values that must not be rounded again."""
        return self.mx is not None or self.scales.gate_up_block is not None

    @property
    def rounded(self) -> torch.dtype:
        """Dtype that values between matmuls are rounded to."""
        return torch.float32 if torch.float32 in (self.hidden.dtype, self.given.compute_dtype) else torch.bfloat16

    @property
    def keep(self) -> bool:
        """Whether to return the activations."""
        kept = self.given.spec.shard_on_I.checkpoint_activation
        return kept or self.given.kind is MoECTEImplementation.shard_on_i_dropping

    @property
    def kept_dtype(self) -> torch.dtype:
        """Dtype of the returned activations."""
        weight_dtype = self.given.gate_up_proj_weight.dtype
        return self.rounded if self.rounded == torch.bfloat16 or weight_dtype not in FLOATS else weight_dtype

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the output."""
        return self.given.accumulation_dtype or self.hidden.dtype

    @property
    def sink(self) -> bool:
        """Whether the token tensors have a sink row."""
        return not self.given.skip_dma.skip_token


def check_arguments(given: Arguments) -> Problem:
    """Check a call against the documented rules and resolve its options."""
    given = resolved(given)
    check_tokens(given)
    mx = mx_experts(given) if given.kind in MX else None
    experts, inner = check_weights(given) if mx is None else (mx.gate_up.shape[0], mx.inner)
    (rows, hidden), affinities = given.hidden_states.shape, given.expert_affinities_masked
    check_shape(affinities, (rows * experts, 1), "[T' * E, 1]", "expert_affinities_masked")
    scales, static = _scales(given, experts, inner)
    tokens = rows if given.skip_dma.skip_token else rows - 1
    sizes = Sizes(tokens, hidden, inner, given.block_size, given.block_to_expert.numel())
    check_rules(always(given, sizes))
    if given.limited:
        check_rules(device_limits(given, sizes))
        check_fp8_range(given)
    plan = block_rows(given.token_position_to_id, given.block_to_expert, given.block_size, tokens, experts)
    check_plan(plan, given, experts)
    check_conditions(given, plan, experts)
    bias, down_bias = read_biases(given, mx, experts, inner)
    return Problem(
        given=given,
        rows=plan,
        block_to_expert=given.block_to_expert.reshape(-1).long().clamp(max=experts - 1),
        affinity_R=plan.affinity(affinities, experts),
        weights=expert_weights(given, scales) if mx is None else mx.expert,
        experts=experts,
        inner=inner,
        bias_E2I=bias,
        down_bias_EH=down_bias,
        scales=scales,
        place=_place(given),
        mx=mx,
        static_inputs=static,
        mx_rule=_mx_rule(given, online=mx is not None and static is None),
    )


def _scales(given: Arguments, experts: int, inner: int) -> tuple[Scales, StaticScales | None]:
    """Return the FP8 scales of a call, none with MX; with STATIC_MX also the scales of the inputs."""
    rows, hidden = given.hidden_states.shape
    weights = (given.gate_up_proj_scale, given.down_proj_scale)
    inputs = (given.gate_up_in_scale, given.down_in_scale)
    if given.kind not in MX:
        scales = read_scales(weights, inputs, experts, hidden, inner, rows)
        require_fp8_scales(given)
        return scales, None
    if given.spec.shard_on_block.quantization_type is QuantizationType.STATIC_MX:
        scales = read_scales(weights, (None, None), experts, hidden, inner, rows)
        return scales, static_input_scales(*inputs, experts)
    refuse_input_scales(given)
    return Scales(), None


def _mx_rule(given: Arguments, *, online: bool) -> ScaleRule:
    """Return the rule of the online quantization; refuse a choice where nothing is quantized by it."""
    rule = choose(ScaleRule, given.mx_scale_rule, argument="mx_scale_rule")
    if not online and rule is not ScaleRule.NEURON:
        expected = "left at its default without online MX quantization"
        fix = "Only the MX implementations quantize by it, and not with quantization_type=STATIC_MX."
        raise ConfigError.about("mx_scale_rule", expected, repr(given.mx_scale_rule), fix)
    return rule


def _place(given: Arguments) -> Place:
    """Return what the affinity multiplies: PRE_SCALE means two things upstream."""
    if given.on_inner:
        return Place.INTERMEDIATE
    if given.expert_affinities_scaling_mode is ExpertAffinityScaleMode.NO_SCALE:
        return Place.NOTHING
    if given.expert_affinities_scaling_mode is ExpertAffinityScaleMode.POST_SCALE:
        return Place.OUTPUT
    on_input = given.convention == "golden" or given.kind is MoECTEImplementation.shard_on_block
    return Place.INPUT if on_input else Place.PRE_ACTIVATIONS
