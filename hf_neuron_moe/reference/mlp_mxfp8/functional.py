"""The MXFP8 MLP backward as one function over both documented releases.

Legend: S tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.mlp_mxfp8.arguments import check_options, scale_rule
from hf_neuron_moe.reference.mlp_mxfp8.backward import describe_backward
from hf_neuron_moe.reference.mlp_mxfp8.backward_2_30 import Scratch230, run_2_30
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MlpBwdMatmulConfig
from hf_neuron_moe.reference.mlp_mxfp8.recompute import KeptActivations, recompute_missing
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import TensorDescriptor

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

    Raises DTypeError, ShapeError, DeviceError or ConfigError for an argument that breaks a rule above.
    """
    prepared = {
        "gate_up_weights": (gate_up_weights, gate_up_weights_scales),
        "gate_up_weight_T": (gate_up_weight_T, gate_up_weight_T_scales),
        "down_weight_T": (down_weight_T, down_weight_T_scales),
        "output_grad_T": (output_grad_T, output_grad_T_scales),
        "hidden_states_T": (hidden_states_T, hidden_states_T_scales),
    }
    if release not in RELEASES:
        remedy = "Later releases compute as 2.31 does."
        raise _bad("release", f"one of {', '.join(RELEASES)}", repr(release), remedy)
    check_flags({"use_scale_packing": use_scale_packing})
    rule = scale_rule(mx_scale_rule)
    kept = KeptActivations(gate_pre, gate_act, up, intermediate)
    task = describe_backward(
        output_grad, hidden_states, down_proj_weight, prepared, kept, use_scale_packing, run_with_lnc2=False
    )
    if release == "2.31":
        return task.run(clamp_limits, matmul_config, use_scale_packing, False, rule)
    check_options(clamp_limits, matmul_config)
    newer: dict[str, object] = {"clamp_limits": clamp_limits, "matmul_config": matmul_config}
    newer |= {f"{name}_scales": scales for name, (_, scales) in prepared.items()}
    remedy = "Use release 2.31, or mlp_backward_mxfp8_nki_2_30 for that release's quantized operands."
    for name, value in newer.items():
        if value is not None:
            raise _bad(name, 'None with release="2.30"', type(value).__name__, remedy)
    if not use_scale_packing:
        raise _bad("use_scale_packing", 'True with release="2.30", which takes no scales here', "False", remedy)
    assert down_proj_weight is not None
    return _raw_2_30(output_grad, hidden_states, gate_up_weights, down_proj_weight, kept, rule)


def _raw_2_30(
    output_grad: Tensor,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_proj_weight: Tensor,
    kept: KeptActivations,
    rule: ScaleRule,
) -> MLPBackward:
    """Release 2.30 from parameters: the transposes it takes are views, hidden_T is the intermediate's."""
    inner = gate_up_weights.shape[0] // 2
    hidden_td, gate_up_td = TensorDescriptor(hidden_states), TensorDescriptor(gate_up_weights)
    found = recompute_missing(
        kept, KeptActivations(), hidden_td, gate_up_td, use_scale_packing=True, lone_384=True, rule=rule
    )
    operands = {
        "output_hidden_states_grad": output_grad,
        "hidden_states": hidden_states,
        "gate_proj_weight_T": gate_up_weights[:inner].t(),
        "up_proj_weight_T": gate_up_weights[inner:].t(),
        "down_proj_weight_T": down_proj_weight.t(),
        "gate_up_weights": gate_up_weights,
        "hidden_states_T": hidden_states.t(),
        "output_grad_T": output_grad.t(),
        "hidden_T": found.intermediate.t(),
    }
    tds = {name: TensorDescriptor(tensor) for name, tensor in operands.items()}
    with torch.no_grad():
        return run_2_30(tds, KeptActivations(*found), Scratch230(), use_scale_packing=True, rule=rule)


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy)
