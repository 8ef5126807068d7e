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
from hf_neuron_moe.errors import NeuronMoEWarning, ShapeError, public
from hf_neuron_moe.reference.activations import act_, act_grad_
from hf_neuron_moe.reference.block_rows import (
    FLOATS,
    BlockRows,
    block_rows,
    check_block_size,
    check_one_block_per_expert,
)
from hf_neuron_moe.reference.blockwise_buffers import BUFFERS, GradBuffers, check_buffers
from hf_neuron_moe.reference.blockwise_checks import (
    Operands,
    Options,
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

    Upstream's arguments come first, in the order of 2.31 and later; the keyword-only ones are this package's. All are
    described in docs/kernels.md.

    Operands are bf16 or fp32 (fp32 `hidden_states` are computed in fp32, whatever `compute_dtype` says):
    `hidden_states` and `output_hidden_states_grad` ``[T', H]``, `expert_affinities_masked` ``[T' * E, 1]`` (dense and
    masked, token-major), `gate_up_proj_weight` ``[E, H, 2, I]`` (0 gate, 1 up), `down_proj_weight` ``[E, I, H]``,
    `gate_up_proj_act_checkpoint_T` ``[N, 2, I, B]`` (after bias and clamp), `down_proj_act_checkpoint` ``[N, B, H]``
    (before the affinity; unused by AFFINITY_ON_I). In `token_position_to_id`, int ``[N * B]``, T (or -1 with
    ``skip_token``) marks unused slots; `block_to_expert` is int ``[N]``. `clamp_limits` are strict masks on the
    checkpoints, no bounds on gradients.

    The four ``*_grad_out`` buffers have the shapes of the results, are written and returned. With
    `skip_grad_initialization` they are added to; affinity entries are assigned, as upstream does, and entries of pairs
    outside of the plan are kept. ``is_tensor_update_accumulating=False`` stores rows of the hidden gradient
    instead of adding them, for plans that use every token once; it never adds to a caller's gradients.

    `bias` says that the forward had biases. Upstream leaves ``sum_H dO * down_proj_bias`` out of the affinity's
    gradient wherever the bias is not in the down checkpoint (`convention` "device"; "golden" checkpoints contain it),
    and always with AFFINITY_ON_I. With `down_proj_bias` ``[E, H]`` it is added; a call without it warns
    (:class:`NeuronMoEWarning`) unless the checkpoint contains it or `upstream_affinity_grad` is set.

    Returns four gradients, or six with `bias`: hidden and affinity gradients in their operands' dtypes, the others in
    `accumulation_dtype` or the weights'. Sums are fp32 in any case; entries without a contribution are zero.
    """
    given = locals()
    check_flags({name: given[name] for name in (*_SWITCHES, "bias")})
    check_optional_flag(device_limits, "device_limits")
    check_blocking(blocking_params)
    check_block_size(block_size)
    if block_tile_size is not None:
        check_block_size(block_tile_size, "block_tile_size")
        rule, fix = f"a divisor of block_size = {block_size}", "It only tiles the block on the device; leave it None."
        fits = block_size % block_tile_size == 0
        check_rules([Rule(fits, "block_tile_size", rule, block_tile_size, fix, ShapeError)])
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
    tokens, experts = len(operands.hidden_states) - (not options.skip_token), len(operands.gate_up_proj_weight)
    plan = (operands.token_position_to_id, operands.block_to_expert)
    if options.kernel_type is KernelTypeOption.DROPPING:
        expected = f"0..{experts - 1} with kernel_type_option DROPPING (block e is expert e)"
        fix = "Use build_dropping_plan, or KernelTypeOption.DROPLESS."
        check_one_block_per_expert(operands.block_to_expert, experts, expected, fix)
    rows = block_rows(*plan, options.block_size, tokens, experts)
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
    gating = Gating(gate_limits=limits.gate, up_limits=limits.up, skip_gate=skip_gate)
    if kind is not ActFnType.SiLU:
        act, act_grad = functools.partial(act_, kind=kind), functools.partial(act_grad_, kind=kind)
        return replace(gating, act_=act, act_grad_=act_grad)
    return None if gating == Gating() else gating
