"""The MXFP8 MLP backward of nki-library from release 2.31 on: the composition of phase 0 and the four phases.

Legend: S tokens, H hidden, I intermediate. The arithmetic is in :mod:`~hf_neuron_moe.reference.mlp_mxfp8.phases` and
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.recompute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_multiple, check_same_device, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.launch_record import note_launch
from hf_neuron_moe.reference.mlp_mxfp8 import phases
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import PHASES, PROJECTIONS, MlpBwdMatmulConfig, counted_configs
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    KernelCall,
    check_buffer,
    check_descriptor,
    check_logical,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import CHECKPOINTS, recompute_missing
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.specification import multiples

_MULTIPLES = multiples("mlp_backward")
RELEASES = ("2.31", "2.30")

_PREPARED = ("gate_up_weights", "gate_up_weight_T", "down_weight_T", "output_grad_T", "hidden_states_T")
"""Arguments of release 2.31 that may be pre-quantized, each with ``{name}_scales``."""


class MLPBackward(NamedTuple):
    """All bf16: ``[S, H]``, ``[2I, H]`` (gate rows first) and ``[H, I]``."""

    hidden_states_grad: Tensor
    gate_up_weight_grad: Tensor
    down_proj_weight_grad: Tensor


@public
def mlp_backward_mxfp8(
    output_grad: Tensor, hidden_states: Tensor, gate_up_weights: Tensor,
    down_proj_weight: Tensor | None = None,
    *,
    gate_pre: Tensor | None = None, gate_act: Tensor | None = None, up: Tensor | None = None,
    intermediate: Tensor | None = None,
    release: str = "2.31",
    gate_up_weights_scales: Tensor | None = None,
    gate_up_weight_T: Tensor | None = None, gate_up_weight_T_scales: Tensor | None = None,
    down_weight_T: Tensor | None = None, down_weight_T_scales: Tensor | None = None,
    output_grad_T: Tensor | None = None, output_grad_T_scales: Tensor | None = None,
    hidden_states_T: Tensor | None = None, hidden_states_T_scales: Tensor | None = None,
    use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    matmul_config: MlpBwdMatmulConfig | None = None,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> MLPBackward:  # fmt: skip
    """Compute the gradients of ``mlp_forward_mxfp8`` with the arithmetic of nki-library's ``mlp_bwd_mxfp8``.

    Any of the four checkpoints may be missing: gate_pre and up are multiplied again; a missing gate_act is
    ``bf16(silu(gate_pre))``, a missing intermediate ``bf16(gate_act * up)``: not the forward's bits, which reads fp32.

    * output_grad, hidden_states: bf16 ``[S, H]``; gate_up_weights: bf16 ``[2I, H]``, gate rows first;
      down_proj_weight: bf16 ``[H, I]``; the checkpoints: bf16 ``[S, I]``. S, H and I are multiples of 128.
    * release: ``"2.31"`` (and later) contracts dX over gate and up as one axis of 2I. ``"2.30"`` does so over each I,
      which groups other values unless I is a multiple of 512. It also groups a contraction of exactly 384 as one tile.
    * Release 2.31 only: pre-quantized operands with scales, use_scale_packing, clamp_limits and matmul_config, as in
      :func:`mlp_backward_mxfp8_nki`. Release 2.30's are in ``mlp_backward_mxfp8_nki_2_30``.
    """
    kernel = KernelCall("mlp_backward_mxfp8", locals())
    if release not in RELEASES:
        expected = f"one of {', '.join(RELEASES)}"
        raise ConfigError.about("release", expected, repr(release), "Later releases compute as 2.31 does.")
    fix = "Use release 2.31, or mlp_backward_mxfp8_nki_2_30 for that release's quantized operands."
    for name in ("clamp_limits", "matmul_config", *(f"{name}_scales" for name in _PREPARED)):
        if release == "2.30" and (value := kernel.call[name]) is not None:
            raise ConfigError.about(name, 'None with release="2.30"', type(value).__name__, fix)
    operands = _describe(kernel)
    if release == "2.31":
        return _run_2_31(operands, kernel)
    if not use_scale_packing:
        expected = 'True with release="2.30", which takes no scales here'
        raise ConfigError.about("use_scale_packing", expected, "False", fix)
    gate_T, up_T = (TensorDescriptor(half.t()) for half in gate_up_weights.chunk(2))
    operands |= {"gate_proj_weight_T": gate_T, "up_proj_weight_T": up_T}
    configs = counted_configs({}, _sizes(operands), kernel.lnc2)
    return run_backward(operands, kernel.step_options(), configs=configs)


@public
def mlp_backward_mxfp8_nki(
    output_grad: Tensor, hidden_states: Tensor,
    down_proj_weight: Tensor | None = None,
    gate_up_weights: Tensor | None = None,
    gate_up_weight_T: Tensor | None = None, gate_up_weight_T_scales: Tensor | None = None,
    gate_up_weights_scales: Tensor | None = None,
    down_weight_T: Tensor | None = None, down_weight_T_scales: Tensor | None = None,
    output_grad_T: Tensor | None = None, output_grad_T_scales: Tensor | None = None,
    hidden_states_T: Tensor | None = None, hidden_states_T_scales: Tensor | None = None,
    gate_pre: Tensor | None = None, gate_act: Tensor | None = None, up: Tensor | None = None,
    intermediate: Tensor | None = None,
    run_with_lnc2: bool = True,
    matmul_config: MlpBwdMatmulConfig | None = None,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True, use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> MLPBackward:  # fmt: skip
    """Run the backward as documented for nki-library 2.31 to 2.33; return the three gradients. No argument is written.

    Operands, checkpoints and their sizes are those of :func:`mlp_backward_mxfp8`, and these:

    * gate_up_weights, always required: bf16 ``[2I, H]``, or pre-quantized x4 ``[H/4, 2I]`` with scales, which needs
      gate_up_weight_T too. down_proj_weight: bf16 ``[H, I]``; required unless down_weight_T is given.
    * Pre-quantized with scales, x4 or float8_e4m3fn with four times the columns: gate_up_weight_T ``[2I/4, H]``,
      swizzled as one tensor with K = 2I; down_weight_T ``[H/4, I]``; output_grad_T and hidden_states_T ``[S/4, H]``.
    * matmul_config, spill_reload, run_with_lnc2 (even sizes): checked and recorded. With ``execute="tiles"`` they set
      the cores, the tiles and the order of the sums.
    * mx_scale_rule: block scales of what is quantized here, "neuron" (nki 0.5 and later) or "floor" (earlier releases).
    """
    kernel = KernelCall("mlp_backward_mxfp8_nki", locals())
    operands = _describe(kernel)
    kernel.launch()
    return _run_2_31(operands, kernel)


@public
def mlp_backward_mxfp8_base_nki(
    output_grad_td: TensorDescriptor, gate_pre_td: TensorDescriptor, gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor, gate_up_weight_T_td: TensorDescriptor, down_weight_T_td: TensorDescriptor,
    d_gate_up_td: TensorDescriptor, hidden_states_T_td: TensorDescriptor, output_grad_T_td: TensorDescriptor,
    intermediate_T_td: TensorDescriptor,
    scratch_td: TensorDescriptor | None,
    hidden_states_grad_td: TensorDescriptor, weight_grad_td: TensorDescriptor,
    down_weight_grad_td: TensorDescriptor,
    run_with_lnc2: bool = True,
    matmul_config: MlpBwdMatmulConfig | None = None,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True, use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Run phases 1 to 4 on their operands, for both cores together; the four output descriptors' tensors are filled.

    scratch_td ``[2I, S]`` receives d_gate_up transposed; None reads the transposed view of d_gate_up instead.
    """
    kernel = KernelCall("mlp_backward_mxfp8_base_nki", locals())
    for name in ("output_grad_td", "down_weight_T_td"):
        check_descriptor(kernel.call[name], name)
    if matmul_config is not None:
        (hidden_size, tokens), inner = output_grad_td.logical_shape, down_weight_T_td.logical_shape[1]
        matmul_config.resolve(PHASES, (tokens, hidden_size, inner), run_with_lnc2, "matmul_config.")
    tensors = {name.removesuffix("_td"): td for name, td in kernel.call.items() if name.endswith("_td")}
    phases.run_phases(tensors, kernel.step_options(), clamp_limits, matmul_config if execute == "tiles" else None)
    kernel.launch()


def run_backward(
    operands: Mapping[str, TensorDescriptor],
    options: Mapping[str, Any],
    clamp_limits: ClampLimits | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    configs: MlpBwdMatmulConfig | None = None,
) -> MLPBackward:
    """Recompute what is missing, run the four phases, return the gradients.

    `operands` have the names of :func:`mlp_backward_mxfp8_nki`, without checkpoints that were not kept. Release 2.30
    has `gate_proj_weight_T` and `up_proj_weight_T` for `gate_up_weight_T`, and leaves intermediate results in
    `buffers`: `d_gate`, `d_up`, `scratch` (both transposed) and recomputed checkpoints. `configs` are one core's.
    """
    tensors: dict[str, Any] = dict(operands)
    buffers, configs = buffers or {}, configs if options["execute"] == "tiles" else None
    tokens, hidden_size, inner = _sizes(operands)
    grad = operands["output_grad"].data
    assert grad is not None
    recompute_missing(tensors, buffers, options, clamp_limits, "up_proj_weight_T" in operands, configs)
    tensors.setdefault("intermediate_T", TensorDescriptor(tensors["intermediate"].data.t()))
    tensors["scratch"] = TensorDescriptor(buffers["scratch"]) if "scratch" in buffers else None
    outputs = {"hidden_states_grad": (tokens, hidden_size), "weight_grad": (2 * inner, hidden_size)}
    outputs |= {"down_weight_grad": (hidden_size, inner), "d_gate_up": (tokens, 2 * inner)}
    made = {name: grad.new_empty(shape, dtype=torch.bfloat16) for name, shape in outputs.items()}
    tensors |= {name: TensorDescriptor(tensor) for name, tensor in made.items()}
    phases.run_phases(tensors, options, clamp_limits, configs)
    d_gate_up = made.pop("d_gate_up")
    for name, values in zip(("d_gate", "d_up"), d_gate_up.chunk(2, dim=1)):
        if name in buffers:
            buffers[name].copy_(values)
    return MLPBackward(*made.values())


def _run_2_31(operands: Mapping[str, TensorDescriptor], kernel: KernelCall) -> MLPBackward:
    """Check the configuration of a backward of release 2.31 and run it."""
    launch = {name: kernel.call[name] for name in ("use_scale_packing", "matmul_config")}
    config: MlpBwdMatmulConfig | None = launch["matmul_config"]
    if config is not None:
        for names in (PHASES, PROJECTIONS):
            config.resolve(names, _sizes(operands), kernel.lnc2, "matmul_config.")
    grads = run_backward(operands, kernel.step_options(), kernel.call["clamp_limits"], configs=config)
    note_launch("mlp_backward_mxfp8_base_nki", {"run_with_lnc2": kernel.lnc2} | launch)
    return grads


def _sizes(operands: Mapping[str, TensorDescriptor]) -> tuple[int, int, int]:
    """S, H and I."""
    hidden_size, tokens = operands["hidden_states"].logical_shape
    return tokens, hidden_size, operands["gate_up_weights"].logical_shape[1] // 2


def _describe(kernel: KernelCall) -> dict[str, TensorDescriptor]:
    """Check the arguments of release 2.31 by name and describe its operands for :func:`run_backward`."""
    call = kernel.call
    output_grad, hidden_states, down = call["output_grad"], call["hidden_states"], call["down_proj_weight"]
    check_dtype(output_grad, BF16, "output_grad")
    tokens, hidden_size = check_buffer(hidden_states, (None, None), "[S, H]", "hidden_states").shape
    check_shape(output_grad, (tokens, hidden_size), "[S, H]", "output_grad")
    _check_presence(call)
    tds = {name: kernel.describe(name, name, "[2I, H]", BF16) for name in _PREPARED if call[name] is not None}
    gate_up = tds["gate_up_weights"]
    both = gate_up.logical_shape[1]
    check_multiple(both, 2, "2I of gate_up_weights", "gate rows, then up rows")
    inner = both // 2
    kernel.check_even({"S of hidden_states": tokens, "H of output_grad": hidden_size, "I of gate_up_weights": inner})
    check_multiple(
        hidden_size, _MULTIPLES["H"], "H of hidden_states", "output_grad is always raw, and phase 1 contracts over H"
    )
    check_logical(gate_up, hidden_size, both, "[2I, H]", "gate_up_weights")
    check_multiple(
        tokens, _MULTIPLES["S"], "S of hidden_states", "tokens are the contraction axis of the weight gradients"
    )
    check_multiple(inner, _MULTIPLES["I"], "I of gate_up_weights", "the kernel quantizes d_gate and d_up along I")
    transposes = {
        "gate_up_weight_T": (both, hidden_size, "[H, 2I]", call["gate_up_weights"]),
        "down_weight_T": (hidden_size, inner, "[I, H]", down),
        "output_grad_T": (tokens, hidden_size, "[H, S]", output_grad),
        "hidden_states_T": (tokens, hidden_size, "[H, S]", hidden_states),
    }
    for name, (K, F, shape, _) in transposes.items():
        if name in tds:
            check_logical(tds[name], K, F, shape, name)
    kept = [name for name in CHECKPOINTS if call[name] is not None]
    buffers = {"down_proj_weight": "[H, I]"} | dict.fromkeys(kept, "[S, I]")
    for name, shape in buffers.items():
        if call[name] is not None:
            check_buffer(call[name], (hidden_size if shape == "[H, I]" else tokens, inner), shape, name)
    check_same_device({name: value for name, value in call.items() if isinstance(value, Tensor)})
    made = {name: TensorDescriptor(tensor.t()) for name, (*_, tensor) in transposes.items() if name not in tds}
    return tds | made | {name: TensorDescriptor(call[name]) for name in ("output_grad", "hidden_states", *kept)}


def _check_presence(call: Mapping[str, Any]) -> None:
    """Which tensors have to be given, and which only together."""
    given = {name for name, value in call.items() if value is not None}

    def need(argument: str, because: str, fix: str) -> None:
        if argument not in given:
            raise DTypeError.about(argument, f"given {because}", "None", fix)

    for name in _PREPARED:
        if f"{name}_scales" in given:
            need(name, f"with {name}_scales", "Scales describe a tensor of codes.")
        elif name in given and name != "gate_up_weights":
            fix = "There is no raw or pre-swizzled form of this argument; leave it out."
            need(f"{name}_scales", f"with {name}: without scales upstream ignores the tensor", fix)
    need("gate_up_weights", "always", "The recompute and the sizes come from it.")
    if "gate_up_weights_scales" in given:
        because = "with pre-quantized gate_up_weights: codes cannot be transposed"
        need("gate_up_weight_T", because, "Quantize the transpose from bf16, along K = 2I.")
    if "down_weight_T" not in given:
        need("down_proj_weight", "unless down_weight_T and its scales are", "Pass the parameter, [H, I].")
