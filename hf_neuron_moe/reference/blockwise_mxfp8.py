"""The MXFP8 training pair of the blockwise experts: ``blockwise_mm_fwd_mxfp8`` and ``blockwise_mm_bwd_mxfp8``.

Letters: T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I intermediate,
E experts, N blocks of B slots.

Every matmul's operands are rounded to MXFP8 along its contraction axis (block scales of nki 0.5 and later), along the
token axis block by block; the roundings to bf16 in between are those of ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8`` (2.31).

What is known of upstream's pair: the weights' layouts (which differ between forward and backward), SiLU only, the
affinity on the intermediate only, ``SHARD_ON_FREE`` only, which checkpoints are returned and needed, bf16 activations,
blocks of 128 to 4096. Not known, and refused here: the layout of pre-quantized weights and their scales, and biases
(no bias argument is known, nor whether checkpoints would include one). Upstream's argument names beyond those of
``moe_cte`` and ``blockwise_mm_bwd`` are not known either; these functions use the same names as those two.

Sources: nki-library 2.31 and 2.32 ``experimental.moe_mxfp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import ExpertStack, add_rows
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.tiles import Loader, Span, tile_loader
from hf_neuron_moe.checks import (
    check_dtype,
    check_flags,
    check_multiple,
    check_record,
    check_same_device,
    check_shape,
)
from hf_neuron_moe.errors import ConfigError, ShapeError, public
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows
from hf_neuron_moe.reference.blockwise_buffers import GradBuffers
from hf_neuron_moe.reference.blockwise_checks import (
    INTEGERS,
    Operands,
    check_bf16_limits,
    check_block_size,
    check_operands,
)
from hf_neuron_moe.reference.blockwise_grads import BackwardCall, run_backward
from hf_neuron_moe.reference.blockwise_mm_bwd import MoEBackward
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    AffinityOption,
    ClampLimits,
    ShardOption,
    SkipMode,
    as_member,
)

BLOCK_SIZES = (128, 256, 512, 1024, 2048, 4096)
_BF16 = (torch.bfloat16,)
_AFFINITIES = (torch.bfloat16, torch.float32)


class MoEForwardMXFP8(NamedTuple):
    """Output ``[T', H]``, clamped pre-activations ``[N, 2, I, B]``, intermediate times affinity ``[N, I, B]``.

    All bf16. Slots without a token are zero.
    """

    output: Tensor
    gate_up_activations_T: Tensor
    intermediate_T: Tensor


@public
def blockwise_mm_fwd_mxfp8(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    block_size: int,
    *,
    skip_dma: SkipMode | None = None,
    activation_function: ActFnType | str = ActFnType.SiLU,
    clamp_limits: ClampLimits | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    device_limits: bool | None = None,
) -> MoEForwardMXFP8:
    """Forward of the experts in MXFP8, the affinity on the intermediate.

    Args:
        hidden_states: bf16 ``[T', H]``, H a multiple of 128.
        expert_affinities_masked: bf16 or fp32 ``[T' * E, 1]``, dense and masked, token-major.
        gate_up_proj_weight: bf16 ``[E, 2, I, H]``, 0 gate and 1 up (the stock fused layout), I a multiple of 128.
        down_proj_weight: bf16 ``[E, H, I]``.
        token_position_to_id: int ``[N * B]``; T (or -1 with ``skip_token``) marks unused slots, which come last.
        block_to_expert: int ``[N]``.
        block_size: B, one of 128 to 4096 in powers of two.
        skip_dma: ``SkipMode``; ``skip_weight`` has no effect on values.
        activation_function: SiLU.
        clamp_limits: limits on gate and up before the activation; see `device_limits`.
        gate_up_proj_scale: refused: the layout of pre-quantized weights is not documented.
        down_proj_scale: refused likewise.
        gate_and_up_proj_bias: refused: the documented kernel has no biases.
        down_proj_bias: refused likewise.
        device_limits: refuse clamp limits that bf16 does not hold, which the backward would miss; None is True here,
            where hidden states are always bf16.

    Returns:
        Output, pre-activations and intermediate, see :class:`MoEForwardMXFP8`.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    _refuse_unknown(
        gate_up_proj_scale=gate_up_proj_scale,
        down_proj_scale=down_proj_scale,
        gate_and_up_proj_bias=gate_and_up_proj_bias,
        down_proj_bias=down_proj_bias,
    )
    _check_only(activation_function, ActFnType.SiLU, "activation_function")
    _check_block(block_size)
    limits = _check_records(skip_dma, clamp_limits, device_limits)
    _check_forward(
        hidden_states,
        expert_affinities_masked,
        gate_up_proj_weight,
        down_proj_weight,
        {"token_position_to_id": token_position_to_id, "block_to_expert": block_to_expert},
    )
    experts = gate_up_proj_weight.shape[0]
    tokens = len(hidden_states) - int(skip_dma is None or not skip_dma.skip_token)
    rows = block_rows(token_position_to_id, block_to_expert, block_size, tokens, experts, without_gaps=True)
    stack = ExpertStack(gate_up_proj_weight.flatten(1, 2), down_proj_weight, transposed=False)
    return _forward(hidden_states, rows.affinity(expert_affinities_masked, experts), stack, rows, limits)


@torch.no_grad()
def _forward(
    hidden_states: Tensor, scale_R: Tensor, stack: ExpertStack, rows: BlockRows, limits: ClampLimits
) -> MoEForwardMXFP8:
    inner, device = stack.down.shape[2], hidden_states.device
    total_TH = torch.zeros(hidden_states.shape, dtype=torch.float32, device=device)
    gate_up_N2IB = hidden_states.new_zeros((rows.blocks, 2, inner, rows.block_size))
    inter_NIB = hidden_states.new_zeros((rows.blocks, inner, rows.block_size))
    loader = tile_loader("mxfp8", device)
    x, emit = RowSource(hidden_states, rows.token_R), add_rows(total_TH, rows.token_R)
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
        for target, values_RI in zip(
            (gate_up_N2IB[:, 0], gate_up_N2IB[:, 1], inter_NIB), (gate_RI, up_RI, inter_RI), strict=True
        ):
            _fill_blocks(target, values_RI, first // rows.block_size)
    return MoEForwardMXFP8(total_TH.to(hidden_states.dtype), gate_up_N2IB, inter_NIB)


def _fill_blocks(target_NIB: Tensor, values_RI: Tensor, block: int) -> None:
    """Write one expert's rows, which start at `block`, tokens innermost."""
    size = target_NIB.shape[2]
    full = len(values_RI) // size
    whole = values_RI[: full * size].view(full, size, values_RI.shape[1])
    target_NIB[block : block + full].copy_(whole.transpose(1, 2))
    rest = values_RI[full * size :]
    if len(rest):
        target_NIB[block + full, :, : len(rest)].copy_(rest.t())


@dataclass(frozen=True)
class _Epilogue:
    """Clamp, ``silu(gate) * up * affinity``, keep it in bf16, and quantize it along the intermediate axis."""

    loader: Loader
    scale_R1: Tensor
    inter_RI: Tensor
    limits: ClampLimits

    @property
    def needs_gate(self) -> bool:
        return True

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        limits = self.limits
        _clamp_(gate_RI, limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit)
        _clamp_(up_RI, limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit)

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        part = slice(rows.start, rows.stop)
        product = F.silu(gate_RI, inplace=True).mul_(up_RI).mul_(self.scale_R1[part])
        kept = self.inter_RI[part, columns.start : columns.stop].copy_(product)
        buffer = self.loader.scratch.get("inter", (rows.length, columns.size), torch.float32)
        self.loader.fill(buffer, kept)
        return self.loader.quantize(buffer, axis=1)


def _clamp_(values: Tensor, upper: float | None, lower: float | None) -> None:
    if upper is not None:
        values.clamp_(max=upper)
    if lower is not None:
        values.clamp_(min=lower)


@public
def blockwise_mm_bwd_mxfp8(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    gate_up_proj_act_checkpoint_T: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    output_hidden_states_grad: Tensor,
    block_size: int,
    *,
    skip_dma: SkipMode | None = None,
    shard_option: ShardOption | str = ShardOption.SHARD_ON_FREE,
    affinity_option: AffinityOption | str = AffinityOption.AFFINITY_ON_I,
    clamp_limits: ClampLimits | None = None,
    bias: bool = False,
    activation_type: ActFnType | str = ActFnType.SiLU,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    device_limits: bool | None = None,
) -> MoEBackward:
    """Gradients of :func:`blockwise_mm_fwd_mxfp8` from its pre-activations.

    Args:
        hidden_states: bf16 ``[T', H]``, H a multiple of 128.
        expert_affinities_masked: bf16 or fp32 ``[T' * E, 1]``.
        gate_up_proj_weight: bf16 ``[E, H, 2, I]``: not the forward's layout. I a multiple of 128.
        down_proj_weight: bf16 ``[E, I, H]``.
        gate_up_proj_act_checkpoint_T: ``[N, 2, I, B]``, required.
        token_position_to_id: int ``[N * B]``.
        block_to_expert: int ``[N]``.
        output_hidden_states_grad: bf16 ``[T', H]``.
        block_size: B, one of 128 to 4096 in powers of two; a token's MX groups along the token axis lie in its block.
        skip_dma: as in the forward.
        shard_option: SHARD_ON_FREE.
        affinity_option: AFFINITY_ON_I.
        clamp_limits: the forward's limits, as strict masks; see `device_limits`.
        bias: refused if True: the documented kernel has no biases.
        activation_type: SiLU.
        gate_up_proj_scale: refused: the layout of pre-quantized weights is not documented.
        down_proj_scale: refused likewise.
        device_limits: as in the forward.

    Returns:
        ``[T', H]``, ``[T' * E, 1]``, ``[E, H, 2, I]`` and ``[E, I, H]`` in their operands' dtypes.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    _refuse_unknown(
        gate_up_proj_scale=gate_up_proj_scale, down_proj_scale=down_proj_scale, bias=None if bias is False else bias
    )
    _check_only(activation_type, ActFnType.SiLU, "activation_type")
    _check_only(shard_option, ShardOption.SHARD_ON_FREE, "shard_option")
    _check_only(affinity_option, AffinityOption.AFFINITY_ON_I, "affinity_option")
    _check_block(block_size)
    limits = _check_records(skip_dma, clamp_limits, device_limits)
    operands = Operands(
        hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight, gate_up_proj_act_checkpoint_T,
        None, token_position_to_id, block_to_expert, output_hidden_states_grad,
    )  # fmt: skip
    for name in ("hidden_states", "gate_up_proj_weight", "down_proj_weight", "output_hidden_states_grad"):
        check_dtype(getattr(operands, name), _BF16, argument=name)
    check_operands(operands, block_size)
    _check_tiles(hidden_states.shape[1], gate_up_proj_weight.shape[3])
    tokens = len(hidden_states) - int(skip_dma is None or not skip_dma.skip_token)
    rows = block_rows(
        token_position_to_id, block_to_expert, block_size, tokens, len(down_proj_weight), without_gaps=True
    )
    gating = Gating(
        gate_limits=(limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit),
        up_limits=(limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit),
    )
    call = BackwardCall(operands, rows, "mxfp8", on_hidden=False, gating=gating, bias=False, affinity_bias=None)
    return MoEBackward(*run_backward(call, GradBuffers(None, None, None, None)))


def _refuse_unknown(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError.about(
                name,
                "None" if name != "bias" else "False",
                "a tensor" if isinstance(value, Tensor) else repr(value),
                "Upstream documents no biases for the MXFP8 training pair."
                if "bias" in name
                else "The layout of pre-quantized weights is not documented; pass bf16 weights.",
            )


def _check_records(skip_dma: SkipMode | None, limits: ClampLimits | None, device_limits: bool | None) -> ClampLimits:
    """Check the two records and the switch; return the limits."""
    check_record(skip_dma, SkipMode, argument="skip_dma")
    check_record(limits, ClampLimits, argument="clamp_limits")
    if device_limits is not None:
        check_flags({"device_limits": device_limits})
    if limits is not None and device_limits is not False:
        check_bf16_limits(limits)
    return limits or ClampLimits()


def _check_only(value: object, member: ActFnType | ShardOption | AffinityOption, argument: str) -> None:
    if as_member(value, type(member), argument=argument) is not member:
        raise ConfigError.about(
            argument,
            f"{member.name} (the MXFP8 training pair has no other)",
            str(value),
            "Use moe_cte and blockwise_mm_bwd for the others.",
        )


def _check_block(block_size: int) -> None:
    check_block_size(block_size, None)
    if block_size not in BLOCK_SIZES:
        raise ShapeError.about(
            "block_size", f"one of {BLOCK_SIZES}", str(block_size), "Build the plan with one of these."
        )


def _check_tiles(hidden: int, inner: int) -> None:
    check_multiple(hidden, 128, "H of hidden_states", "MX groups need whole tiles")
    check_multiple(inner, 128, "I of gate_up_proj_weight", "MX groups need whole tiles")


def _check_forward(
    hidden_states: Tensor, affinities: Tensor, gate_up: Tensor, down: Tensor, plan: dict[str, Tensor]
) -> None:
    tensors = {"hidden_states": hidden_states, "gate_up_proj_weight": gate_up, "down_proj_weight": down}
    for name, tensor in tensors.items():
        check_dtype(tensor, _BF16, argument=name)
    check_dtype(affinities, _AFFINITIES, argument="expert_affinities_masked")
    for name, ids in plan.items():
        check_dtype(ids, INTEGERS, argument=name)
    check_same_device({**tensors, "expert_affinities_masked": affinities, **plan})
    check_shape(hidden_states, (None, None), "[T', H]", argument="hidden_states")
    rows, hidden = hidden_states.shape
    check_shape(gate_up, (None, 2, None, hidden), "[E, 2, I, H]", argument="gate_up_proj_weight")
    experts, _, inner, _ = gate_up.shape
    check_shape(down, (experts, hidden, inner), "[E, H, I]", argument="down_proj_weight")
    name = "expert_affinities_masked"
    check_shape(affinities, (rows * experts, 1), "[T' * E, 1]", argument=name)
    _check_tiles(hidden, inner)
