"""``moe_cte``: the forward of the blockwise MoE kernels, all seven implementations, as one function.

Legend: T tokens, T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots.

Per block of expert e, with gathered rows X and affinities a, matmuls accumulating in fp32::

    g, u = X Wg, X Wu;  times the FP8 scales;  plus the biases;  min with the upper, then max with the lower limits
    h = act(g) * u;     y = (h Wd) times the FP8 scale, plus the down bias;     out += a * y

What the devices return and how to read it off the result here (rows 0..T-1; the sink row is scratch there, zero here):

=============================  =====================================  =================================
implementation                 device output                          ``MoEForward.output``
=============================  =====================================  =================================
shard_on_i, its hybrid         ``[T', H]``                            the same
shard_on_i_dropping            ``[T', H]``, always with activations   the same
shard_on_block, accumulating   ``[T', 2, H]``; 2.31: ``[T', 2, H+E]``  ``out[:, 0, :H]``
shard_on_block, else           ``[T', H]``                            the same
shard_on_block_mx              ``[2, T', H]``                         ``out[0]``
shard_on_i_mx, its hybrid      ``[T', H]``                            the same
=============================  =====================================  =================================

Where upstream is silent or wrong:

* Done right: ``shard_on_i_mx`` and its hybrid can be called (upstream's dispatch returns None); their down bias is
  added once (each core adds it); multiply-on-I keeps the down bias as ``a * bias`` (2.29 drops it); shard_on_block with
  PRE_SCALE and skip_token, or without affinity and with a bias; shard_on_i without accumulation and with a bias, but
  no affinity on the output; MX without biases.
* Refused always: options that the implementation does not read, one bias or scale without its partner, FP8 weights
  without scales, activation buffers (never written upstream), activations where none are returned, any MX affinity mode
  but POST_SCALE (ignored or asserted upstream), ``conditions`` that miss a block with tokens, non-accumulating updates
  of a token in several blocks.
* Refused as device limits (see `device_limits`): the shapes of each kernel, GELU outside of MX (the kernel leaves its
  buffer unwritten), FP8 scales where they are ignored, PRE_SCALE in shard_on_i with B > 512, dropping with B not a
  multiple of 1024, shard_on_block with T not a multiple of 128, affinity modes and skip_weight that a kernel asserts
  off.

Sources: nki-library 2.29 ``core.moe.moe_cte``; 2.30 direct scales, 2.31 activation scales and MX storage options, 2.33
``accumulation_dtype``, ``skip_gate_proj`` and SquaredReLU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.moe_cte_arguments import check_arguments
from hf_neuron_moe.reference.moe_cte_operands import Arguments
from hf_neuron_moe.reference.moe_cte_run import run
from hf_neuron_moe.reference.moe_types import (
    NO_SKIP,
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTESpec,
    QuantizationConfig,
    SkipMode,
)


class MoEForward(NamedTuple):
    """What the forward returns; the activations are None unless the implementation returns them.

    Attributes:
        output: ``[T', H]``, a sink row is zero.
        gate_up_activations_T: ``[N, 2, I, B]`` pre-activations after scale, bias and clamp, before PRE_SCALE. The
            golden convention's PRE_SCALE multiplies the input, so they contain the affinity there.
        down_activations: ``[N, B, H]``, the down projection after its scale and before the affinity; before the down
            bias by the device's convention, after it by the golden one. None where the affinity sits on I.
    """

    output: Tensor
    gate_up_activations_T: Tensor | None
    down_activations: Tensor | None


def forward(arguments: Arguments) -> MoEForward:
    """Check and compute a call; :func:`moe_cte` and the direct kernels end here."""
    with torch.no_grad():
        return MoEForward(*run(check_arguments(arguments)))


@public
def moe_cte(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    block_size: int,
    spec: MoECTESpec,
    conditions: Tensor | None = None,
    gate_and_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    quantization_config: QuantizationConfig | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    gate_up_activations_T: Tensor | None = None,
    down_activations: Tensor | None = None,
    activation_function: ActFnType = ActFnType.SiLU,
    skip_dma: SkipMode = NO_SKIP,
    compute_dtype: torch.dtype = torch.bfloat16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    gate_up_in_scale: Tensor | None = None,
    down_in_scale: Tensor | None = None,
    accumulation_dtype: torch.dtype | None = None,
    skip_gate_proj: bool = False,
    *,
    convention: str = "device",
    device_limits: bool | None = None,
    mx_scale_rule: str = "neuron",
) -> MoEForward:
    """Forward of the experts over a block plan.

    Args:
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

    Returns:
        The output, and the activations where the implementation returns them.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    return forward(Arguments(**locals()))
