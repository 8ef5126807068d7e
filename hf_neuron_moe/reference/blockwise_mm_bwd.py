"""``blockwise_mm_bwd``: the backward of the blockwise experts.

Letters: T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I intermediate,
E experts, N blocks of B slots. Per block of expert e with gathered rows X of the input and dO of the output gradient,
affinities a, kept pre-activations g and u, ``h = act(g) * u``:

=============  =====================================  ==========================================
quantity       AFFINITY_ON_H                          AFFINITY_ON_I
=============  =====================================  ==========================================
da             ``sum_H dO * (down checkpoint)``       ``sum_I (dO Wd^T) * h``
dh             ``(dO a) Wd^T``                        ``(dO Wd^T) a``
dWd            ``h^T (dO a)``                         ``(h a)^T dO``
=============  =====================================  ==========================================

    du = dh * act(g) * [lower < u < upper]           dg = dh * u * act'(g) * [lower < g < upper]
    dWgu = X^T [dg, du]      dX = dg Wg^T + du Wu^T      d bias = row sums of dg, du and dO a

Matmuls accumulate in fp32; in bf16 ``dO a`` (or ``h a``), dg and du are rounded once before they enter one. Weight
gradients are summed over all blocks of an expert in fp32 and rounded once, where the device rounds after every block.

Sources: nki-library 2.29 ``experimental.moe.bwd.blockwise_mm_backward``; 2.31 (AFFINITY_ON_I, gradient buffers), 2.33
(SquaredReLU, ``skip_gate_proj``, ``accumulation_dtype``).
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.checks import Rule, check_flags, check_optional_flag, check_record, check_rules
from hf_neuron_moe.errors import NeuronMoEWarning, public
from hf_neuron_moe.reference.activations import act_, act_grad_
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows, check_one_block_per_expert
from hf_neuron_moe.reference.blockwise_buffers import BUFFERS, GradBuffers, check_buffers
from hf_neuron_moe.reference.blockwise_checks import (
    FLOATS,
    Operands,
    Options,
    check_block_size,
    check_blocking,
    check_device_limits,
    check_operands,
    read_shard_option,
)
from hf_neuron_moe.reference.blockwise_grads import BackwardCall, run_backward
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    AffinityOption,
    ClampLimits,
    KernelTypeOption,
    ShardOption,
    ShardOption229,
    SkipMode,
    as_member,
)

_SWITCHES = ("is_tensor_update_accumulating", "skip_grad_initialization", "skip_gate_proj", "upstream_affinity_grad")
_LATER = {
    "skip_grad_initialization": False,
    "blocking_params": None,
    "accumulation_dtype": None,
    "skip_gate_proj": False,
    **dict.fromkeys(BUFFERS),
}
"""Arguments that 2.29 does not have, with their defaults."""


class MoEBackward(NamedTuple):
    """``[T', H]``, ``[T' * E, 1]``, ``[E, H, 2, I]`` and ``[E, I, H]``; what the kernel returns without biases."""

    hidden_states_grad: Tensor
    expert_affinities_masked_grad: Tensor
    gate_up_proj_weight_grad: Tensor
    down_proj_weight_grad: Tensor


class MoEBiasBackward(NamedTuple):
    """:class:`MoEBackward`, then ``[E, 2, I]`` and ``[E, H]``; what the kernel returns with ``bias=True``."""

    hidden_states_grad: Tensor
    expert_affinities_masked_grad: Tensor
    gate_up_proj_weight_grad: Tensor
    down_proj_weight_grad: Tensor
    gate_and_up_proj_bias_grad: Tensor
    down_proj_bias_grad: Tensor


@public
def blockwise_mm_bwd(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    gate_up_proj_act_checkpoint_T: Tensor,
    down_proj_act_checkpoint: Tensor | None,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    output_hidden_states_grad: Tensor,
    block_size: int,
    skip_dma: SkipMode | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    is_tensor_update_accumulating: bool = True,
    skip_grad_initialization: bool = False,
    shard_option: ShardOption | ShardOption229 | str = ShardOption.SHARD_ON_HIDDEN,
    affinity_option: AffinityOption | str = AffinityOption.AFFINITY_ON_H,
    kernel_type_option: KernelTypeOption | str = KernelTypeOption.DROPLESS,
    clamp_limits: ClampLimits | None = None,
    bias: bool = False,
    activation_type: ActFnType | str = ActFnType.SiLU,
    block_tile_size: int | None = None,
    blocking_params: object = None,
    hidden_states_grad_out: Tensor | None = None,
    expert_affinities_masked_grad_out: Tensor | None = None,
    gate_up_proj_weight_grad_out: Tensor | None = None,
    down_proj_weight_grad_out: Tensor | None = None,
    accumulation_dtype: torch.dtype | None = None,
    skip_gate_proj: bool = False,
    *,
    down_proj_bias: Tensor | None = None,
    convention: str = "device",
    upstream_affinity_grad: bool = False,
    device_limits: bool | None = None,
    release: str | None = None,
) -> MoEBackward | MoEBiasBackward:
    """Gradients of the blockwise experts from the forward's checkpoints.

    Upstream's arguments come first, in the order of 2.31 and later; the keyword-only ones are this package's.

    Args:
        hidden_states: bf16 or fp32 ``[T', H]``. fp32 is computed in fp32, whatever `compute_dtype` says.
        expert_affinities_masked: ``[T' * E, 1]``, dense and masked, token-major.
        gate_up_proj_weight: ``[E, H, 2, I]``, 0 gate and 1 up.
        down_proj_weight: ``[E, I, H]``.
        gate_up_proj_act_checkpoint_T: ``[N, 2, I, B]`` pre-activations after bias and clamp.
        down_proj_act_checkpoint: ``[N, B, H]`` down projection before the affinity; unused by AFFINITY_ON_I.
        token_position_to_id: int ``[N * B]``; T (or -1 with ``skip_token``) marks unused slots.
        block_to_expert: int ``[N]``.
        output_hidden_states_grad: ``[T', H]``.
        block_size: B.
        skip_dma: ``SkipMode``; ``skip_weight`` has no effect on values.
        compute_dtype: bf16, or fp32 for bf16 operands without rounding between the matmuls.
        is_tensor_update_accumulating: False stores rows of the hidden gradient instead of adding them, for plans that
            use every token once. It never adds to a caller's gradients.
        skip_grad_initialization: add to the four ``*_grad_out`` buffers instead of overwriting them. Affinity entries
            are assigned, as upstream assigns them; entries of pairs outside of the plan are kept.
        shard_option: no effect on values; see `device_limits`.
        affinity_option: where the forward multiplied by the affinity.
        kernel_type_option: DROPPING needs one block per expert in order; no release implements it, so it is refused as
            a device limit.
        clamp_limits: the forward's limits, as strict masks on the checkpoints: no bounds on gradients.
        bias: the forward had biases: return their gradients too, and see `down_proj_bias`.
        activation_type: any ``ActFnType`` (upstream: SiLU and Swish, later SquaredReLU).
        block_tile_size: tiling on the device, a divisor of B; no effect on values.
        blocking_params: the records ``*Blocking``, singly or in a tuple, list or dict: tuning on the device; no effect
            on values.
        hidden_states_grad_out: buffer for the result, written and returned; likewise the next three.
        expert_affinities_masked_grad_out: ``[T' * E, 1]``.
        gate_up_proj_weight_grad_out: ``[E, H, 2, I]``.
        down_proj_weight_grad_out: ``[E, I, H]``.
        accumulation_dtype: dtype of the weight and bias gradients without a buffer (default: the weights'). Sums are
            fp32 in any case.
        skip_gate_proj: the forward was ``act(up)``; gate gradients are zero and up is not masked.
        down_proj_bias: ``[E, H]``, for the affinity's gradient: upstream leaves ``sum_H dO * down_proj_bias`` out
            wherever the bias is not in the down checkpoint, and always with AFFINITY_ON_I. A call with
            `bias` and without it gives upstream's gradient and warns (:class:`NeuronMoEWarning`), unless the checkpoint
            contains it (AFFINITY_ON_H by the golden convention) or `upstream_affinity_grad` is set.
        convention: ``"device"``: the down checkpoint is without the down bias, as kernels save it; ``"golden"``: with
            it, as upstream's references save it, so that AFFINITY_ON_H adds nothing.
        upstream_affinity_grad: leave the bias out of the affinity's gradient as upstream does.
        device_limits: enforce the shapes and option pairs that device kernels take; None: for bf16 `hidden_states`.
        release: whose limits: "2.29", "2.31" (and later), or None for those of either.

    Returns:
        Four gradients, or six with `bias`: hidden and affinity gradients in their operands' dtypes, the others in
        `accumulation_dtype` or the weights'. Entries without a contribution are zero.
    """
    given = locals()
    check_flags({name: given[name] for name in (*_SWITCHES, "bias")})
    check_optional_flag(device_limits, "device_limits")
    check_blocking(blocking_params)
    check_block_size(block_size, block_tile_size)
    check_record(skip_dma, SkipMode, "skip_dma")
    check_record(clamp_limits, ClampLimits, "clamp_limits")
    buffers = GradBuffers(
        **{name: given[name] for name in BUFFERS},
        add=skip_grad_initialization,
        assign_rows=not is_tensor_update_accumulating,
        dtype=accumulation_dtype,
    )
    options = Options(
        block_size=block_size,
        shard=read_shard_option(shard_option),
        affinity=as_member(affinity_option, AffinityOption, argument="affinity_option"),
        kernel_type=as_member(kernel_type_option, KernelTypeOption, argument="kernel_type_option"),
        activation=as_member(activation_type, ActFnType, argument="activation_type"),
        clamp_limits=clamp_limits or ClampLimits(),
        skip_token=skip_dma is not None and skip_dma.skip_token,
        later=tuple(name for name, default in _LATER.items() if given[name] is not default),
    )
    operands = Operands(**{field.name: given[field.name] for field in fields(Operands)})
    if not options.on_hidden:
        operands = replace(operands, down_proj_act_checkpoint=None)
    rows = _checked_rows(operands, options, buffers, device_limits, release)
    added = _affinity_bias(operands, options, bias, convention, upstream_affinity_grad)
    fits, fix = compute_dtype in FLOATS, "Use the kernels' default, torch.bfloat16."
    check_rules([Rule(fits, "compute_dtype", "torch.bfloat16 or torch.float32", repr(compute_dtype), fix)])
    precision = "fp32" if torch.float32 in (hidden_states.dtype, compute_dtype) else "bf16"
    call = BackwardCall(operands, rows, precision, options.on_hidden, _gating(options, skip_gate_proj), bias, added)
    results = run_backward(call, buffers)
    return MoEBiasBackward(*results) if bias else MoEBackward(*results[:4])


def _checked_rows(
    operands: Operands, options: Options, buffers: GradBuffers, device_limits: bool | None, release: str | None
) -> BlockRows:
    """Check what remains after the options; return the plan's rows."""
    fits = not options.on_hidden or operands.down_proj_act_checkpoint is not None
    fix = "Keep it in the forward, or use AFFINITY_ON_I on both sides."
    check_rules([Rule(fits, "down_proj_act_checkpoint", "given with AFFINITY_ON_H", "None", fix)])
    check_operands(operands, options.block_size)
    limited = operands.hidden_states.dtype == torch.bfloat16 if device_limits is None else device_limits
    if limited or release is not None:
        check_device_limits(operands, options, release)
    table_rows, experts = operands.hidden_states.shape[0], operands.gate_up_proj_weight.shape[0]
    plan = (operands.token_position_to_id, operands.block_to_expert)
    if options.kernel_type is KernelTypeOption.DROPPING:
        expected = f"0..{experts - 1} with kernel_type_option DROPPING (block e is expert e)"
        fix = "Use build_dropping_plan, or KernelTypeOption.DROPLESS."
        check_one_block_per_expert(operands.block_to_expert, experts, expected, fix)
    rows = block_rows(*plan, options.block_size, table_rows - (not options.skip_token), experts)
    check_buffers(buffers, operands, rows)
    return rows


def _affinity_bias(operands: Operands, options: Options, bias: bool, convention: str, upstream: bool) -> Tensor | None:
    """Return the down bias where the affinity's gradient still lacks it."""
    fix = "It says whether the down checkpoint is without the down bias (device) or with it (golden)."
    fits = convention in ("device", "golden")
    check_rules([Rule(fits, "convention", "'device' or 'golden'", repr(convention), fix)])
    included = options.on_hidden and convention == "golden"
    if bias and operands.down_proj_bias is None and not included and not upstream:
        golden = ", convention='golden' if the checkpoint contains it," if options.on_hidden else ""
        warnings.warn(
            "blockwise_mm_bwd: bias=True without down_proj_bias: the affinity's gradient is upstream's, which lacks "
            f"the down bias. Pass down_proj_bias for the right one{golden} or upstream_affinity_grad=True to say that "
            "it is meant.",
            NeuronMoEWarning,
            stacklevel=4,
        )
    return None if upstream or included else operands.down_proj_bias


def _gating(options: Options, skip_gate: bool) -> Gating | None:
    """Return the gate's rule, or None for plain SiLU."""
    limits, kind = options.clamp_limits, options.activation
    if kind is not ActFnType.SiLU:
        act, act_grad = functools.partial(act_, kind=kind), functools.partial(act_grad_, kind=kind)
        return Gating(act, act_grad, gate_limits=limits.gate, up_limits=limits.up, skip_gate=skip_gate)
    if limits == ClampLimits() and not skip_gate:
        return None
    return Gating(gate_limits=limits.gate, up_limits=limits.up, skip_gate=skip_gate)
