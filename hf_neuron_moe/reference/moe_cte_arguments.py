"""The arguments of ``moe_cte``, declared once: names, order, defaults, what they are, and the checks of options.

Legend: T real tokens, T' rows of the token tensors (T + 1 with a sink row, T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_flags, check_optional_flag, check_record, check_rules, shown
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.moe_cte_epilogue import Limits
from hf_neuron_moe.reference.moe_cte_scales import require_pair
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationConfig,
    SkipMode,
    as_member,
    is_number,
)

FLOATS = (torch.bfloat16, torch.float32)
CONVENTIONS = ("device", "golden")
GATE_LIMITS = ("gate_clamp_upper_limit", "gate_clamp_lower_limit")
CLAMP_LIMITS = (*GATE_LIMITS, "up_clamp_upper_limit", "up_clamp_lower_limit")


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``moe_cte`` under their documented names.

    Attributes:
        hidden_states: bf16 or fp32 ``[T', H]``. fp32 (which no device takes) is computed in fp32 throughout.
        expert_affinities_masked: bf16 or fp32 ``[T' * E, 1]``, dense, token-major, zero where not selected.
        gate_up_proj_weight: ``[E, H, 2, I]`` (0 gate, 1 up): bf16, fp32 or float8_e4m3fn with scales. MX: x4 words
            ``[E, 128, 2, H/512, I]``, see :mod:`hf_neuron_moe.formats.moe_mx`.
        down_proj_weight: ``[E, I, H]`` in the same dtype. MX: ``[E, pI, ceil(I/512), H]``.
        token_position_to_id: int ``[N * B]``; T (or -1 with skip_token) marks unused slots.
        block_to_expert: int ``[N]``.
        block_size: B.
        spec: implementation and its options. MX weight storage is in ``spec.shard_on_block`` for all MX ones.
        conditions: ``[N + 1]`` (hybrids, required) or ``[N + 2]`` (shard_on_block_mx): 1 for blocks with tokens.
            Checked against the plan; without effect on values, and elsewhere accepted.
        gate_and_up_proj_bias: ``[E, 2, I]``; MX ``[E, pI, 2, ceil(I/512), 4]``. Nothing adds 1 for gpt-oss: the caller
            stores up_bias + 1 and shifts both up limits by 1.
        down_proj_bias: ``[E, H]``.
        quantization_config: scales, where not given directly.
        gate_up_proj_scale: FP8 (shapes in :mod:`hf_neuron_moe.reference.moe_cte_scales`) or MX scales.
        down_proj_scale: likewise.
        gate_up_activations_T: must be None.
        down_activations: must be None.
        activation_function: of the gate.
        skip_dma: skip_token says how the plan marks unused slots; skip_weight has no effect on values.
        compute_dtype: dtype of the values between matmuls with bf16 hidden states: bf16, or fp32 for no rounding.
        is_tensor_update_accumulating: False only where every token is in at most one block; no effect on values.
        expert_affinities_scaling_mode: what the affinity multiplies. PRE_SCALE (and _DELAYED) multiplies the clamped
            pre-activations in shard_on_i and the input in shard_on_block; by the golden convention always the input.
        gate_clamp_upper_limit: limits of the pre-activations, None or a number. A backward from bf16 checkpoints needs
            limits that bf16 holds, see ``blockwise_mm_bwd``.
        gate_clamp_lower_limit: see above.
        up_clamp_upper_limit: see above.
        up_clamp_lower_limit: see above.
        gate_up_in_scale: activation scale ``[T', 1]`` or ``[E, 2, 1]``, multiplied after the weight scale; with
            STATIC_MX the scale the hidden states are quantized with.
        down_in_scale: ``[T', 1]`` or ``[E, 1]``, likewise.
        accumulation_dtype: dtype of the output; None is that of `hidden_states`. Sums are fp32 in any case and rounded
            once, where the device rounds the running output of every block.
        skip_gate_proj: ``h = act(u)``; the weights keep their layout.
        convention: ``"device"``, or ``"golden"`` for upstream's numpy reference: PRE_SCALE and down activations as said
            above, and MX without rounding h to bf16 before its quantization.
        device_limits: enforce the kernels' limits; None enforces them for bf16 hidden states by the device convention.
        mx_scale_rule: block scales of the online MX quantization: ``"neuron"`` (nki 0.5 and later: 2^(emax - 7) for
            e4m3) or ``"floor"`` (earlier releases and their references: 2^(emax - 8)). Refused where nothing is
            quantized by it.
    """

    hidden_states: Tensor
    expert_affinities_masked: Tensor
    gate_up_proj_weight: Tensor
    down_proj_weight: Tensor
    token_position_to_id: Tensor
    block_to_expert: Tensor
    block_size: int
    spec: MoECTESpec
    conditions: Tensor | None = None
    gate_and_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None
    quantization_config: QuantizationConfig | None = None
    gate_up_proj_scale: Tensor | None = None
    down_proj_scale: Tensor | None = None
    gate_up_activations_T: Tensor | None = None
    down_activations: Tensor | None = None
    activation_function: ActFnType = ActFnType.SiLU
    skip_dma: SkipMode = NO_SKIP
    compute_dtype: torch.dtype = torch.bfloat16
    is_tensor_update_accumulating: bool = True
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    gate_up_in_scale: Tensor | None = None
    down_in_scale: Tensor | None = None
    accumulation_dtype: torch.dtype | None = None
    skip_gate_proj: bool = False
    _: KW_ONLY
    convention: str = "device"
    device_limits: bool | None = None
    mx_scale_rule: str = "neuron"

    @property
    def kind(self) -> MoECTEImplementation:
        """The implementation."""
        return self.spec.implementation

    @property
    def on_inner(self) -> bool:
        """Whether the intermediate is multiplied by the affinity."""
        return self.spec.shard_on_I.expert_affinity_multiply_on_I

    @property
    def limits(self) -> Limits:
        """The clamp limits."""
        return Limits(*(getattr(self, name) for name in CLAMP_LIMITS))

    @property
    def limited(self) -> bool:
        """Whether the limits of the device hold."""
        if self.device_limits is not None:
            return self.device_limits
        return self.hidden_states.dtype == torch.bfloat16 and self.convention == "device"


class Sizes(NamedTuple):
    """T, H, I, B, N of a call."""

    tokens: int
    hidden: int
    inner: int
    block: int
    blocks: int


def resolved(given: Arguments) -> Arguments:
    """Check what is no tensor; return the call with enum members for names and the scales of `quantization_config`.

    Scales given directly (2.30 and later) win over those of the record.
    """
    check_record(given.quantization_config, QuantizationConfig, argument="quantization_config")
    config = given.quantization_config or QuantizationConfig()
    gate_up = config.gate_up_proj_scale if given.gate_up_proj_scale is None else given.gate_up_proj_scale
    down = config.down_proj_scale if given.down_proj_scale is None else given.down_proj_scale
    require_pair(gate_up, down, ("gate_up_proj_scale", "down_proj_scale"))
    check_record(given.spec, MoECTESpec, argument="spec", optional=False)
    check_record(given.skip_dma, SkipMode, argument="skip_dma", optional=False)
    check_flags({name: getattr(given, name) for name in ("is_tensor_update_accumulating", "skip_gate_proj")})
    check_optional_flag(given.device_limits, "device_limits")
    name = "expert_affinities_scaling_mode"
    mode = as_member(given.expert_affinities_scaling_mode, ExpertAffinityScaleMode, argument=name)
    activation = as_member(given.activation_function, ActFnType, argument="activation_function")
    check_rules(_option_rules(given))
    return replace(
        given,
        gate_up_proj_scale=gate_up,
        down_proj_scale=down,
        expert_affinities_scaling_mode=mode,
        activation_function=activation,
    )


def _option_rules(given: Arguments) -> Iterator[Rule]:
    """Rules of numbers, dtypes and names, and of the arguments that upstream accepts without effect."""
    values = {name: getattr(given, name) for name in (*CLAMP_LIMITS, "gate_up_activations_T", "down_activations")}
    fix = "None is no limit; a tensor's value is its .item()."
    for name in CLAMP_LIMITS:
        limit = values[name]
        yield Rule(limit is None or is_number(limit), name, "None or a number that is not NaN", shown(limit), fix)
    two, fix = "torch.bfloat16 or torch.float32", "float32 leaves out the roundings between matmuls."
    yield Rule(given.compute_dtype in FLOATS, "compute_dtype", two, given.compute_dtype, fix)
    dtype, fix = given.accumulation_dtype, "None returns the dtype of hidden_states."
    yield Rule(dtype in (None, *FLOATS), "accumulation_dtype", f"None, {two}", dtype, fix)
    fix = "'device' is what the kernels compute, 'golden' what their numpy reference does."
    rule = f"one of {', '.join(CONVENTIONS)}"
    yield Rule(given.convention in CONVENTIONS, "convention", rule, repr(given.convention), fix)
    limited = [name for name in GATE_LIMITS if given.skip_gate_proj and values[name] is not None]
    yield Rule(not limited, ", ".join(limited), "None with skip_gate_proj", "a limit", "There is no gate to clamp.")
    fix = "Upstream never writes it; set spec.shard_on_I.checkpoint_activation and take the returned one."
    for name in ("gate_up_activations_T", "down_activations"):
        yield Rule(values[name] is None, name, "None", "a tensor", fix)
    size, fix = given.block_size, "Pass the block size the plan was made with."
    yield Rule(type(size) is int and size > 0, "block_size", "a positive int", repr(size), fix, ShapeError)
