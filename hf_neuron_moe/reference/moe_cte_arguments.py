"""The arguments of ``moe_cte``, declared once: names, order, defaults, what they are, and the checks of options.

Legend: T real tokens, T' rows of the token tensors (T + 1 with a sink row, T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import Limits
from hf_neuron_moe.checks import Rule, check_record, check_rules, shown
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.reference.block_rows import FLOATS, check_block_size, execution_rules
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationConfig,
    SkipMode,
    as_member,
    check_switches,
    is_number,
)
from hf_neuron_moe.reference.specification import check_documented_values, check_limits

CONVENTIONS = ("device", "golden")
GATE_LIMITS = ("gate_clamp_upper_limit", "gate_clamp_lower_limit")
UP_LIMITS = ("up_clamp_upper_limit", "up_clamp_lower_limit")


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``moe_cte`` under their documented names; docs/kernels.md says what is refused where."""

    hidden_states: Tensor  # bf16 or fp32 [T', H], a sink row of zeros; fp32, which no device takes, stays fp32
    expert_affinities_masked: Tensor  # bf16 or fp32 [T' * E, 1], token-major, zero where not selected
    gate_up_proj_weight: Tensor  # [E, H, 2, I] (0 gate, 1 up): bf16, fp32 or e4m3fn. MX: words [E, 128, 2, H/512, I]
    down_proj_weight: Tensor  # [E, I, H] in the same dtype. MX: words [E, pI, ceil(I/512), H], see formats.moe_mx
    token_position_to_id: Tensor  # int [N * B]; T (or -1 with skip_token) marks unused slots
    block_to_expert: Tensor  # int [N]
    block_size: int  # B
    spec: MoECTESpec  # implementation and its options; MX weight storage is in spec.shard_on_block for all MX ones
    conditions: Tensor | None = None  # [N + 1] (hybrids) or [N + 2] (shard_on_block_mx)
    gate_and_up_proj_bias: Tensor | None = None  # [E, 2, I]; MX [E, pI, 2, ceil(I/512), 4]
    down_proj_bias: Tensor | None = None  # [E, H]
    quantization_config: QuantizationConfig | None = None  # scales that are not given directly
    gate_up_proj_scale: Tensor | None = None  # FP8 (shapes in moe_cte_scales) or MX scales; likewise the next
    down_proj_scale: Tensor | None = None
    gate_up_activations_T: Tensor | None = None  # must be None, like the next
    down_activations: Tensor | None = None
    activation_function: ActFnType = ActFnType.SiLU  # of the gate
    skip_dma: SkipMode = NO_SKIP  # skip_token says how unused slots are marked; skip_weight has no effect on values
    compute_dtype: torch.dtype = torch.bfloat16  # of values between matmuls with bf16 hidden states; fp32: no rounding
    is_tensor_update_accumulating: bool = True  # False only where every token is in at most one block
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE
    gate_clamp_upper_limit: float | None = None  # of pre-activations; backward from bf16 needs limits that bf16 holds
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    gate_up_in_scale: Tensor | None = None  # [T', 1] or [E, 2, 1]
    down_in_scale: Tensor | None = None  # [T', 1] or [E, 1], likewise
    accumulation_dtype: torch.dtype | None = None  # of the output; None is that of hidden_states
    skip_gate_proj: bool = False  # h = act(u); the weights keep their layout
    _: KW_ONLY
    convention: str = "device"  # or "golden"
    device_limits: bool | None = None  # enforce the kernels' limits; None: for bf16 by the device convention
    limits: str | None = None  # "kernel": what device_limits=True enforces; "documented": the page's bounds too
    mx_scale_rule: str = "neuron"  # 2^(emax - 7) for e4m3; "floor": 2^(emax - 8)
    execute: str = "fast"  # "tiles" walks the documented loops, block by block and core by core (block_walk)
    accumulation: str = "convention"  # fp32 sums, rounded once; "device": rounded after every core and block
    upstream_bugs: tuple[str, ...] = ()  # faults of the kernels to compute, by the names of upstream_bugs.FORWARD

    @property
    def kind(self) -> MoECTEImplementation:
        """The implementation."""
        return self.spec.implementation

    @property
    def walks(self) -> bool:
        """Whether the call is computed block by block."""
        return self.execute == "tiles" or self.accumulation == "device" or bool(self.upstream_bugs)

    @property
    def on_inner(self) -> bool:
        """Whether the intermediate is multiplied by the affinity."""
        return self.spec.shard_on_I.expert_affinity_multiply_on_I

    @property
    def tokens(self) -> int:
        """T."""
        return self.hidden_states.shape[0] - (not self.skip_dma.skip_token)

    @property
    def clamps(self) -> tuple[Limits, Limits]:
        """Upper and lower clamp limit of gate and of up. The upper one is applied first, so the lower one wins."""
        gate = (self.gate_clamp_upper_limit, self.gate_clamp_lower_limit)
        return gate, (self.up_clamp_upper_limit, self.up_clamp_lower_limit)

    @property
    def clamped(self) -> bool:
        """Whether there is a limit."""
        return any(limit is not None for limits in self.clamps for limit in limits)

    @property
    def limited(self) -> bool:
        """Whether the limits of the device hold."""
        if self.limits is not None or self.device_limits is not None:
            return self.device_limits is not False
        return self.hidden_states.dtype == torch.bfloat16 and self.convention == "device"


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
    check_switches(given)
    check_limits(given.limits, given.device_limits)
    check_documented_values("moe_cte", vars(given))
    name = "expert_affinities_scaling_mode"
    mode = as_member(given.expert_affinities_scaling_mode, ExpertAffinityScaleMode, argument=name)
    activation = as_member(given.activation_function, ActFnType, argument="activation_function")
    check_rules(_option_rules(given))
    check_block_size(given.block_size)
    return replace(
        given,
        gate_up_proj_scale=gate_up,
        down_proj_scale=down,
        expert_affinities_scaling_mode=mode,
        activation_function=activation,
    )


def require_pair(first: Tensor | None, second: Tensor | None, names: tuple[str, str]) -> None:
    """Raise ConfigError if one of a pair is given without the other; upstream ignores it then."""
    if (first is None) != (second is None):
        missing, given = names if first is None else names[::-1]
        fix = f"Pass both or neither; zeros (for biases) or ones (for scales) stand for a missing {missing}."
        raise ConfigError.about(missing, f"given together with {given}", "None", fix)


def _option_rules(given: Arguments) -> Iterator[Rule]:
    """Rules of numbers, dtypes and names, and of the arguments that upstream accepts without effect."""
    fix = "None is no limit; a tensor's value is its .item()."
    for name in (*GATE_LIMITS, *UP_LIMITS):
        limit = getattr(given, name)
        yield Rule(limit is None or is_number(limit), name, "None or a number that is not NaN", shown(limit), fix)
    two, fix = "torch.bfloat16 or torch.float32", "float32 leaves out the roundings between matmuls."
    yield Rule(given.compute_dtype in FLOATS, "compute_dtype", two, given.compute_dtype, fix)
    dtype, fix = given.accumulation_dtype, "None returns the dtype of hidden_states."
    yield Rule(dtype in (None, *FLOATS), "accumulation_dtype", f"None, {two}", dtype, fix)
    fix = "'device' is what the kernels compute, 'golden' what their numpy reference does."
    rule = f"one of {', '.join(CONVENTIONS)}"
    yield Rule(given.convention in CONVENTIONS, "convention", rule, repr(given.convention), fix)
    yield from execution_rules(given.execute, given.accumulation, given.upstream_bugs)
    fix = "The numpy reference has no cores and no roundings between blocks."
    fits = given.accumulation == "convention" or given.convention == "device"
    rule = "'convention' with convention 'golden'"
    yield Rule(fits, "accumulation", rule, repr(given.accumulation), fix)
    limited = [name for name in GATE_LIMITS if given.skip_gate_proj and getattr(given, name) is not None]
    yield Rule(not limited, ", ".join(limited), "None with skip_gate_proj", "a limit", "There is no gate to clamp.")
    fix = "Upstream never writes it; set spec.shard_on_I.checkpoint_activation and take the returned one."
    for name in ("gate_up_activations_T", "down_activations"):
        yield Rule(getattr(given, name) is None, name, "None", "a tensor", fix)
