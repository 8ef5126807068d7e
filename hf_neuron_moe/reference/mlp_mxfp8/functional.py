"""The MXFP8 MLP backward as one function over both documented releases.

Legend: S tokens, H hidden, I intermediate.
"""

from __future__ import annotations

from torch import Tensor

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.mlp_mxfp8.backward import PREPARED, describe_backward, run_2_31, run_backward
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MlpBwdMatmulConfig
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import check_options, scale_rule
from hf_neuron_moe.reference.mlp_mxfp8.recompute import step_options
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.moe_types import ClampLimits

RELEASES = ("2.31", "2.30")


@public
def mlp_backward_mxfp8(
    output_grad: Tensor,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_proj_weight: Tensor | None = None,
    *,
    gate_pre: Tensor | None = None,
    gate_act: Tensor | None = None,
    up: Tensor | None = None,
    intermediate: Tensor | None = None,
    release: str = "2.31",
    gate_up_weights_scales: Tensor | None = None,
    gate_up_weight_T: Tensor | None = None,
    gate_up_weight_T_scales: Tensor | None = None,
    down_weight_T: Tensor | None = None,
    down_weight_T_scales: Tensor | None = None,
    output_grad_T: Tensor | None = None,
    output_grad_T_scales: Tensor | None = None,
    hidden_states_T: Tensor | None = None,
    hidden_states_T_scales: Tensor | None = None,
    use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    matmul_config: MlpBwdMatmulConfig | None = None,
    mx_scale_rule: str = "neuron",
) -> MLPBackward:
    """Compute the gradients of ``mlp_forward_mxfp8`` with the arithmetic of nki-library's ``mlp_bwd_mxfp8``.

    Any of the four checkpoints may be missing: if gate_pre or up is, the missing one is multiplied again; a missing
    gate_act is ``bf16(silu(gate_pre))``, a missing intermediate ``bf16(gate_act * up)``: not the same bits as the
    forward's, which reads fp32 accumulators.

    * output_grad, hidden_states: bf16 ``[S, H]``; gate_up_weights: bf16 ``[2I, H]``, gate rows first;
      down_proj_weight: bf16 ``[H, I]``; the checkpoints: bf16 ``[S, I]``. S, H and I are multiples of 128.
    * release: ``"2.31"`` (and later) contracts dX over gate and up as one axis of 2I; ``"2.30"`` over each I, which
      groups other values unless I is a multiple of 512, and groups a contraction of exactly 384 as one tile.
    * mx_scale_rule: block scales of what is quantized here, ``"neuron"`` (nki 0.5 and later) or ``"floor"`` (earlier).
    * Release 2.31 only: pre-quantized operands with scales, use_scale_packing, clamp_limits and matmul_config, as in
      :func:`~hf_neuron_moe.reference.mlp_mxfp8.backward.mlp_backward_mxfp8_nki`. Release 2.30's pre-quantized and
      pre-swizzled forms: :func:`~hf_neuron_moe.reference.mlp_mxfp8.backward_2_30.mlp_backward_mxfp8_nki_2_30`.
    """
    call = dict(locals())
    if release not in RELEASES:
        expected = f"one of {', '.join(RELEASES)}"
        raise ConfigError.about("release", expected, repr(release), "Later releases compute as 2.31 does.")
    check_flags({"use_scale_packing": use_scale_packing})
    operands = describe_backward(call, run_with_lnc2=False)
    if release == "2.31":
        return run_2_31(operands, call, run_with_lnc2=False)
    scale_rule(mx_scale_rule)
    check_options(clamp_limits, matmul_config)
    fix = "Use release 2.31, or mlp_backward_mxfp8_nki_2_30 for that release's quantized operands."
    for name in ("clamp_limits", "matmul_config", *(f"{name}_scales" for name in PREPARED)):
        if call[name] is not None:
            raise ConfigError.about(name, 'None with release="2.30"', type(call[name]).__name__, fix)
    if not use_scale_packing:
        expected = 'True with release="2.30", which takes no scales here'
        raise ConfigError.about("use_scale_packing", expected, "False", fix)
    halves = tuple(TensorDescriptor(half.t()) for half in gate_up_weights.chunk(2))
    return run_backward(operands._replace(weights_T=halves), step_options(call))
