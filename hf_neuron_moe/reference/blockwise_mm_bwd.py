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
gradients are summed over all blocks of an expert in fp32 and rounded once; ``accumulation="device"`` rounds after every
block as the kernels do (``blockwise_walk``).

Sources: nki-library 2.29 ``experimental.moe.bwd.blockwise_mm_backward``; 2.31 (AFFINITY_ON_I, gradient buffers), 2.33
(SquaredReLU, ``skip_gate_proj``, ``accumulation_dtype``).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.checks import Rule, check_rules
from hf_neuron_moe.errors import NeuronMoEWarning, public
from hf_neuron_moe.reference.activations import BY_TYPE
from hf_neuron_moe.reference.block_rows import BlockRows, block_rows, check_one_block_per_expert, check_sink_row
from hf_neuron_moe.reference.blockwise_arguments import (
    BackwardArguments,
    Options,
    check_buffers,
    check_device_limits,
    check_operands,
    check_options,
)
from hf_neuron_moe.reference.blockwise_grads import BackwardCall, run_backward
from hf_neuron_moe.reference.blockwise_walk import walk_backward
from hf_neuron_moe.reference.moe_types import ActFnType, taking
from hf_neuron_moe.reference.upstream_bugs import with_backward_bugs


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
@taking(BackwardArguments)
def blockwise_mm_bwd(given: BackwardArguments) -> MoEBackward | MoEBiasBackward:
    """Gradients of the blockwise experts from the forward's checkpoints.

    The arguments are the fields of :class:`~hf_neuron_moe.reference.blockwise_arguments.BackwardArguments`, described
    there and in docs/kernels.md.

    Returns four gradients, or six with `bias`: hidden and affinity gradients in their operands' dtypes, the others in
    `accumulation_dtype` or the weights'. Entries without a contribution are zero.
    """
    given, options = with_backward_bugs(given, check_options(given))
    if not options.on_hidden:
        given = replace(given, down_proj_act_checkpoint=None)
    rows = _checked_rows(given, options)
    added = _affinity_bias(given, options)
    precision = "fp32" if torch.float32 in (given.hidden_states.dtype, given.compute_dtype) else "bf16"
    call = BackwardCall(given, rows, precision, options.on_hidden, _gating(given, options), added)
    results = walk_backward(call, options.shard) if given.walks else run_backward(call)
    return MoEBiasBackward(*results) if given.bias else MoEBackward(*results[:4])


def _checked_rows(given: BackwardArguments, options: Options) -> BlockRows:
    """Check what remains after the options; return the plan's rows."""
    fits = not options.on_hidden or given.down_proj_act_checkpoint is not None
    fix = "Keep it in the forward, or use AFFINITY_ON_I on both sides."
    check_rules([Rule(fits, "down_proj_act_checkpoint", "given with AFFINITY_ON_H", "None", fix)])
    sizes = check_operands(given)
    experts = sizes["E"]
    if given.limited:
        check_device_limits(given, options)
    if options.dropping:
        expected = f"0..{experts - 1} with kernel_type_option DROPPING (block e is expert e)"
        fix = "Use build_dropping_plan, or KernelTypeOption.DROPLESS."
        check_one_block_per_expert(given.block_to_expert, experts, expected, fix)
    check_sink_row(vars(given), given.skip_dma)
    rows = block_rows(given.token_position_to_id, given.block_to_expert, given.block_size, given.tokens, experts)
    check_buffers(given, rows, sizes)
    return rows


def _affinity_bias(given: BackwardArguments, options: Options) -> Tensor | None:
    """Return the down bias where the affinity's gradient still lacks it."""
    included = options.on_hidden and given.convention == "golden"
    if included or given.upstream_affinity_grad:
        return None
    if given.bias and given.down_proj_bias is None:
        golden = ", convention='golden' if the checkpoint contains it," if options.on_hidden else ""
        warnings.warn(
            "blockwise_mm_bwd: bias=True without down_proj_bias: the affinity's gradient is upstream's, which lacks "
            f"the down bias. Pass down_proj_bias for the right one{golden} or upstream_affinity_grad=True to say that "
            "it is meant.",
            NeuronMoEWarning,
            stacklevel=5,
        )
    return given.down_proj_bias


def _gating(given: BackwardArguments, options: Options) -> Gating | None:
    """Return the gate's rule, or None for plain SiLU."""
    limits, activation = given.clamps, BY_TYPE[options.activation]
    gating = Gating(gate_limits=limits.gate, up_limits=limits.up, skip_gate=given.skip_gate_proj)
    if options.activation is not ActFnType.SiLU:
        return replace(gating, gained_act_=activation.value_, act_slope=activation.slope)
    return None if gating == Gating() else gating
