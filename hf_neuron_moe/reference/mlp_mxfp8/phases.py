"""The four phases of the MXFP8 MLP backward (nki-library 2.31 ``mlp_bwd_mxfp8``) on descriptors.

Legend: S tokens, H hidden, I intermediate; G = dL/dY ``[S, H]``. ``Q_K`` quantizes to MXFP8 e4m3 along K.

    1  d_int = Q_H(G) Q_H(Wd^T)^T  (fp32, never rounded by itself), then per element, each result rounded to bf16:
       silu'(gate_pre);  silu' * up;  d_gate = d_int * (silu' * up);  d_up = d_int * gate_act
    2  dX = Q_2I([d_gate, d_up]) Q_2I([Wg^T, Wu^T])^T      (2.30: two products along I into one fp32 accumulator)
    3  [dWg; dWu] = Q_S([d_gate, d_up]^T) Q_S(X^T)^T
    4  dWd = Q_S(G^T) Q_S(intermediate^T)^T

Each function fills its output descriptors' tensors. With ``run_with_lnc2`` it does the share of one core. The whole
backward calls it once for everything, or with tiles once per core. `mx_scale_rule` is the block scale rule of what a
phase quantizes itself (``"neuron"``, or ``"floor"`` of earlier releases). `config` is for the M, K, N of one core's
product. `lone_384` groups a raw K of 384 as release 2.30 does. `execute` is ``"fast"`` or ``"tiles"``: the loops of
:mod:`~hf_neuron_moe.reference.mlp_mxfp8.tile_walk`, with the tiles and blocks of `config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch, call_scratch
from hf_neuron_moe.backends.torch.gating import mask_
from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.described_operand import MXOperand, TensorDescriptor
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig, MlpBwdMatmulConfig
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import STORED, KernelCall, check_logical
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import product_tiles
from hf_neuron_moe.reference.moe_types import ClampLimits

_BF16 = (
    "torch.bfloat16, which every rounding point of the backward has",
    "Pass fp32 output tensors to see unrounded sums.",
)
_ELEMENTWISE_ROWS = 64  # rows of one elementwise step: its fp32 buffers stay in a core's second-level cache


@public
def get_program_sharding_info(run_with_lnc2: bool, core: int = 0) -> tuple[int, int]:
    """Return ``(number of programs, id of this one)``: ``(2, core)`` under LNC2, otherwise ``(1, 0)``."""
    return _sharding(run_with_lnc2, core)  # the device asks its runtime, a host has no id of its own


def _sharding(run_with_lnc2: bool, core: int) -> tuple[int, int]:
    check_flags({"run_with_lnc2": run_with_lnc2})
    if isinstance(core, bool) or core not in (0, 1):
        raise ConfigError.about("core", "0 or 1", repr(core), "LNC2 pairs two cores.")
    return (2, core) if run_with_lnc2 else (1, 0)


@public
def compute_phase1_down_proj_mm_grad_mxfp8(
    output_grad_td: TensorDescriptor, gate_pre_td: TensorDescriptor, gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor, d_gate_up_td: TensorDescriptor,
    scratch_td: TensorDescriptor | None,
    down_weight_td: TensorDescriptor,
    s_base: int, dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    lone_384: bool = False, mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill the rows from s_base on of d_gate_up ``[S, 2I]`` and the same columns of its transpose ``[2I, S]``.

    * output_grad_td: F = S, K = H. down_weight_td: F = I, K = H (the transpose of the parameter). Any mode.
    * gate_pre_td, gate_act_td, up_td: bf16 ``[S, I]``. d_gate_up_td: bf16, gate columns first.
    * scratch_td: bf16 ``[2I, S]``, or None where the caller transposes d_gate_up itself.
    * dtype: bf16, the dtype of the rounding points.
    * clamp_limits: multiplies d_gate (d_up) by 0 where gate_pre (up) is not strictly inside the non-linear (linear)
      limits; NaN stays NaN. A value that the recompute saturated is ``bf16(limit)``, which may lie inside.
    """
    step = KernelCall("compute_phase1_down_proj_mm_grad_mxfp8", locals(), _BF16)
    grad, weight = step.pair("output_grad_td", "down_weight_td")
    tokens, inner = grad.F, weight.F
    saved = [step.buffer(name, (tokens, inner), "[S, I]") for name in ("gate_pre_td", "gate_act_td", "up_td")]
    d_gate_up = step.buffer("d_gate_up_td", (tokens, 2 * inner), "[S, 2I]")
    transposed = None if scratch_td is None else step.buffer("scratch_td", (2 * inner, tokens), "[2I, S]")
    rows = step.rows("s_base", tokens)
    walk = step.walk(config, (rows.stop - rows.start, grad.K, inner))
    step.launch()
    scratch = call_scratch(d_gate_up.device)
    with torch.no_grad():
        tiles = product_tiles([(grad, weight)], scratch, rows=rows, k_major=(False, True), walk=walk)
        for part, columns, d_int in tiles:
            for first in range(0, len(d_int), _ELEMENTWISE_ROWS):
                d_int_RI = d_int[first : first + _ELEMENTWISE_ROWS]
                some = slice(part.start + first, part.start + first + len(d_int_RI))
                parts = [tensor[some, columns] for tensor in (*saved, *d_gate_up.chunk(2, dim=1))]
                _gate_up_grads(d_int_RI, parts, clamp_limits or ClampLimits(), scratch)
        if transposed is not None:
            transposed[:, rows].copy_(d_gate_up[rows].t())


def _gate_up_grads(d_int: Tensor, parts: Sequence[Tensor], limits: ClampLimits, scratch: Scratch) -> None:
    """Overwrite d_gate and d_up in some rows; `parts` are gate_pre, gate_act, up, d_gate and d_up there."""
    gate_pre, gate_act, up, d_gate, d_up = parts
    shape = tuple(d_int.shape)
    factor = scratch.get("mx_factor", shape, torch.float32)
    one = torch.ones((), dtype=torch.float32, device=d_int.device).expand(shape)
    gate = scratch.get("mx_gate_fp32", shape, torch.float32).copy_(gate_pre)
    torch.ops.aten.silu_backward.grad_input(one, gate, grad_input=factor)
    slope = scratch.get("mx_slope", shape, torch.bfloat16).copy_(factor)
    # bf16 times bf16 is exact in fp32: these products are rounded once.
    d_up.copy_(factor.copy_(gate_act).mul_(d_int))
    d_gate.copy_(factor.copy_(slope.mul_(up)).mul_(d_int))
    # Limits are compared in fp32, not rounded to bf16.
    mask_(d_gate, gate, limits.gate)
    if limits.up != (None, None):
        mask_(d_up, factor.copy_(up), limits.up)


@public
def compute_phase2_hidden_states_grad_mxfp8(
    hidden_states_grad_td: TensorDescriptor, gate_up_weight_td: TensorDescriptor, d_gate_up_td: TensorDescriptor,
    s_base: int, dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill the rows from s_base on of dX ``[S, H]``, one product with K = 2I (release 2.31 and later).

    * gate_up_weight_td: F = H, K = 2I (gate, then up: the fused weight's transpose). d_gate_up_td: raw, F = S, K = 2I.
    * hidden_states_grad_td: bf16 or fp32.
    """
    step = KernelCall("compute_phase2_hidden_states_grad_mxfp8", locals(), _BF16)
    pair = step.pair("d_gate_up_td", "gate_up_weight_td")
    _fill(step, "hidden_states_grad_td", "[S, H]", [pair], step.rows("s_base", pair[0].F))


@public
def compute_phase2_hidden_states_grad_mxfp8_2_30(
    hidden_states_grad_td: TensorDescriptor, gate_weight_td: TensorDescriptor, up_weight_td: TensorDescriptor,
    d_gate_td: TensorDescriptor, d_up_td: TensorDescriptor,
    s_base: int, dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill the rows from s_base on of dX ``[S, H]`` as release 2.30 does: K = I twice, gate first, one accumulator.

    Values differ from release 2.31's unless I is a multiple of 512, where no MX group spans gate and up.

    * gate_weight_td, up_weight_td: F = H, K = I (transposes of the parameters). d_gate_td, d_up_td: raw, F = S, K = I.
    """
    step = KernelCall("compute_phase2_hidden_states_grad_mxfp8_2_30", locals(), _BF16, lone_384=True)
    pairs = [step.pair("d_gate_td", "gate_weight_td"), step.pair("d_up_td", "up_weight_td")]
    check_logical(up_weight_td, *gate_weight_td.logical_shape, "[H, I]", "up_weight_td")
    check_logical(d_up_td, *d_gate_td.logical_shape, "[S, I]", "d_up_td")
    _fill(step, "hidden_states_grad_td", "[S, H]", pairs, step.rows("s_base", pairs[0][0].F))


@public
def compute_phase3_gate_up_weight_grad_mxfp8(
    weight_grad_td: TensorDescriptor, hidden_states_T_td: TensorDescriptor, grad_T_td: TensorDescriptor,
    dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    *,
    core: int | None = None,
    lone_384: bool = False, mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill ``[dWg; dWu]`` ``[2I, H]``, contracted over S.

    * hidden_states_T_td: F = H, K = S. grad_T_td: raw, F = 2I, K = S. weight_grad_td: bf16 or fp32.
    * core: under LNC2 core 0 makes the gate rows and core 1 the up rows; None (a host) makes both.
    """
    step = KernelCall("compute_phase3_gate_up_weight_grad_mxfp8", locals(), _BF16)
    pair = step.pair("grad_T_td", "hidden_states_T_td")
    both = pair[0].F
    rows = slice(0, both)
    if core is not None:
        programs, number = _sharding(run_with_lnc2, core)
        rows = step.rows("core", both, number * both // programs)
    _fill(step, "weight_grad_td", "[2I, H]", [pair], rows, left_k_major=True)


@public
def compute_phase4_down_weight_grad_mxfp8(
    down_weight_grad_td: TensorDescriptor, output_grad_T_td: TensorDescriptor, intermediate_T_td: TensorDescriptor,
    h_base: int, dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    *,
    lone_384: bool = False, mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill the rows from h_base on of dWd ``[H, I]`` (half of H under LNC2), contracted over S.

    * output_grad_T_td: F = H, K = S. intermediate_T_td: F = I, K = S. down_weight_grad_td: bf16 or fp32.
    """
    step = KernelCall("compute_phase4_down_weight_grad_mxfp8", locals(), _BF16)
    pair = step.pair("output_grad_T_td", "intermediate_T_td")
    _fill(step, "down_weight_grad_td", "[H, I]", [pair], step.rows("h_base", pair[0].F), left_k_major=True)


def _fill(
    step: KernelCall,
    out: str,
    names: str,
    pairs: Sequence[tuple[MXOperand, MXOperand]],
    rows: slice,
    left_k_major: bool = False,
) -> None:
    """Store the sum of the products of `pairs` in the rows of the tensor in argument `out`, of shape `names`."""
    left, right = pairs[0]
    target = step.buffer(out, (left.F, right.F), names, STORED)
    share = left.F // 2 if step.lnc2 else left.F
    walk = step.walk(step.call["config"], (share, left.K, right.F))
    step.launch()
    with torch.no_grad():
        scratch = call_scratch(target.device)
        tiles = product_tiles(pairs, scratch, rows=rows, k_major=(left_k_major, True), walk=walk)
        for part, columns, values in tiles:
            target[part, columns].copy_(values)


def run_phases(
    t: Mapping[str, Any],
    options: Mapping[str, Any],
    clamp_limits: ClampLimits | None,
    configs: MlpBwdMatmulConfig | None,
) -> None:
    """Run one phase after the other, each for both cores at once, or with tiles for one core after the other.

    `t` are the descriptors of ``mlp_backward_mxfp8_base_nki`` without the ending ``_td``. Release 2.30 has
    `gate_proj_weight_T` and `up_proj_weight_T` for `gate_up_weight_T`. `configs`, of one core, are for tiles.
    """
    bf16, lone_384 = torch.bfloat16, "up_proj_weight_T" in t
    tiles = configs or MlpBwdMatmulConfig()
    cores = (0, 1) if options["run_with_lnc2"] else (0,)
    d_gate_up, dx, d_down = t["d_gate_up"], t["hidden_states_grad"], t["down_weight_grad"]
    rows_S, rows_H = (len(td.data) // len(cores) for td in (dx, d_down))
    for core in cores:
        compute_phase1_down_proj_mm_grad_mxfp8(
            t["output_grad"], t["gate_pre"], t["gate_act"], t["up"], d_gate_up, t["scratch"], t["down_weight_T"],
            core * rows_S, bf16, clamp_limits=clamp_limits, lone_384=lone_384, config=tiles.phase1_down_proj, **options,
        )  # fmt: skip
    for core in cores:
        if lone_384:
            d_gate, d_up = (TensorDescriptor(half) for half in d_gate_up.data.chunk(2, dim=1))
            compute_phase2_hidden_states_grad_mxfp8_2_30(
                dx, t["gate_proj_weight_T"], t["up_proj_weight_T"], d_gate, d_up, core * rows_S, bf16,
                config=tiles.phase2_hidden_grad, **options,
            )  # fmt: skip
        else:
            compute_phase2_hidden_states_grad_mxfp8(
                dx, t["gate_up_weight_T"], d_gate_up, core * rows_S, bf16, config=tiles.phase2_hidden_grad, **options
            )
    grad_T = t["scratch"] or TensorDescriptor(d_gate_up.data.t())
    for core in cores:
        compute_phase3_gate_up_weight_grad_mxfp8(
            t["weight_grad"], t["hidden_states_T"], grad_T, bf16,
            core=core, lone_384=lone_384, config=tiles.phase3_wgrad, **options,
        )  # fmt: skip
    for core in cores:
        compute_phase4_down_weight_grad_mxfp8(
            d_down, t["output_grad_T"], t["intermediate_T"], core * rows_H, bf16,
            lone_384=lone_384, config=tiles.phase4_wgrad, **options,
        )  # fmt: skip
