"""From the documented arguments of the blockwise MoE forward to a checked problem.

Legend: T real tokens, T' rows of the token tensors (T + 1 with a sink row, T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots, R real (token, expert) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import check_flags, check_record, check_shape, shown
from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.formats.constants import ScaleRule, choose
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows
from hf_neuron_moe.reference.moe_cte_epilogue import Limits
from hf_neuron_moe.reference.moe_cte_operands import (
    FLOATS,
    Arguments,
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
    weight_scales,
)
from hf_neuron_moe.reference.moe_cte_rules import MX, Choices, Sizes, check_always, check_device_limits
from hf_neuron_moe.reference.moe_cte_scales import Scales, read_scales
from hf_neuron_moe.reference.moe_mx import MXExperts
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationType,
    SkipMode,
    as_member,
)

CONVENTIONS = ("device", "golden")
GATE_LIMITS = ("gate_clamp_upper_limit", "gate_clamp_lower_limit")
CLAMP_LIMITS = (*GATE_LIMITS, "up_clamp_upper_limit", "up_clamp_lower_limit")


class Place(Enum):
    """What the affinity multiplies."""

    NOTHING = auto()
    OUTPUT = auto()
    INPUT = auto()
    PRE_ACTIVATIONS = auto()
    INTERMEDIATE = auto()


@dataclass(frozen=True)
class Problem:
    """A checked call.

    Attributes:
        hidden: ``[T', H]``.
        rows: the plan's real slots.
        block_to_expert: int64 ``[N]``, ids below E.
        affinity_R: fp32.
        weights: one expert's projections.
        weights_are_exact: they are fp32 values that must not be rounded again.
        experts: E.
        inner: I.
        bias_E2I: fp32.
        down_bias_EH: fp32.
        scales: FP8 scales.
        limits: clamp limits.
        choices: the options.
        place: what the affinity multiplies.
        rounded: dtype values between matmuls are rounded to.
        mx: the MX weights, where there are any.
        static_inputs: STATIC_MX input scales ``(gate_up [E], down [E])``.
        mx_rule: scale rule of the online quantization.
        golden: compute what the numpy reference does where the device differs.
        keep: return the activations.
        kept_dtype: their dtype.
        output_dtype: of the output.
        sink: whether the token tensors have a sink row.
    """

    hidden: Tensor
    rows: BlockRows
    block_to_expert: Tensor
    affinity_R: Tensor
    weights: Callable[[int], FFNWeights]
    weights_are_exact: bool
    experts: int
    inner: int
    bias_E2I: Tensor | None
    down_bias_EH: Tensor | None
    scales: Scales
    limits: Limits
    choices: Choices
    place: Place
    rounded: torch.dtype
    mx: MXExperts | None
    static_inputs: tuple[list[float], list[float]] | None
    mx_rule: ScaleRule
    golden: bool
    keep: bool
    kept_dtype: torch.dtype
    output_dtype: torch.dtype
    sink: bool


def check_arguments(given: Arguments) -> Problem:
    """Check a call against the documented rules and resolve its options.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule.
    """
    gate_up_scale, down_scale = weight_scales(given)
    choices = _choices(given, gate_up_scale is not None)
    spec, kind = choices.spec, choices.spec.implementation
    _check_numbers(given)
    check_tokens(given)
    rows, hidden = given.hidden_states.shape
    mx, static = None, None
    if kind in MX:
        mx = mx_experts(given, spec, gate_up_scale, down_scale)
        experts, inner = mx.gate_up.shape[0], mx.inner
    else:
        experts, inner = check_weights(given)
    table, name = given.expert_affinities_masked, "expert_affinities_masked"
    check_shape(table, (rows * experts, 1), "[T' * E, 1]", argument=name)
    sizes = (experts, hidden, inner, rows)
    scales = Scales()
    if mx is None:
        scales = read_scales(gate_up_scale, down_scale, given.gate_up_in_scale, given.down_in_scale, sizes)
        require_fp8_scales(given, gate_up_scale)
    elif spec.shard_on_block.quantization_type is QuantizationType.STATIC_MX:
        scales = read_scales(gate_up_scale, down_scale, None, None, sizes)
        static = static_input_scales(given.gate_up_in_scale, given.down_in_scale, experts)
    else:
        refuse_input_scales(given)
    tokens = rows - 1 if not choices.skip.skip_token else rows
    limits_apply = given.device_limits
    if limits_apply is None:
        limits_apply = given.hidden_states.dtype == torch.bfloat16 and given.convention == "device"
    run_sizes = Sizes(tokens, hidden, inner, given.block_size, given.block_to_expert.numel())
    check_always(choices, run_sizes)
    if limits_apply:
        check_device_limits(choices, run_sizes)
        check_fp8_range(given)
    plan_ids = (given.token_position_to_id, given.block_to_expert, given.block_size)
    plan = block_rows(*plan_ids, tokens, experts)
    check_plan(plan, given.block_to_expert, experts, choices)
    check_conditions(given.conditions, plan, spec, experts)
    biases = read_biases(given, mx, experts, hidden, inner)
    return _problem(given, choices, plan, mx, static, scales, biases, experts, inner)


def _problem(
    given: Arguments,
    choices: Choices,
    plan: BlockRows,
    mx: MXExperts | None,
    static: tuple[list[float], list[float]] | None,
    scales: Scales,
    biases: tuple[Tensor | None, Tensor | None],
    experts: int,
    inner: int,
) -> Problem:
    hidden, kind = given.hidden_states, choices.spec.implementation
    in_fp32 = hidden.dtype == torch.float32 or given.compute_dtype == torch.float32
    rounded = torch.float32 if in_fp32 else torch.bfloat16
    golden = given.convention == "golden"
    weight_dtype = given.gate_up_proj_weight.dtype
    kept_dtype = rounded if rounded == torch.bfloat16 or weight_dtype not in FLOATS else weight_dtype
    return Problem(
        hidden=hidden,
        rows=plan,
        block_to_expert=given.block_to_expert.reshape(-1).long().clamp(max=experts - 1),
        affinity_R=plan.affinity(given.expert_affinities_masked, experts),
        weights=mx.expert if mx is not None else expert_weights(given, scales),
        weights_are_exact=mx is not None or scales.gate_up_block is not None,
        experts=experts,
        inner=inner,
        bias_E2I=biases[0],
        down_bias_EH=biases[1],
        scales=scales,
        limits=Limits(
            given.gate_clamp_upper_limit,
            given.gate_clamp_lower_limit,
            given.up_clamp_upper_limit,
            given.up_clamp_lower_limit,
        ),
        choices=choices,
        place=_place(choices, golden=golden),
        rounded=rounded,
        mx=mx,
        static_inputs=static,
        mx_rule=_mx_rule(given, online=mx is not None and static is None),
        golden=golden,
        keep=kind is MoECTEImplementation.shard_on_i_dropping or choices.spec.shard_on_I.checkpoint_activation,
        kept_dtype=kept_dtype,
        output_dtype=given.accumulation_dtype or hidden.dtype,
        sink=not choices.skip.skip_token,
    )


def _mx_rule(given: Arguments, *, online: bool) -> ScaleRule:
    """Return the rule of the online quantization; refuse a choice where nothing is quantized by it."""
    rule = choose(ScaleRule, given.mx_scale_rule, argument="mx_scale_rule")
    if not online and rule is not ScaleRule.NEURON:
        raise ConfigError.about(
            "mx_scale_rule",
            "left at its default without online MX quantization",
            repr(given.mx_scale_rule),
            "Only the MX implementations quantize by it, and not with quantization_type=STATIC_MX.",
        )
    return rule


def _place(choices: Choices, *, golden: bool) -> Place:
    """Return what the affinity multiplies: PRE_SCALE means two things upstream."""
    if choices.on_inner:
        return Place.INTERMEDIATE
    if choices.mode is ExpertAffinityScaleMode.NO_SCALE:
        return Place.NOTHING
    if choices.mode is ExpertAffinityScaleMode.POST_SCALE:
        return Place.OUTPUT
    on_input = golden or choices.spec.implementation is MoECTEImplementation.shard_on_block
    return Place.INPUT if on_input else Place.PRE_ACTIVATIONS


def _choices(given: Arguments, fp8_scales: bool) -> Choices:
    check_record(given.spec, MoECTESpec, argument="spec", optional=False)
    check_record(given.skip_dma, SkipMode, argument="skip_dma", optional=False)
    flags: dict[str, object] = {
        "is_tensor_update_accumulating": given.is_tensor_update_accumulating,
        "skip_gate_proj": given.skip_gate_proj,
    }
    check_flags(flags if given.device_limits is None else flags | {"device_limits": given.device_limits})
    mode = as_member(
        given.expert_affinities_scaling_mode, ExpertAffinityScaleMode, argument="expert_affinities_scaling_mode"
    )
    return Choices(
        spec=given.spec,
        activation=as_member(given.activation_function, ActFnType, argument="activation_function"),
        mode=mode,
        skip=given.skip_dma,
        accumulating=given.is_tensor_update_accumulating,
        fp8_scales=fp8_scales,
        skip_gate=given.skip_gate_proj,
    )


def _check_numbers(given: Arguments) -> None:
    """Check dtypes, names and the arguments that upstream accepts without effect."""
    for name in CLAMP_LIMITS:
        _check_limit(getattr(given, name), name)
    limited = [name for name in GATE_LIMITS if given.skip_gate_proj and getattr(given, name) is not None]
    checks: list[tuple[bool, str, str, object, str]] = [
        (
            given.compute_dtype in FLOATS, "compute_dtype", "torch.bfloat16 or torch.float32", given.compute_dtype,
            "float32 leaves out the roundings between matmuls.",
        ),
        (
            given.accumulation_dtype in (None, *FLOATS), "accumulation_dtype", "None, torch.bfloat16 or torch.float32",
            given.accumulation_dtype, "None returns the dtype of hidden_states.",
        ),
        (
            given.convention in CONVENTIONS, "convention", f"one of {', '.join(CONVENTIONS)}", repr(given.convention),
            "'device' is what the kernels compute, 'golden' what their numpy reference does.",
        ),
        (
            not limited, ", ".join(limited), "None with skip_gate_proj", "a limit", "There is no gate to clamp.",
        ),
        (
            given.gate_up_activations_T is None, "gate_up_activations_T", "None", "a tensor",
            "Upstream never writes it; set spec.shard_on_I.checkpoint_activation and take the returned one.",
        ),
        (
            given.down_activations is None, "down_activations", "None", "a tensor",
            "Upstream never writes it; set spec.shard_on_I.checkpoint_activation and take the returned one.",
        ),
    ]  # fmt: skip
    for fits, argument, expected, got, remedy in checks:
        if not fits:
            raise ConfigError.about(argument, expected, got, remedy)
    if type(given.block_size) is not int or given.block_size <= 0:
        raise ShapeError.about(
            "block_size", "a positive int", repr(given.block_size), "Pass the block size the plan was made with."
        )


def _check_limit(limit: object, name: str) -> None:
    """Refuse a clamp limit that is no number; NaN would make every clamped value NaN."""
    number = isinstance(limit, int | float) and not isinstance(limit, bool) and not math.isnan(limit)
    if limit is not None and not number:
        raise ConfigError.about(
            name, "None or a number that is not NaN", shown(limit), "None is no limit; a tensor's value is its .item()."
        )
