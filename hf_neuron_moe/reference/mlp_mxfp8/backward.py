"""The MXFP8 MLP backward of nki-library from release 2.31 on: the composition of phase 0 and the four phases.

Legend: S tokens, H hidden, I intermediate. The arithmetic is in :mod:`~hf_neuron_moe.reference.mlp_mxfp8.phases` and
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.recompute`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_multiple, check_same_device, check_shape
from hf_neuron_moe.errors import DTypeError, public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.launch_record import note_launch, scheduling
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MlpBwdMatmulConfig
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    Call,
    check_descriptor,
    check_even,
    check_logical,
    check_options,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import KeptActivations, StepOptions, recompute_missing, step_options
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.moe_types import ClampLimits

PREPARED = ("gate_up_weights", "gate_up_weight_T", "down_weight_T", "output_grad_T", "hidden_states_T")
"""Arguments of release 2.31 that may be pre-quantized, each with ``{name}_scales``."""


@public
def mlp_backward_mxfp8_base_nki(
    output_grad_td: TensorDescriptor,
    gate_pre_td: TensorDescriptor,
    gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor,
    gate_up_weight_T_td: TensorDescriptor,
    down_weight_T_td: TensorDescriptor,
    d_gate_up_td: TensorDescriptor,
    hidden_states_T_td: TensorDescriptor,
    output_grad_T_td: TensorDescriptor,
    intermediate_T_td: TensorDescriptor,
    scratch_td: TensorDescriptor | None,
    hidden_states_grad_td: TensorDescriptor,
    weight_grad_td: TensorDescriptor,
    down_weight_grad_td: TensorDescriptor,
    run_with_lnc2: bool = True,
    matmul_config: MlpBwdMatmulConfig | None = None,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    mx_scale_rule: str = "neuron",
) -> None:
    """Run phases 1 to 4 on descriptors, for both cores together; the four output descriptors' tensors are filled.

    scratch_td ``[2I, S]`` receives d_gate_up transposed; None reads the transposed view of d_gate_up instead. The
    operands are those of the phase functions, and so are the errors.
    """
    call = dict(locals())
    options = scheduling(call)
    check_options(clamp_limits, matmul_config)
    scale_rule(mx_scale_rule)
    for name in ("output_grad_td", "down_weight_T_td"):
        check_descriptor(call[name], name)
    if matmul_config is not None:
        (hidden_size, tokens), inner = output_grad_td.logical_shape, down_weight_T_td.logical_shape[1]
        matmul_config.backward_phases(tokens, hidden_size, inner, run_with_lnc2, "matmul_config.")
    tensors = PhaseTensors(
        output_grad_td, gate_pre_td, gate_act_td, up_td, (gate_up_weight_T_td,), down_weight_T_td, d_gate_up_td,
        hidden_states_T_td, output_grad_T_td, intermediate_T_td, scratch_td, hidden_states_grad_td, weight_grad_td,
        down_weight_grad_td,
    )  # fmt: skip
    run_phases(tensors, step_options(call), clamp_limits)
    note_launch("mlp_backward_mxfp8_base_nki", options)


@public
def mlp_backward_mxfp8_nki(
    output_grad: Tensor,
    hidden_states: Tensor,
    down_proj_weight: Tensor | None = None,
    gate_up_weights: Tensor | None = None,
    gate_up_weight_T: Tensor | None = None,
    gate_up_weight_T_scales: Tensor | None = None,
    gate_up_weights_scales: Tensor | None = None,
    down_weight_T: Tensor | None = None,
    down_weight_T_scales: Tensor | None = None,
    output_grad_T: Tensor | None = None,
    output_grad_T_scales: Tensor | None = None,
    hidden_states_T: Tensor | None = None,
    hidden_states_T_scales: Tensor | None = None,
    gate_pre: Tensor | None = None,
    gate_act: Tensor | None = None,
    up: Tensor | None = None,
    intermediate: Tensor | None = None,
    run_with_lnc2: bool = True,
    matmul_config: MlpBwdMatmulConfig | None = None,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    mx_scale_rule: str = "neuron",
) -> MLPBackward:
    """Run the backward as documented for nki-library 2.31 to 2.33; return the three gradients. No argument is written.

    * output_grad, hidden_states: bf16 ``[S, H]``, always raw. S, H and I are multiples of 128.
    * gate_up_weights: always required: bf16 ``[2I, H]``, or pre-quantized x4 ``[H/4, 2I]`` with
      gate_up_weights_scales; then gate_up_weight_T is required too. Source of the recompute and, raw, of phase 2.
    * down_proj_weight: bf16 ``[H, I]``; required unless down_weight_T is given.
    * Pre-quantized with scales, x4 or float8_e4m3fn with four times the columns: gate_up_weight_T ``[2I/4, H]``,
      swizzled as one tensor with K = 2I; down_weight_T ``[H/4, I]``; output_grad_T and hidden_states_T ``[S/4, H]``.
    * gate_pre, gate_act, up, intermediate: bf16 ``[S, I]`` checkpoints; missing ones are recomputed (phase 0).
    * clamp_limits: limits of the forward: clamps recomputed pre-activations and masks d_gate and d_up.
    * mx_scale_rule: ``"neuron"`` (nki 0.5 and later) or ``"floor"`` (earlier), for everything quantized here.
    * matmul_config, spill_reload, run_with_lnc2 (even sizes): checked and recorded. fp8_x4_dtype: e4m3.

    Raises DTypeError, ShapeError, DeviceError or ConfigError for what breaks a rule. Upstream ignores a ``*_T`` tensor
    without scales and fp8_x4_dtype; both are refused here.
    """
    call = dict(locals())
    options = scheduling(call)
    operands = describe_backward(call, run_with_lnc2)
    note_launch("mlp_backward_mxfp8_nki", options)
    return run_2_31(operands, call, run_with_lnc2)


class PhaseTensors(NamedTuple):
    """What phases 1 to 4 read and fill, as :func:`mlp_backward_mxfp8_base_nki` takes it.

    `weights_T` is the fused weight's transpose, or in release 2.30 those of gate and up.
    """

    output_grad: TensorDescriptor
    gate_pre: TensorDescriptor
    gate_act: TensorDescriptor
    up: TensorDescriptor
    weights_T: tuple[TensorDescriptor, ...]
    down_weight_T: TensorDescriptor
    d_gate_up: TensorDescriptor
    hidden_states_T: TensorDescriptor
    output_grad_T: TensorDescriptor
    intermediate_T: TensorDescriptor
    scratch: TensorDescriptor | None
    hidden_states_grad: TensorDescriptor
    weight_grad: TensorDescriptor
    down_weight_grad: TensorDescriptor


def run_phases(tensors: PhaseTensors, options: StepOptions, clamp_limits: ClampLimits | None = None) -> None:
    """Run the four phases for both cores at once, for which configurations of one core are not made."""
    t, bf16, lone_384 = tensors, torch.bfloat16, len(tensors.weights_T) == 2
    assert t.d_gate_up.data is not None
    compute_phase1_down_proj_mm_grad_mxfp8(
        t.output_grad, t.gate_pre, t.gate_act, t.up, t.d_gate_up, t.scratch, t.down_weight_T, 0, bf16,
        clamp_limits=clamp_limits, lone_384=lone_384, **options,
    )  # fmt: skip
    if lone_384:
        gate_T, up_T = t.weights_T
        d_gate, d_up = (TensorDescriptor(half) for half in t.d_gate_up.data.chunk(2, dim=1))
        compute_phase2_hidden_states_grad_mxfp8_2_30(
            t.hidden_states_grad, gate_T, up_T, d_gate, d_up, 0, bf16, **options
        )
    else:
        compute_phase2_hidden_states_grad_mxfp8(t.hidden_states_grad, t.weights_T[0], t.d_gate_up, 0, bf16, **options)
    grad_T = TensorDescriptor(t.d_gate_up.data.t()) if t.scratch is None else t.scratch
    compute_phase3_gate_up_weight_grad_mxfp8(
        t.weight_grad, t.hidden_states_T, grad_T, bf16, lone_384=lone_384, **options
    )
    compute_phase4_down_weight_grad_mxfp8(
        t.down_weight_grad, t.output_grad_T, t.intermediate_T, 0, bf16, lone_384=lone_384, **options
    )


class BackwardOperands(NamedTuple):
    """The described operands of one backward; `weights_T` as in :class:`PhaseTensors`.

    `intermediate_T` None is the transposed checkpoint.
    """

    output_grad: TensorDescriptor
    hidden_states: TensorDescriptor
    gate_up: TensorDescriptor
    weights_T: tuple[TensorDescriptor, ...]
    down_T: TensorDescriptor
    output_grad_T: TensorDescriptor
    hidden_states_T: TensorDescriptor
    intermediate_T: TensorDescriptor | None
    kept: KeptActivations

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, H and I."""
        hidden_size, tokens = self.hidden_states.logical_shape
        return tokens, hidden_size, self.gate_up.logical_shape[1] // 2


class ScratchBuffers(NamedTuple):
    """Buffers that release 2.30 leaves its intermediate results in; None is not wanted."""

    d_gate: Tensor | None = None
    d_up: Tensor | None = None
    transposed: Tensor | None = None
    recomputed: KeptActivations = KeptActivations()


NO_BUFFERS = ScratchBuffers()


def run_backward(
    operands: BackwardOperands,
    options: StepOptions,
    clamp_limits: ClampLimits | None = None,
    scratch: ScratchBuffers = NO_BUFFERS,
) -> MLPBackward:
    """Recompute what is missing, run the four phases, return the gradients."""
    tokens, hidden_size, inner = operands.sizes
    grad = operands.output_grad.data
    assert grad is not None
    shapes = ((tokens, 2 * inner), (tokens, hidden_size), (2 * inner, hidden_size), (hidden_size, inner))
    d_gate_up, *grads = (torch.empty(shape, dtype=torch.bfloat16, device=grad.device) for shape in shapes)
    found = recompute_missing(
        operands.kept, scratch.recomputed, operands.hidden_states, operands.gate_up, options,
        clamp_limits, lone_384=len(operands.weights_T) == 2,
    )  # fmt: skip
    assert found.intermediate.data is not None
    tensors = PhaseTensors(
        operands.output_grad, found.gate_pre, found.gate_act, found.up, operands.weights_T, operands.down_T,
        TensorDescriptor(d_gate_up), operands.hidden_states_T, operands.output_grad_T,
        operands.intermediate_T or TensorDescriptor(found.intermediate.data.t()),
        None if scratch.transposed is None else TensorDescriptor(scratch.transposed),
        *(TensorDescriptor(grad) for grad in grads),
    )  # fmt: skip
    run_phases(tensors, options, clamp_limits)
    for buffer, values in zip((scratch.d_gate, scratch.d_up), d_gate_up.chunk(2, dim=1)):
        if buffer is not None:
            buffer.copy_(values)
    return MLPBackward(*grads)


def run_2_31(operands: BackwardOperands, call: Call, run_with_lnc2: bool) -> MLPBackward:
    """Do that for the arguments of release 2.31, whose options are checked here."""
    limits, config = call["clamp_limits"], call["matmul_config"]
    check_options(limits, config)
    scale_rule(call["mx_scale_rule"])
    if config is not None:
        config.backward_phases(*operands.sizes, run_with_lnc2, "matmul_config.")
        config.recompute_phases(*operands.sizes, run_with_lnc2, "matmul_config.")
    grads = run_backward(operands, step_options(call), limits)
    launch = {"run_with_lnc2": run_with_lnc2, "use_scale_packing": call["use_scale_packing"], "matmul_config": config}
    note_launch("mlp_backward_mxfp8_base_nki", launch)
    return grads


def describe_backward(call: Call, run_with_lnc2: bool) -> BackwardOperands:
    """Check the arguments of release 2.31 by name and describe its operands."""
    output_grad, hidden_states, down = call["output_grad"], call["hidden_states"], call["down_proj_weight"]
    check_dtype(output_grad, BF16, "output_grad")
    check_dtype(hidden_states, BF16, "hidden_states")
    check_shape(hidden_states, (None, None), "[S, H]", "hidden_states")
    tokens, hidden_size = hidden_states.shape
    check_shape(output_grad, (tokens, hidden_size), "[S, H]", "output_grad")
    _check_presence(call)
    tds = {name: describe(call, name, name, "[2I, H]", BF16) for name in PREPARED if call[name] is not None}
    gate_up = tds.pop("gate_up_weights")
    _check_sizes(tokens, hidden_size, gate_up, run_with_lnc2)
    inner = gate_up.logical_shape[1] // 2
    wanted = {
        "gate_up_weight_T": (2 * inner, hidden_size, "[H, 2I]"), "down_weight_T": (hidden_size, inner, "[I, H]"),
        "output_grad_T": (tokens, hidden_size, "[H, S]"), "hidden_states_T": (tokens, hidden_size, "[H, S]"),
    }  # fmt: skip
    for name, td in tds.items():
        check_logical(td, *wanted[name], name)
    if down is not None:
        check_dtype(down, BF16, "down_proj_weight")
        check_shape(down, (hidden_size, inner), "[H, I]", "down_proj_weight")
    kept = KeptActivations(*(call[name] for name in ("gate_pre", "gate_act", "up", "intermediate")))
    kept.check((tokens, inner))
    check_same_device({name: value for name, value in call.items() if isinstance(value, Tensor)})

    def transposed(name: str, tensor: Tensor) -> TensorDescriptor:
        return tds[name] if name in tds else TensorDescriptor(tensor.t())

    return BackwardOperands(
        output_grad=TensorDescriptor(output_grad),
        hidden_states=TensorDescriptor(hidden_states),
        gate_up=gate_up,
        weights_T=(transposed("gate_up_weight_T", call["gate_up_weights"]),),
        down_T=transposed("down_weight_T", down),
        output_grad_T=transposed("output_grad_T", output_grad),
        hidden_states_T=transposed("hidden_states_T", hidden_states),
        intermediate_T=None,
        kept=kept,
    )


def _check_presence(call: Call) -> None:
    """Which tensors have to be given, and which only together."""
    given = {name for name, value in call.items() if value is not None}

    def need(argument: str, because: str, fix: str) -> None:
        if argument not in given:
            raise DTypeError.about(argument, f"given {because}", "None", fix)

    for name in PREPARED:
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


def _check_sizes(tokens: int, hidden_size: int, gate_up: TensorDescriptor, run_with_lnc2: bool) -> None:
    both = gate_up.logical_shape[1]
    check_multiple(both, 2, "2I of gate_up_weights", "gate rows, then up rows")
    inner = both // 2
    even = {"S of hidden_states": tokens, "H of output_grad": hidden_size, "I of gate_up_weights": inner}
    check_even(even, run_with_lnc2)
    rule = "output_grad is always raw, and phase 1 contracts over H"
    check_multiple(hidden_size, 128, "H of hidden_states", rule)
    check_logical(gate_up, hidden_size, both, "[2I, H]", "gate_up_weights")
    rule = "tokens are the contraction axis of the weight gradients"
    check_multiple(tokens, 128, "S of hidden_states", rule)
    rule = "the kernel quantizes d_gate and d_up along I"
    check_multiple(inner, 128, "I of gate_up_weights", rule)
