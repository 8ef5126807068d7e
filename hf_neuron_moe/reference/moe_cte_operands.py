"""The tensors of a blockwise MoE forward call, each checked against the documented layouts.

Legend: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots, R real pairs.

Source: nki-library 2.29 ``moe_cte``; FP8 dtypes and block scales as of 2.31.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import ExpertStack
from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import Rule, check_dtype, check_rules, check_same_device, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.moe_mx import moe_bias_from_lanes
from hf_neuron_moe.reference.block_rows import BlockRows, check_one_block_per_expert
from hf_neuron_moe.reference.moe_cte_arguments import FLOATS, Arguments
from hf_neuron_moe.reference.moe_cte_rules import CONDITION_TAILS, HYBRID
from hf_neuron_moe.reference.moe_cte_scales import SCALE_BLOCK, Scales, require_pair
from hf_neuron_moe.reference.moe_types import MoECTEImplementation, QuantizationType
from hf_neuron_moe.reference.mx_experts import MXExperts, read_mx_weights

_FP8 = torch.float8_e4m3fn
_LARGEST_E4M3 = 0x77
"""Code of 240, the largest finite value of the device's e4m3; 256 to 448 of e4m3fn are its infinity and NaNs."""


def check_tokens(given: Arguments) -> None:
    """Check hidden states, affinities and the plan's tensors, and that all operands share a device."""
    check_dtype(given.hidden_states, FLOATS, "hidden_states")
    check_shape(given.hidden_states, (None, None), "[T', H]", "hidden_states")
    check_dtype(given.expert_affinities_masked, FLOATS, "expert_affinities_masked")
    for name in ("token_position_to_id", "block_to_expert"):
        check_dtype(getattr(given, name), (torch.int32, torch.int64), name)
    check_same_device({name: value for name, value in vars(given).items() if isinstance(value, Tensor)})


def check_weights(given: Arguments) -> tuple[int, int]:
    """Check weights ``[E, H, 2, I]`` and ``[E, I, H]``; return E and I."""
    gate_up, down = given.gate_up_proj_weight, given.down_proj_weight
    check_dtype(gate_up, (*FLOATS, _FP8), "gate_up_proj_weight")
    check_dtype(down, (gate_up.dtype,), "down_proj_weight")
    hidden = given.hidden_states.shape[1]
    check_shape(gate_up, (None, hidden, 2, None), "[E, H, 2, I]", "gate_up_proj_weight")
    experts, inner = gate_up.shape[0], gate_up.shape[3]
    check_shape(down, (experts, inner, hidden), "[E, I, H]", "down_proj_weight")
    return experts, inner


def require_fp8_scales(given: Arguments) -> None:
    """Refuse FP8 weights without scales: upstream would multiply the bare codes."""
    if given.gate_up_proj_weight.dtype == _FP8 and given.gate_up_proj_scale is None:
        fix = "Pass gate_up_proj_scale and down_proj_scale, or weights in bf16."
        raise ConfigError.about("gate_up_proj_scale", "given with float8 weights", "None", fix)


def check_fp8_range(given: Arguments) -> None:
    """Refuse FP8 weights above 240, where the device's e4m3 ends."""
    for name in ("gate_up_proj_weight", "down_proj_weight"):
        weight = getattr(given, name)
        if weight.dtype == _FP8 and bool(((weight.view(torch.uint8) & 0x7F) > _LARGEST_E4M3).any()):
            expected = "made of magnitudes up to 240 (the device's e4m3 has no 256 to 448)"
            raise DTypeError.about(name, expected, "a larger one", "Quantize to a range of 240.")


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


def mx_experts(given: Arguments) -> MXExperts:
    """Check the weights of an MX implementation and their scales, which are required."""
    if given.gate_up_proj_scale is None:
        fix = "Pass the scales that quantize_moe_gate_up and quantize_moe_down return."
        raise ConfigError.about("gate_up_proj_scale", f"given with {given.kind.name}", "None", fix)
    options = given.spec.shard_on_block
    static = options.quantization_type is QuantizationType.STATIC_MX
    return read_mx_weights(
        (given.gate_up_proj_weight, given.down_proj_weight),
        (None, None) if static else (given.gate_up_proj_scale, given.down_proj_scale),
        hidden=given.hidden_states.shape[1],
        weight_dtype=options.weight_dtype,
        packed=options.use_packed_scales,
    )


def static_input_scales(gate_up: Tensor | None, down: Tensor | None, experts: int) -> tuple[list[float], list[float]]:
    """Return STATIC_MX's input scale of every expert, for the hidden states and for the intermediate."""
    if not require_pair(gate_up, down, ("gate_up_in_scale", "down_in_scale")) or gate_up is None or down is None:
        expected = "given with quantization_type=STATIC_MX"
        fix = "Pass the per-tensor scales the activations are quantized with."
        raise ConfigError.about("gate_up_in_scale", expected, "None", fix)
    check_shape(gate_up, (experts, 2, 1), "[E, 2, 1]", "gate_up_in_scale")
    check_shape(down, (experts, 1), "[E, 1]", "down_in_scale")
    if not torch.equal(gate_up[:, 0], gate_up[:, 1]):
        expected = "equal for gate and up (they multiply the same quantized hidden states)"
        raise ShapeError.about("gate_up_in_scale", expected, "two scales", "Use the larger of them for both.")
    return gate_up[:, 0, 0].float().tolist(), down[:, 0].float().tolist()


def refuse_input_scales(given: Arguments) -> None:
    """Refuse activation scales where the activations get MX scales online."""
    fix = "Activations are quantized online; static scales need quantization_type=STATIC_MX."
    names = ("gate_up_in_scale", "down_in_scale")
    check_rules(Rule(getattr(given, name) is None, name, "None with MX weights", "a scale", fix) for name in names)


def read_biases(
    given: Arguments, mx: MXExperts | None, experts: int, inner: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases as fp32 ``[E, 2, I]`` (with MX, I padded to whole tiles) and ``[E, H]``."""
    gate_up, down = given.gate_and_up_proj_bias, given.down_proj_bias
    names = ("gate_and_up_proj_bias", "down_proj_bias")
    require_pair(gate_up, down, names)
    if gate_up is None or down is None:
        return None, None
    check_dtype(gate_up, FLOATS, names[0])
    check_dtype(down, FLOATS, names[1])
    check_shape(down, (experts, given.hidden_states.shape[1]), "[E, H]", names[1])
    if mx is None:
        check_shape(gate_up, (experts, 2, inner), "[E, 2, I]", names[0])
        return gate_up.float(), down.float()
    _, partitions, tiles, _ = mx.down.shape
    check_shape(gate_up, (experts, partitions, 2, tiles, 4), "[E, pI, 2, ceil(I/512), 4]", names[0])
    return moe_bias_from_lanes(gate_up).float(), down.float()


def check_plan(plan: BlockRows, given: Arguments, experts: int) -> None:
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


def check_conditions(given: Arguments, plan: BlockRows, experts: int) -> None:
    """Check ``conditions``: their length, and that every block with tokens is computed.

    shard_on_block's generator makes one flag per pair of blocks, which no kernel reads: only its length is checked. The
    hybrid kernels compute ``num_static_block`` blocks (default N - E), then go on up to the sum of the conditions.
    """
    kind, blocks, conditions = given.kind, plan.blocks, given.conditions

    def check(fits: bool, expected: str, got: object) -> None:
        if not fits:
            remedy = "build_block_plan returns them: 1 for blocks with tokens, 0 for spare ones, then zeros."
            raise ShapeError.about("conditions", expected, got, remedy)

    check(conditions is not None or kind not in HYBRID, f"given with {kind.name}", None)
    if conditions is None:
        return
    check_dtype(conditions, (torch.int32, torch.int64, torch.bool, torch.uint8), "conditions")
    flags = conditions.reshape(-1)
    lengths = [blocks + tail for tail in CONDITION_TAILS.get(kind, (1, 2))]
    per_pair = -(-blocks // 2) + 1
    if kind is MoECTEImplementation.shard_on_block and len(flags) == per_pair and per_pair not in lengths:
        return
    check(len(flags) in lengths, f"of length {' or '.join(map(str, lengths))} (N = {blocks})", len(flags))
    check(not bool(flags[blocks:].any()), "zero after the N flags of the blocks", flags.tolist())
    used = plan.used_blocks()
    check(not bool((used & (flags[:blocks] == 0)).any()), "nonzero for every block with tokens", flags.tolist())
    if kind in HYBRID:
        static = given.spec.shard_on_I.num_static_block
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
