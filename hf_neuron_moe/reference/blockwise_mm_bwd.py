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
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.checks import check_flags, check_record
from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning, public
from hf_neuron_moe.reference.activations import act_, act_grad_
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows
from hf_neuron_moe.reference.blockwise_buffers import GradBuffers, check_buffers
from hf_neuron_moe.reference.blockwise_checks import (
    Operands,
    Options,
    check_block_size,
    check_blocking,
    check_device_limits,
    check_dropping_plan,
    check_operands,
    shard_option,
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

_WHERE = "blockwise_mm_bwd"


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


@public(_WHERE)
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

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    flags: dict[str, object] = {
        "is_tensor_update_accumulating": is_tensor_update_accumulating,
        "skip_grad_initialization": skip_grad_initialization,
        "bias": bias,
        "skip_gate_proj": skip_gate_proj,
        "upstream_affinity_grad": upstream_affinity_grad,
    }
    check_flags(flags if device_limits is None else flags | {"device_limits": device_limits})
    check_blocking(blocking_params)
    later = {
        "skip_grad_initialization": skip_grad_initialization,
        "blocking_params": blocking_params is not None,
        "accumulation_dtype": accumulation_dtype is not None,
        "skip_gate_proj": skip_gate_proj,
    }
    buffers = GradBuffers(
        hidden_states_grad_out,
        expert_affinities_masked_grad_out,
        gate_up_proj_weight_grad_out,
        down_proj_weight_grad_out,
        add=skip_grad_initialization,
        assign_rows=not is_tensor_update_accumulating,
        dtype=accumulation_dtype,
    )
    options = _options(
        block_size, block_tile_size, skip_dma, shard_option, affinity_option, kernel_type_option, activation_type,
        clamp_limits, (*(name for name, given in later.items() if given), *buffers.given),
    )  # fmt: skip
    on_hidden = options.affinity is AffinityOption.AFFINITY_ON_H
    operands = Operands(
        hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight, gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint if on_hidden else None, token_position_to_id, block_to_expert,
        output_hidden_states_grad, down_proj_bias,
    )  # fmt: skip
    rows = _check(operands, options, buffers, on_hidden, device_limits, release)
    added = _affinity_bias(operands, options, bias, convention, upstream_affinity_grad)
    precision = _precision(operands, compute_dtype)
    call = BackwardCall(operands, rows, precision, on_hidden, _gating(options, skip_gate_proj), bias, added)
    results = run_backward(call, buffers)
    return MoEBiasBackward(*results) if bias else MoEBackward(*results[:4])


@public(_WHERE)
def _options(
    block_size: int,
    block_tile_size: int | None,
    skip_dma: SkipMode | None,
    shard: object,
    affinity: object,
    kernel_type: object,
    activation: object,
    clamp_limits: ClampLimits | None,
    later: tuple[str, ...],
) -> Options:
    check_block_size(block_size, block_tile_size)
    check_record(skip_dma, SkipMode, argument="skip_dma")
    check_record(clamp_limits, ClampLimits, argument="clamp_limits")
    return Options(
        block_size=block_size,
        shard=shard_option(shard),
        affinity=as_member(affinity, AffinityOption, argument="affinity_option"),
        kernel_type=as_member(kernel_type, KernelTypeOption, argument="kernel_type_option"),
        activation=as_member(activation, ActFnType, argument="activation_type"),
        clamp_limits=clamp_limits or ClampLimits(),
        skip_token=skip_dma is not None and skip_dma.skip_token,
        later=later,
    )


@public(_WHERE)
def _check(
    operands: Operands,
    options: Options,
    buffers: GradBuffers,
    on_hidden: bool,
    device_limits: bool | None,
    release: str | None,
) -> BlockRows:
    """Check what remains after the options; return the plan's rows."""
    if on_hidden and operands.down_proj_act_checkpoint is None:
        raise ConfigError.about(
            "down_proj_act_checkpoint",
            "given with AFFINITY_ON_H",
            "None",
            "Keep it in the forward, or use AFFINITY_ON_I on both sides.",
        )
    check_operands(operands, options.block_size)
    limited = operands.hidden_states.dtype == torch.bfloat16 if device_limits is None else device_limits
    if limited or release is not None:
        check_device_limits(operands, options, release)
    table_rows, experts = operands.hidden_states.shape[0], operands.gate_up_proj_weight.shape[0]
    if options.kernel_type is KernelTypeOption.DROPPING:
        check_dropping_plan(operands.block_to_expert, experts)
    tokens = table_rows if options.skip_token else table_rows - 1
    rows = block_rows(operands.token_position_to_id, operands.block_to_expert, options.block_size, tokens, experts)
    check_buffers(buffers, operands, rows)
    return rows


@public(_WHERE)
def _affinity_bias(operands: Operands, options: Options, bias: bool, convention: str, upstream: bool) -> Tensor | None:
    """Return the down bias where the affinity's gradient still lacks it."""
    if convention not in ("device", "golden"):
        raise ConfigError.about(
            "convention",
            "'device' or 'golden'",
            repr(convention),
            "It says whether the down checkpoint is without the down bias (device) or with it (golden).",
        )
    on_hidden = options.affinity is AffinityOption.AFFINITY_ON_H
    included = on_hidden and convention == "golden"
    if bias and operands.down_proj_bias is None and not included and not upstream:
        golden = ", convention='golden' if the checkpoint contains it," if on_hidden else ""
        warnings.warn(
            f"{_WHERE}: bias=True without down_proj_bias: the affinity's gradient is upstream's, which lacks the down "
            f"bias. Pass down_proj_bias for the right one{golden} or upstream_affinity_grad=True to say that it is "
            "meant.",
            NeuronMoEWarning,
            stacklevel=3,
        )
    return None if upstream or included else operands.down_proj_bias


@public(_WHERE)
def _precision(operands: Operands, compute_dtype: torch.dtype) -> str:
    if compute_dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError.about(
            "compute_dtype",
            "torch.bfloat16 or torch.float32",
            repr(compute_dtype),
            "Use the kernels' default, torch.bfloat16.",
        )
    exact = torch.float32 in (operands.hidden_states.dtype, compute_dtype)
    return "fp32" if exact else "bf16"


def _gating(options: Options, skip_gate: bool) -> Gating | None:
    """Return the gate's rule, or None for plain SiLU."""
    limits, kind = options.clamp_limits, options.activation
    silu = kind is ActFnType.SiLU
    if silu and limits == ClampLimits() and not skip_gate:
        return None
    return Gating(
        None if silu else functools.partial(act_, kind=kind),
        None if silu else functools.partial(act_grad_, kind=kind),
        gate_limits=(limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit),
        up_limits=(limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit),
        skip_gate=skip_gate,
    )
