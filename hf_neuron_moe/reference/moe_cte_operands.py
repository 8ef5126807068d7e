"""The tensors of a blockwise MoE forward call, each checked against the documented layouts.

Legend: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots, R real pairs.

Source: nki-library 2.29 ``moe_cte``; FP8 dtypes and block scales as of 2.31.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import ExpertStack
from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import check_dtype, check_record, check_same_device, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.moe_mx import moe_bias_from_lanes
from hf_neuron_moe.reference.block_rows import BlockRows
from hf_neuron_moe.reference.moe_cte_rules import CONDITION_TAILS, HYBRID, Choices
from hf_neuron_moe.reference.moe_cte_scales import SCALE_BLOCK, Scales, require_pair
from hf_neuron_moe.reference.moe_mx import MXExperts, read_mx_weights
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationConfig,
    QuantizationType,
    SkipMode,
)

FLOATS = (torch.bfloat16, torch.float32)
_WEIGHTS = (*FLOATS, torch.float8_e4m3fn)
_LARGEST_E4M3 = 0x77
"""Code of 240, the largest finite value of the device's e4m3; 256 to 448 of e4m3fn are its infinity and NaNs."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of ``moe_cte`` under their documented names."""

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
    activation_function: ActFnType | str = ActFnType.SiLU
    skip_dma: SkipMode = NO_SKIP
    compute_dtype: torch.dtype = torch.bfloat16
    is_tensor_update_accumulating: bool = True
    expert_affinities_scaling_mode: ExpertAffinityScaleMode | str = ExpertAffinityScaleMode.POST_SCALE
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    gate_up_in_scale: Tensor | None = None
    down_in_scale: Tensor | None = None
    accumulation_dtype: torch.dtype | None = None
    skip_gate_proj: bool = False
    convention: str = "device"
    device_limits: bool | None = None
    mx_scale_rule: str = "neuron"


def weight_scales(given: Arguments) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight scales; the direct arguments of 2.30 win over `quantization_config`."""
    check_record(given.quantization_config, QuantizationConfig, argument="quantization_config")
    config = given.quantization_config or QuantizationConfig()
    gate_up = config.gate_up_proj_scale if given.gate_up_proj_scale is None else given.gate_up_proj_scale
    down = config.down_proj_scale if given.down_proj_scale is None else given.down_proj_scale
    require_pair(gate_up, down, ("gate_up_proj_scale", "down_proj_scale"))
    return gate_up, down


def check_tokens(given: Arguments) -> None:
    """Check hidden states, affinities and the plan's tensors, and that all operands share a device."""
    check_dtype(given.hidden_states, FLOATS, argument="hidden_states")
    check_shape(given.hidden_states, (None, None), "[T', H]", argument="hidden_states")
    check_dtype(given.expert_affinities_masked, FLOATS, argument="expert_affinities_masked")
    for name in ("token_position_to_id", "block_to_expert"):
        check_dtype(getattr(given, name), (torch.int32, torch.int64), argument=name)
    tensors = {name: value for name, value in vars(given).items() if isinstance(value, Tensor)}
    check_same_device({"hidden_states": given.hidden_states, **tensors})


def check_weights(given: Arguments) -> tuple[int, int]:
    """Check weights ``[E, H, 2, I]`` and ``[E, I, H]``; return E and I."""
    gate_up, down = given.gate_up_proj_weight, given.down_proj_weight
    check_dtype(gate_up, _WEIGHTS, argument="gate_up_proj_weight")
    check_dtype(down, (gate_up.dtype,), argument="down_proj_weight")
    hidden = given.hidden_states.shape[1]
    check_shape(gate_up, (None, hidden, 2, None), "[E, H, 2, I]", argument="gate_up_proj_weight")
    experts, inner = gate_up.shape[0], gate_up.shape[3]
    check_shape(down, (experts, inner, hidden), "[E, I, H]", argument="down_proj_weight")
    return experts, inner


def require_fp8_scales(given: Arguments, scale: Tensor | None) -> None:
    """Refuse FP8 weights without scales: upstream would multiply the bare codes."""
    if given.gate_up_proj_weight.dtype == torch.float8_e4m3fn and scale is None:
        raise ConfigError.about(
            "gate_up_proj_scale",
            "given with float8 weights",
            "None",
            "Pass gate_up_proj_scale and down_proj_scale, or weights in bf16.",
        )


def check_fp8_range(given: Arguments) -> None:
    """Refuse FP8 weights above 240, where the device's e4m3 ends."""
    for name in ("gate_up_proj_weight", "down_proj_weight"):
        weight = getattr(given, name)
        if weight.dtype == torch.float8_e4m3fn and bool(((weight.view(torch.uint8) & 0x7F) > _LARGEST_E4M3).any()):
            raise DTypeError.about(
                name,
                "made of magnitudes up to 240 (the device's e4m3 has no 256 to 448)",
                "a larger one",
                "Quantize to a range of 240.",
            )


def expert_weights(given: Arguments, scales: Scales) -> Callable[[int], FFNWeights]:
    """Return a function from an expert's number to its projections; block scales are multiplied in, in fp32."""
    gate_up, down = given.gate_up_proj_weight, given.down_proj_weight
    experts, hidden, _, inner = gate_up.shape
    if scales.gate_up_block is None or scales.down_block is None:
        return ExpertStack(gate_up.reshape(experts, hidden, 2 * inner), down, transposed=True).expert
    gate_up_block, down_block = scales.gate_up_block, scales.down_block

    def dequantize(number: int) -> FFNWeights:
        tiles = gate_up[number].float().view(-1, SCALE_BLOCK, 2, inner // SCALE_BLOCK, SCALE_BLOCK)
        gate_up_H2I = tiles.mul_(gate_up_block[number][:, None, :, :, None]).view(hidden, 2, inner)
        down_tiles = down[number].float().view(-1, SCALE_BLOCK, hidden // SCALE_BLOCK, SCALE_BLOCK)
        down_IH = down_tiles.mul_(down_block[number][:, None, :, None]).view(inner, hidden)
        return FFNWeights(gate_up_H2I[:, 0].t(), gate_up_H2I[:, 1].t(), down_IH.t())

    return dequantize


def mx_experts(
    given: Arguments, spec: MoECTESpec, gate_up_scale: Tensor | None, down_scale: Tensor | None
) -> MXExperts:
    """Check the weights of an MX implementation and their scales, which are required."""
    if gate_up_scale is None:
        raise ConfigError.about(
            "gate_up_proj_scale",
            f"given with {spec.implementation.name}",
            "None",
            "Pass the scales that quantize_moe_gate_up and quantize_moe_down return.",
        )
    static = spec.shard_on_block.quantization_type is QuantizationType.STATIC_MX
    return read_mx_weights(
        given.gate_up_proj_weight,
        given.down_proj_weight,
        None if static else gate_up_scale,
        None if static else down_scale,
        hidden=given.hidden_states.shape[1],
        weight_dtype=spec.shard_on_block.weight_dtype,
        packed=spec.shard_on_block.use_packed_scales,
    )


def static_input_scales(gate_up: Tensor | None, down: Tensor | None, experts: int) -> tuple[list[float], list[float]]:
    """Return STATIC_MX's input scale of every expert, for the hidden states and for the intermediate."""
    if not require_pair(gate_up, down, ("gate_up_in_scale", "down_in_scale")) or gate_up is None or down is None:
        raise ConfigError.about(
            "gate_up_in_scale",
            "given with quantization_type=STATIC_MX",
            "None",
            "Pass the per-tensor scales the activations are quantized with.",
        )
    check_shape(gate_up, (experts, 2, 1), "[E, 2, 1]", argument="gate_up_in_scale")
    check_shape(down, (experts, 1), "[E, 1]", argument="down_in_scale")
    if not torch.equal(gate_up[:, 0], gate_up[:, 1]):
        raise ShapeError.about(
            "gate_up_in_scale",
            "equal for gate and up (they multiply the same quantized hidden states)",
            "two scales",
            "Use the larger of them for both.",
        )
    return gate_up[:, 0, 0].float().tolist(), down[:, 0].float().tolist()


def refuse_input_scales(given: Arguments) -> None:
    """Refuse activation scales where the activations get MX scales online."""
    for name in ("gate_up_in_scale", "down_in_scale"):
        if getattr(given, name) is not None:
            raise ConfigError.about(
                name,
                "None with MX weights",
                "a scale",
                "Activations are quantized online; static scales need quantization_type=STATIC_MX.",
            )


def read_biases(
    given: Arguments, mx: MXExperts | None, experts: int, hidden: int, inner: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases as fp32 ``[E, 2, I]`` (with MX, I padded to whole tiles) and ``[E, H]``."""
    gate_up, down = given.gate_and_up_proj_bias, given.down_proj_bias
    names = ("gate_and_up_proj_bias", "down_proj_bias")
    require_pair(gate_up, down, names)
    if gate_up is None or down is None:
        return None, None
    for name, bias in zip(names, (gate_up, down), strict=True):
        check_dtype(bias, FLOATS, argument=name)
    check_shape(down, (experts, hidden), "[E, H]", argument=names[1])
    if mx is None:
        check_shape(gate_up, (experts, 2, inner), "[E, 2, I]", argument=names[0])
        return gate_up.float(), down.float()
    _, partitions, tiles, _ = mx.down.shape
    lanes = (experts, partitions, 2, tiles, 4)
    check_shape(gate_up, lanes, "[E, pI, 2, ceil(I/512), 4]", argument=names[0])
    return moe_bias_from_lanes(gate_up).float(), down.float()


def check_plan(plan: BlockRows, block_to_expert: Tensor, experts: int, choices: Choices) -> None:
    """Check what an implementation needs of its plan."""
    if choices.spec.implementation is MoECTEImplementation.shard_on_i_dropping:
        expected = torch.arange(experts, device=block_to_expert.device)
        if block_to_expert.numel() != experts or not torch.equal(block_to_expert.reshape(-1).long(), expected):
            raise ShapeError.about(
                "block_to_expert",
                "0..E-1 with shard_on_i_dropping (block e is expert e)",
                str(block_to_expert.reshape(-1).tolist()),
                "Lay the tokens out with one block per expert.",
            )
    if not choices.accumulating and len(plan.token_R) and int(torch.bincount(plan.token_R).max()) > 1:
        raise ConfigError.about(
            "is_tensor_update_accumulating",
            "True where a token goes to several experts",
            "False",
            "Without accumulation the last block's result would replace the others'.",
        )


def check_conditions(conditions: Tensor | None, plan: BlockRows, spec: MoECTESpec, experts: int) -> None:
    """Check ``conditions``: their length, and that every block with tokens is computed.

    shard_on_block's generator makes one flag per pair of blocks, which no kernel reads: only its length is checked. The
    hybrid kernels compute ``num_static_block`` blocks (default N - E), then go on up to the sum of the conditions.
    """
    kind, blocks = spec.implementation, plan.blocks

    def check(fits: bool, expected: str, got: object) -> None:
        if not fits:
            remedy = "build_block_plan returns them: 1 for blocks with tokens, 0 for spare ones, then zeros."
            raise ShapeError.about("conditions", expected, got, remedy)

    check(conditions is not None or kind not in HYBRID, f"given with {kind.name}", None)
    if conditions is None:
        return
    check_dtype(conditions, (torch.int32, torch.int64, torch.bool, torch.uint8), argument="conditions")
    flags = conditions.reshape(-1)
    lengths = [blocks + tail for tail in CONDITION_TAILS.get(kind, (1, 2))]
    per_pair = -(-blocks // 2) + 1
    if kind is MoECTEImplementation.shard_on_block and len(flags) == per_pair and per_pair not in lengths:
        return
    check(len(flags) in lengths, f"of length {' or '.join(map(str, lengths))} (N = {blocks})", len(flags))
    check(not bool(flags[blocks:].any()), "zero after the N flags of the blocks", flags.tolist())
    used = torch.zeros(blocks, dtype=torch.bool, device=flags.device)
    used[torch.div(plan.slot_R, plan.block_size, rounding_mode="floor")] = True
    check(not bool((used & (flags[:blocks] == 0)).any()), "nonzero for every block with tokens", flags.tolist())
    if kind in HYBRID:
        static = spec.shard_on_I.num_static_block
        reached = max(blocks - experts if static is None else static, int((flags != 0).sum()))
        last = int(used.nonzero().max()) if bool(used.any()) else -1
        if last >= reached:
            raise ShapeError.about(
                "conditions",
                f"a plan whose first {reached} blocks have all the tokens (max of the static blocks and the "
                f"number of flags set, {reached}, is where {kind.name} stops)",
                f"tokens in block {last}, counted from 0",
                'Hybrids take no spare blocks in between: build the plan with spare_blocks="last", not "split", '
                f"or set spec.shard_on_I.num_static_block to {last + 1} or more.",
            )
