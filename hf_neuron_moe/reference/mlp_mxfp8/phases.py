"""The four phases of the MXFP8 MLP backward (nki-library 2.31 ``mlp_bwd_mxfp8``) on descriptors.

Legend: S tokens, H hidden, I intermediate; G = dL/dY ``[S, H]``. ``Q_K`` quantizes to MXFP8 e4m3 along K.

    1  d_int = Q_H(G) Q_H(Wd^T)^T  (fp32, never rounded by itself), then per element, each result rounded to bf16:
       silu'(gate_pre);  silu' * up;  d_gate = d_int * (silu' * up);  d_up = d_int * gate_act
    2  dX = Q_2I([d_gate, d_up]) Q_2I([Wg^T, Wu^T])^T      (2.30: two products along I into one fp32 accumulator)
    3  [dWg; dWu] = Q_S([d_gate, d_up]^T) Q_S(X^T)^T
    4  dWd = Q_S(G^T) Q_S(intermediate^T)^T

Each function fills its output descriptors' tensors and returns nothing, as upstream's do. With ``run_with_lnc2`` it
does the share of one core; the whole backward calls it once for everything. `mx_scale_rule` is the block scale rule of
what a phase quantizes itself (``"neuron"``, or ``"floor"`` of earlier releases), `config` is for the M, K, N of one
core's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.launch_record import note_launch
from hf_neuron_moe.reference.mlp_mxfp8.arguments import (
    check_buffer,
    check_descriptor,
    check_grouping,
    check_launch,
    check_logical,
    check_no_mix_at_384,
    check_options,
    check_packing,
    core_rows,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.elementwise import Phase1Elementwise
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig, check_config
from hf_neuron_moe.reference.mlp_mxfp8.tiles import product_tiles
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import MXOperand, TensorDescriptor

BF16 = (torch.bfloat16,)
_STORED = (torch.bfloat16, torch.float32)


class StepOptions(TypedDict):
    """What the whole backward passes to each of its steps."""

    use_scale_packing: bool
    run_with_lnc2: bool
    mx_scale_rule: str


@public
def get_program_sharding_info(run_with_lnc2: bool, core: int = 0) -> tuple[int, int]:
    """Return ``(number of programs, id of this one)``: ``(2, core)`` under LNC2, otherwise ``(1, 0)``.

    Args:
        run_with_lnc2: whether two cores run the kernel.
        core: which of the two to stand for; the device asks its runtime, a host has no id of its own.

    Raises:
        ConfigError: a core other than 0 or 1.
    """
    return _sharding(run_with_lnc2, core)


def _sharding(run_with_lnc2: bool, core: int) -> tuple[int, int]:
    check_flags({"run_with_lnc2": run_with_lnc2})
    if isinstance(core, bool) or core not in (0, 1):
        raise ConfigError.about("core", "0 or 1", repr(core), "LNC2 pairs two cores.")
    return (2, core) if run_with_lnc2 else (1, 0)


@public
def compute_phase1_down_proj_mm_grad_mxfp8(
    output_grad_td: TensorDescriptor,
    gate_pre_td: TensorDescriptor,
    gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor,
    d_gate_up_td: TensorDescriptor,
    scratch_td: TensorDescriptor | None,
    down_weight_td: TensorDescriptor,
    s_base: int,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    lone_384: bool = False,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill the rows from s_base on of d_gate_up ``[S, 2I]`` and the same columns of its transpose ``[2I, S]``.

    * output_grad_td: F = S, K = H. down_weight_td: F = I, K = H (the transpose of the parameter). Any mode.
    * gate_pre_td, gate_act_td, up_td: bf16 ``[S, I]``. d_gate_up_td: bf16, gate columns first.
    * scratch_td: bf16 ``[2I, S]``, or None where the caller transposes d_gate_up itself.
    * dtype: bf16, the dtype of the rounding points. lone_384: group raw K = 384 as release 2.30 does.
    * clamp_limits: multiplies d_gate (d_up) by 0 where gate_pre (up) is not strictly inside the non-linear (linear)
      limits; NaN stays NaN. A value that the recompute saturated is ``bf16(limit)``, which may lie inside.

    Raises DTypeError, ShapeError or ConfigError for operands, buffers or rows that do not fit.
    """
    _check_launch(
        "compute_phase1_down_proj_mm_grad_mxfp8",
        dtype,
        fp8_x4_dtype,
        config,
        spill_reload,
        use_scale_packing,
        run_with_lnc2,
    )
    grad, down = _operands(
        use_scale_packing,
        ("output_grad_td", output_grad_td),
        ("down_weight_td", down_weight_td),
        lone_384,
        mx_scale_rule,
    )
    check_options(clamp_limits, None)
    tokens, inner = grad.F, down.F
    square = (tokens, inner)
    gate_pre, gate_act, up = (
        check_buffer(td.data, square, "[S, I]", BF16, argument=name)
        for name, td in (("gate_pre_td", gate_pre_td), ("gate_act_td", gate_act_td), ("up_td", up_td))
    )
    d_gate_up = _output(d_gate_up_td, (tokens, 2 * inner), "[S, 2I]", BF16, "d_gate_up_td")
    rows = core_rows(tokens, s_base, run_with_lnc2, argument="s_base")
    check_config(config, (rows.stop - rows.start, grad.K, inner), argument="config")
    scratch = call_scratch(d_gate_up.device)
    with torch.no_grad():
        step = Phase1Elementwise(gate_pre, gate_act, up, d_gate_up, clamp_limits or ClampLimits(), scratch)
        for tile in product_tiles([(grad, down)], scratch, rows=rows, k_major=(False, True)):
            step.run(tile)
        if scratch_td is not None:
            target = _output(scratch_td, (2 * inner, tokens), "[2I, S]", BF16, "scratch_td")
            target[:, rows].copy_(d_gate_up[rows].t())


@public
def compute_phase2_hidden_states_grad_mxfp8(
    hidden_states_grad_td: TensorDescriptor,
    gate_up_weight_td: TensorDescriptor,
    d_gate_up_td: TensorDescriptor,
    s_base: int,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill the rows from s_base on of dX ``[S, H]``, one product with K = 2I (release 2.31 and later).

    * gate_up_weight_td: F = H, K = 2I (gate, then up: the fused weight's transpose). d_gate_up_td: raw, F = S, K = 2I.
    * hidden_states_grad_td: bf16 or fp32.

    Raises DTypeError, ShapeError or ConfigError for operands, buffers or rows that do not fit.
    """
    _check_launch(
        "compute_phase2_hidden_states_grad_mxfp8",
        dtype,
        fp8_x4_dtype,
        config,
        spill_reload,
        use_scale_packing,
        run_with_lnc2,
    )
    pair = (("d_gate_up_td", d_gate_up_td), ("gate_up_weight_td", gate_up_weight_td))
    operands = _operands(use_scale_packing, *pair, False, mx_scale_rule)
    _phase2(hidden_states_grad_td, [operands], config, s_base, run_with_lnc2)


@public
def compute_phase2_hidden_states_grad_mxfp8_2_30(
    hidden_states_grad_td: TensorDescriptor,
    gate_weight_td: TensorDescriptor,
    up_weight_td: TensorDescriptor,
    d_gate_td: TensorDescriptor,
    d_up_td: TensorDescriptor,
    s_base: int,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill the rows from s_base on of dX ``[S, H]`` as release 2.30 does: K = I twice, gate first, one accumulator.

    The values differ from :func:`compute_phase2_hidden_states_grad_mxfp8` unless I is a multiple of 512, where no
    MX group reaches over the border of gate and up.

    * gate_weight_td, up_weight_td: F = H, K = I (transposes of the parameters). d_gate_td, d_up_td: raw, F = S, K = I.

    Raises DTypeError, ShapeError or ConfigError for operands, buffers or rows that do not fit.
    """
    _check_launch(
        "compute_phase2_hidden_states_grad_mxfp8_2_30",
        dtype,
        fp8_x4_dtype,
        config,
        spill_reload,
        use_scale_packing,
        run_with_lnc2,
    )
    gate_pair = (("d_gate_td", d_gate_td), ("gate_weight_td", gate_weight_td))
    up_pair = (("d_up_td", d_up_td), ("up_weight_td", up_weight_td))
    pairs = [_operands(use_scale_packing, *pair, True, mx_scale_rule) for pair in (gate_pair, up_pair)]
    (K, F), (tokens_K, tokens) = gate_weight_td.logical_shape, d_gate_td.logical_shape
    check_logical(up_weight_td, K, F, "[H, I]", argument="up_weight_td")
    check_logical(d_up_td, tokens_K, tokens, "[S, I]", argument="d_up_td")
    _phase2(hidden_states_grad_td, pairs, config, s_base, run_with_lnc2)


def _phase2(
    grad_td: TensorDescriptor,
    pairs: Sequence[tuple[MXOperand, MXOperand]],
    config: MatmulMxfp8KernelConfig | None,
    s_base: int,
    lnc2: bool,
) -> None:
    left, right = pairs[0]
    out = _output(grad_td, (left.F, right.F), "[S, H]", _STORED, "hidden_states_grad_td")
    rows = core_rows(left.F, s_base, lnc2, argument="s_base")
    check_config(config, (rows.stop - rows.start, left.K, right.F), argument="config")
    _store_product(out, pairs, rows, (False, True))


@public
def compute_phase3_gate_up_weight_grad_mxfp8(
    weight_grad_td: TensorDescriptor,
    hidden_states_T_td: TensorDescriptor,
    grad_T_td: TensorDescriptor,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    *,
    core: int | None = None,
    lone_384: bool = False,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill ``[dWg; dWu]`` ``[2I, H]``, contracted over S.

    * hidden_states_T_td: F = H, K = S. grad_T_td: raw, F = 2I, K = S. weight_grad_td: bf16 or fp32.
    * core: under LNC2 core 0 makes the gate rows and core 1 the up rows; None (a host) makes both.
    * lone_384: group raw K = 384 as release 2.30 does.

    Raises DTypeError, ShapeError or ConfigError for operands or buffers that do not fit.
    """
    _check_launch(
        "compute_phase3_gate_up_weight_grad_mxfp8",
        dtype,
        fp8_x4_dtype,
        config,
        spill_reload,
        use_scale_packing,
        run_with_lnc2,
    )
    pair = (("grad_T_td", grad_T_td), ("hidden_states_T_td", hidden_states_T_td))
    operands = _operands(use_scale_packing, *pair, lone_384, mx_scale_rule)
    both, hidden_size = operands[0].F, operands[1].F
    out = _output(weight_grad_td, (both, hidden_size), "[2I, H]", _STORED, "weight_grad_td")
    if core is None:
        rows = slice(0, both)
    else:
        programs, number = _sharding(run_with_lnc2, core)
        rows = core_rows(both, number * both // programs, run_with_lnc2, argument="core")
    size = (both // (2 if run_with_lnc2 else 1), operands[0].K, hidden_size)
    check_config(config, size, argument="config")
    _store_product(out, [operands], rows, (True, True))


@public
def compute_phase4_down_weight_grad_mxfp8(
    down_weight_grad_td: TensorDescriptor,
    output_grad_T_td: TensorDescriptor,
    intermediate_T_td: TensorDescriptor,
    h_base: int,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    *,
    lone_384: bool = False,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill the rows from h_base on of dWd ``[H, I]`` (half of H under LNC2), contracted over S.

    * output_grad_T_td: F = H, K = S. intermediate_T_td: F = I, K = S. down_weight_grad_td: bf16 or fp32.
    * lone_384: group raw K = 384 as release 2.30 does.

    Raises DTypeError, ShapeError or ConfigError for operands, buffers or rows that do not fit.
    """
    _check_launch(
        "compute_phase4_down_weight_grad_mxfp8",
        dtype,
        fp8_x4_dtype,
        config,
        spill_reload,
        use_scale_packing,
        run_with_lnc2,
    )
    pair = (("output_grad_T_td", output_grad_T_td), ("intermediate_T_td", intermediate_T_td))
    operands = _operands(use_scale_packing, *pair, lone_384, mx_scale_rule)
    shape = (operands[0].F, operands[1].F)
    out = _output(down_weight_grad_td, shape, "[H, I]", _STORED, "down_weight_grad_td")
    rows = core_rows(shape[0], h_base, run_with_lnc2, argument="h_base")
    check_config(config, (rows.stop - rows.start, operands[0].K, shape[1]), argument="config")
    _store_product(out, [operands], rows, (True, True))


def _store_product(
    out: Tensor, pairs: Sequence[tuple[MXOperand, MXOperand]], rows: slice, k_major: tuple[bool, bool]
) -> None:
    with torch.no_grad():
        for tile in product_tiles(pairs, call_scratch(out.device), rows=rows, k_major=k_major):
            out[tile.rows, tile.columns].copy_(tile.values)


def _operands(
    use_scale_packing: bool,
    left: tuple[str, TensorDescriptor],
    right: tuple[str, TensorDescriptor],
    lone_384: bool,
    mx_scale_rule: str,
) -> tuple[MXOperand, MXOperand]:
    """Return both operands of one product, checked against each other."""
    check_flags({"lone_384": lone_384})
    rule = scale_rule(mx_scale_rule)
    for name, td in (left, right):
        check_descriptor(td, argument=name)
        check_packing(td, use_scale_packing, argument=name)
    operands = tuple(MXOperand(td, argument=name, lone_384=lone_384, rule=rule) for name, td in (left, right))
    K = operands[0].K
    check_logical(right[1], K, operands[1].F, "[F, K]", argument=right[0])
    if lone_384:
        check_no_mix_at_384(dict((left, right)), K)
    check_grouping({left[0]: operands[0], right[0]: operands[1]})
    return operands[0], operands[1]


def _output(
    td: TensorDescriptor, shape: tuple[int, int], names: str, dtypes: tuple[torch.dtype, ...], argument: str
) -> Tensor:
    return check_buffer(td.data, shape, names, dtypes, argument=argument)


def _check_launch(
    kernel: str,
    dtype: torch.dtype,
    fp8_x4_dtype: object,
    config: MatmulMxfp8KernelConfig | None,
    spill_reload: bool,
    use_scale_packing: bool,
    run_with_lnc2: bool,
) -> None:
    flags = {"spill_reload": spill_reload, "use_scale_packing": use_scale_packing, "run_with_lnc2": run_with_lnc2}
    check_launch({}, flags, fp8_x4_dtype)
    if dtype != torch.bfloat16:
        raise ConfigError.about(
            "dtype",
            "torch.bfloat16, which every rounding point of the backward has",
            str(dtype),
            "Pass fp32 output tensors to see unrounded sums.",
        )
    note_launch(kernel, config=config, fp8_x4_dtype=fp8_x4_dtype, **flags)
