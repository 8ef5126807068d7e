"""The MXFP8 MLP backward of nki-library from release 2.31 on: the composition of phase 0 and the four phases.

Legend: S tokens, H hidden, I intermediate. The arithmetic is in :mod:`~hf_neuron_moe.reference.mlp_mxfp8.phases` and
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.recompute`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_multiple, check_same_device, check_shape
from hf_neuron_moe.errors import DTypeError, public
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.launch_record import note_launch
from hf_neuron_moe.reference.mlp_mxfp8.arguments import (
    check_descriptor,
    check_even,
    check_launch,
    check_logical,
    check_options,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MlpBwdMatmulConfig
from hf_neuron_moe.reference.mlp_mxfp8.phases import (
    BF16,
    StepOptions,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
)
from hf_neuron_moe.reference.mlp_mxfp8.recompute import KeptActivations, recompute_missing
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPBackward
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import TensorDescriptor


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
    where = "mlp_backward_mxfp8_base_nki"
    launch = {"run_with_lnc2": run_with_lnc2, "spill_reload": spill_reload, "use_scale_packing": use_scale_packing}
    check_launch({}, launch, fp8_x4_dtype)
    check_options(clamp_limits, matmul_config)
    rule = scale_rule(mx_scale_rule)
    for name, td in (("output_grad_td", output_grad_td), ("down_weight_T_td", down_weight_T_td)):
        check_descriptor(td, argument=name)
    if matmul_config is not None:
        (hidden_size, tokens), inner = output_grad_td.logical_shape, down_weight_T_td.logical_shape[1]
        matmul_config.backward_phases(tokens, hidden_size, inner, run_with_lnc2, "matmul_config.")
    # Both cores' work at once, for which configurations of one core are not made.
    bf16, common = torch.bfloat16, (fp8_x4_dtype, None, spill_reload)
    options = StepOptions(use_scale_packing=use_scale_packing, run_with_lnc2=False, mx_scale_rule=rule.value)
    compute_phase1_down_proj_mm_grad_mxfp8(
        output_grad_td, gate_pre_td, gate_act_td, up_td, d_gate_up_td, scratch_td, down_weight_T_td, 0, bf16, *common,
        clamp_limits=clamp_limits, **options,
    )  # fmt: skip
    compute_phase2_hidden_states_grad_mxfp8(
        hidden_states_grad_td, gate_up_weight_T_td, d_gate_up_td, 0, bf16, *common, **options
    )
    assert d_gate_up_td.data is not None
    grad_T_td = TensorDescriptor(d_gate_up_td.data.t()) if scratch_td is None else scratch_td
    compute_phase3_gate_up_weight_grad_mxfp8(weight_grad_td, hidden_states_T_td, grad_T_td, bf16, *common, **options)
    compute_phase4_down_weight_grad_mxfp8(
        down_weight_grad_td, output_grad_T_td, intermediate_T_td, 0, bf16, *common, **options
    )
    note_launch(where, run_with_lnc2=run_with_lnc2, matmul_config=matmul_config)


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
    where = "mlp_backward_mxfp8_nki"
    flags = {"run_with_lnc2": run_with_lnc2, "spill_reload": spill_reload, "use_scale_packing": use_scale_packing}
    check_launch({}, flags, fp8_x4_dtype)
    prepared = {
        "gate_up_weights": (gate_up_weights, gate_up_weights_scales),
        "gate_up_weight_T": (gate_up_weight_T, gate_up_weight_T_scales),
        "down_weight_T": (down_weight_T, down_weight_T_scales),
        "output_grad_T": (output_grad_T, output_grad_T_scales),
        "hidden_states_T": (hidden_states_T, hidden_states_T_scales),
    }
    kept = KeptActivations(gate_pre, gate_act, up, intermediate)
    task = describe_backward(
        output_grad, hidden_states, down_proj_weight, prepared, kept, use_scale_packing, run_with_lnc2
    )
    note_launch(where, matmul_config=matmul_config, fp8_x4_dtype=fp8_x4_dtype, **flags)
    rule = scale_rule(mx_scale_rule)
    return task.run(clamp_limits, matmul_config, use_scale_packing, run_with_lnc2, rule)


@dataclass(frozen=True)
class BackwardTask:
    """The described operands of one backward of release 2.31 and later."""

    output_grad: TensorDescriptor
    hidden_states: TensorDescriptor
    gate_up: TensorDescriptor
    gate_up_T: TensorDescriptor
    down_T: TensorDescriptor
    output_grad_T: TensorDescriptor
    hidden_states_T: TensorDescriptor
    kept: KeptActivations

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, H and I."""
        hidden_size, tokens = self.hidden_states.logical_shape
        return tokens, hidden_size, self.gate_up.logical_shape[1] // 2

    def run(
        self,
        clamp_limits: ClampLimits | None,
        matmul_config: MlpBwdMatmulConfig | None,
        use_scale_packing: bool,
        run_with_lnc2: bool,
        rule: ScaleRule,
    ) -> MLPBackward:
        """Recompute what is missing, run the four phases, return the gradients."""
        check_options(clamp_limits, matmul_config)
        tokens, hidden_size, inner = self.sizes
        if matmul_config is not None:
            matmul_config.backward_phases(tokens, hidden_size, inner, run_with_lnc2, "matmul_config.")
            matmul_config.recompute_phases(tokens, hidden_size, inner, run_with_lnc2, "matmul_config.")
        assert self.output_grad.data is not None
        device = self.output_grad.data.device

        def empty(rows: int, columns: int) -> TensorDescriptor:
            return TensorDescriptor(torch.empty((rows, columns), dtype=torch.bfloat16, device=device))

        found = recompute_missing(
            self.kept, KeptActivations(), self.hidden_states, self.gate_up,
            use_scale_packing=use_scale_packing, clamp_limits=clamp_limits, rule=rule,
        )  # fmt: skip
        gate_pre, gate_act, up = (TensorDescriptor(tensor) for tensor in (found.gate_pre, found.gate_act, found.up))
        d_x, d_gate_up_weight, d_down = (
            empty(tokens, hidden_size),
            empty(2 * inner, hidden_size),
            empty(hidden_size, inner),
        )
        mlp_backward_mxfp8_base_nki(
            self.output_grad, gate_pre, gate_act, up, self.gate_up_T, self.down_T, empty(tokens, 2 * inner),
            self.hidden_states_T, self.output_grad_T, TensorDescriptor(found.intermediate.t()), None,
            d_x, d_gate_up_weight, d_down,
            run_with_lnc2, matmul_config, use_scale_packing=use_scale_packing, clamp_limits=clamp_limits,
            mx_scale_rule=rule.value,
        )  # fmt: skip
        assert d_x.data is not None and d_gate_up_weight.data is not None and d_down.data is not None
        return MLPBackward(d_x.data, d_gate_up_weight.data, d_down.data)


def describe_backward(
    output_grad: Tensor,
    hidden_states: Tensor,
    down_proj_weight: Tensor | None,
    prepared: dict[str, tuple[Tensor | None, Tensor | None]],
    kept: KeptActivations,
    use_scale_packing: bool,
    run_with_lnc2: bool,
) -> BackwardTask:
    """Check the arguments of release 2.31 by name and describe them. Errors: :func:`mlp_backward_mxfp8_nki`."""
    for name, tensor in (("output_grad", output_grad), ("hidden_states", hidden_states)):
        check_dtype(tensor, BF16, argument=name)
    check_shape(hidden_states, (None, None), "[S, H]", argument="hidden_states")
    tokens, hidden_size = hidden_states.shape
    check_shape(output_grad, (tokens, hidden_size), "[S, H]", argument="output_grad")
    _check_presence(prepared, down_proj_weight)
    tds = {
        name: describe(
            tensor,
            scales,
            argument=name,
            scales_argument=f"{name}_scales",
            use_scale_packing=use_scale_packing,
            raw_shape="[2I, H]",
            raw_dtypes=BF16,
        )
        for name, (tensor, scales) in prepared.items()
        if tensor is not None
    }
    gate_up = tds["gate_up_weights"]
    inner = gate_up.logical_shape[1] // 2
    _check_sizes(tokens, hidden_size, gate_up, run_with_lnc2)
    wanted = {
        "gate_up_weight_T": (2 * inner, hidden_size, "[H, 2I]"), "down_weight_T": (hidden_size, inner, "[I, H]"),
        "output_grad_T": (tokens, hidden_size, "[H, S]"), "hidden_states_T": (tokens, hidden_size, "[H, S]"),
    }  # fmt: skip
    for name, (K, F, shape) in wanted.items():
        if name in tds:
            check_logical(tds[name], K, F, shape, argument=name)
    if down_proj_weight is not None:
        check_dtype(down_proj_weight, BF16, argument="down_proj_weight")
        check_shape(down_proj_weight, (hidden_size, inner), "[H, I]", argument="down_proj_weight")
    check_kept(kept, (tokens, inner))
    given = {name: tensor for name, (tensor, _) in prepared.items()}
    scales = {f"{name}_scales": scale for name, (_, scale) in prepared.items()}
    everything = {"output_grad": output_grad, "hidden_states": hidden_states, "down_proj_weight": down_proj_weight}
    check_same_device({**everything, **given, **scales, **vars(kept)})

    def transposed(tensor: Tensor | None) -> TensorDescriptor:
        assert tensor is not None
        return TensorDescriptor(tensor.t())

    return BackwardTask(
        output_grad=TensorDescriptor(output_grad),
        hidden_states=TensorDescriptor(hidden_states),
        gate_up=gate_up,
        gate_up_T=tds["gate_up_weight_T"] if "gate_up_weight_T" in tds else transposed(gate_up.data),
        down_T=tds["down_weight_T"] if "down_weight_T" in tds else transposed(down_proj_weight),
        output_grad_T=tds.get("output_grad_T", TensorDescriptor(output_grad.t())),
        hidden_states_T=tds.get("hidden_states_T", TensorDescriptor(hidden_states.t())),
        kept=kept,
    )


def _check_presence(prepared: dict[str, tuple[Tensor | None, Tensor | None]], down_proj_weight: Tensor | None) -> None:
    """Which tensors have to be given, and which only together."""

    def missing(argument: str, because: str, remedy: str) -> DTypeError:
        return DTypeError.about(argument, f"given {because}", "None", remedy)

    for name, (tensor, scales) in prepared.items():
        if tensor is None and scales is not None:
            raise missing(name, f"with {name}_scales", "Scales describe a tensor of codes.")
        if tensor is not None and scales is None and name != "gate_up_weights":
            because = f"with {name}: without scales upstream ignores the tensor"
            raise missing(
                f"{name}_scales", because, "There is no raw or pre-swizzled form of this argument; leave it out."
            )
    if prepared["gate_up_weights"][0] is None:
        raise missing("gate_up_weights", "always", "The recompute and the sizes come from it.")
    if prepared["gate_up_weights"][1] is not None and prepared["gate_up_weight_T"][0] is None:
        because = "with pre-quantized gate_up_weights: codes cannot be transposed"
        raise missing("gate_up_weight_T", because, "Quantize the transpose from bf16, along K = 2I.")
    if down_proj_weight is None and prepared["down_weight_T"][0] is None:
        raise missing("down_proj_weight", "unless down_weight_T and its scales are", "Pass the parameter, [H, I].")


def _check_sizes(tokens: int, hidden_size: int, gate_up: TensorDescriptor, run_with_lnc2: bool) -> None:
    both = gate_up.logical_shape[1]
    check_multiple(both, 2, "2I of gate_up_weights", "gate rows, then up rows")
    inner = both // 2
    even = {"hidden_states": (tokens, "S"), "output_grad": (hidden_size, "H"), "gate_up_weights": (inner, "I")}
    check_even(even, run_with_lnc2)
    rule = "output_grad is always raw, and phase 1 contracts over H"
    check_multiple(hidden_size, 128, "H of hidden_states", rule)
    check_logical(gate_up, hidden_size, both, "[2I, H]", argument="gate_up_weights")
    rule = "tokens are the contraction axis of the weight gradients"
    check_multiple(tokens, 128, "S of hidden_states", rule)
    rule = "the kernel quantizes d_gate and d_up along I"
    check_multiple(inner, 128, "I of gate_up_weights", rule)


def check_kept(kept: KeptActivations, shape: tuple[int, int], *, old_names: bool = False) -> None:
    """Check the checkpoints by name (release 2.30 calls the intermediate hidden)."""
    for name, tensor in vars(kept).items():
        if tensor is not None:
            argument = "hidden" if old_names and name == "intermediate" else name
            check_dtype(tensor, BF16, argument=argument)
            check_shape(tensor, shape, "[S, I]", argument=argument)
