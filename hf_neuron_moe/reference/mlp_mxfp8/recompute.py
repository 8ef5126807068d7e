"""Phase 0 of the MXFP8 MLP backward: making checkpoints that were not kept (nki-library 2.30 and 2.31).

Legend: S tokens, H hidden, I intermediate. What is made here is not bit for bit what the forward saved: the forward's
gate_act and intermediate come from fp32 values, these from bf16 ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.formats.constants import ScaleRule
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
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MatmulMxfp8KernelConfig,
    Sizes,
    automatic_config,
    check_config,
    check_shared_hidden_tiles,
)
from hf_neuron_moe.reference.mlp_mxfp8.tiles import gate_up_tiles, row_tiles
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import MXOperand, TensorDescriptor

_BF16 = (torch.bfloat16,)
_STEP_ELEMENTS = 1 << 18


@public
def recompute_gate_up_projection(
    hidden_td: TensorDescriptor,
    gate_up_td: TensorDescriptor,
    gate_pre_td: TensorDescriptor | None,
    up_td: TensorDescriptor | None,
    s_base_offset: int,
    dtype: torch.dtype,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    gate_config: MatmulMxfp8KernelConfig | None = None,
    up_config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True,
    use_scale_packing: bool = True,
    run_with_lnc2: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    lone_384: bool = False,
    mx_scale_rule: str = "neuron",
) -> None:
    """Fill the rows from s_base_offset on of gate_pre and up ``[S, I]``: the forward's projections, rounded once.

    * hidden_td: F = S, K = H. gate_up_td: F = 2I, K = H, gate first. Any mode.
    * gate_pre_td, up_td: bf16; None is not computed (upstream always stores both).
    * clamp_limits: the fp32 accumulators become ``max(min(x, upper), lower)`` before they are rounded; gate takes the
      non-linear limits and up the linear ones.
    * gate_config, up_config: for M, K, N = S, H, I (half of S under LNC2), with the same tiles of the hidden states.
    * lone_384: group raw K = 384 as release 2.30 does. mx_scale_rule: block scales of what is quantized here.

    Raises DTypeError, ShapeError or ConfigError for operands, buffers or rows that do not fit.
    """
    where = "recompute_gate_up_projection"
    flags = {"spill_reload": spill_reload, "use_scale_packing": use_scale_packing, "run_with_lnc2": run_with_lnc2}
    check_launch({}, flags, fp8_x4_dtype)
    _check_dtype(dtype)
    check_options(clamp_limits, None)
    check_flags({"lone_384": lone_384})
    rule = scale_rule(mx_scale_rule)
    operands = {"hidden_td": hidden_td, "gate_up_td": gate_up_td}
    for name, td in operands.items():
        check_descriptor(td, argument=name)
        check_packing(td, use_scale_packing, argument=name)
    hidden, gate_up = (MXOperand(td, argument=name, lone_384=lone_384, rule=rule) for name, td in operands.items())
    check_logical(gate_up_td, hidden.K, gate_up.F, "[2I, H]", argument="gate_up_td")
    if lone_384:
        check_no_mix_at_384(operands, hidden.K)
    check_grouping({"hidden_td": hidden, "gate_up_td": gate_up})
    shape = (hidden.F, gate_up.F // 2)
    gate_pre, up = (
        None if td is None else check_buffer(td.data, shape, "[S, I]", _BF16, argument=name)
        for name, td in (("gate_pre_td", gate_pre_td), ("up_td", up_td))
    )
    rows = core_rows(hidden.F, s_base_offset, run_with_lnc2)
    _check_configs(gate_config, up_config, (rows.stop - rows.start, hidden.K, shape[1]), run_with_lnc2)
    note_launch(where, gate_config=gate_config, up_config=up_config, fp8_x4_dtype=fp8_x4_dtype, **flags)
    limits, scratch = clamp_limits or ClampLimits(), call_scratch(hidden_td.data.device)  # type: ignore[union-attr]
    with torch.no_grad():
        wanted = {"gate": gate_pre is not None, "up": up is not None}
        for tile in gate_up_tiles(hidden, gate_up, scratch, rows=rows, **wanted):
            part = (tile.rows, tile.columns)
            if gate_pre is not None and tile.gate is not None:
                bounds = (limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit)
                gate_pre[part].copy_(_clamp(tile.gate, *bounds))
            if up is not None and tile.up is not None:
                bounds = (limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit)
                up[part].copy_(_clamp(tile.up, *bounds))


@public
def recompute_gate_act(
    gate_pre_td: TensorDescriptor,
    gate_act_td: TensorDescriptor,
    s_base_offset: int,
    dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:
    """Fill the rows from s_base_offset on of gate_act with ``bf16(silu(gate_pre))``; both bf16 ``[S, I]``.

    Raises DTypeError, ShapeError or ConfigError for buffers or rows that do not fit.
    """
    (gate_pre,), out, rows = _elementwise(
        "recompute_gate_act",
        {"gate_pre_td": gate_pre_td},
        ("gate_act_td", gate_act_td),
        s_base_offset,
        dtype,
        run_with_lnc2,
    )
    with torch.no_grad():
        for part in _steps(rows, out):
            out[part].copy_(F.silu(gate_pre[part].float(), inplace=True))


@public
def recompute_intermediate(
    gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor,
    intermediate_td: TensorDescriptor,
    s_base_offset: int,
    dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:
    """Fill the rows from s_base_offset on of the intermediate with ``bf16(gate_act * up)``; all bf16 ``[S, I]``.

    Raises DTypeError, ShapeError or ConfigError for buffers or rows that do not fit.
    """
    (gate_act, up), out, rows = _elementwise(
        "recompute_intermediate",
        {"gate_act_td": gate_act_td, "up_td": up_td},
        ("intermediate_td", intermediate_td),
        s_base_offset,
        dtype,
        run_with_lnc2,
    )
    with torch.no_grad():
        for part in _steps(rows, out):
            # bf16 times bf16 is exact in fp32: rounded once.
            torch.mul(gate_act[part], up[part], out=out[part])


def recompute_hidden(
    gate_act_td: TensorDescriptor,
    up_td: TensorDescriptor,
    hidden_td: TensorDescriptor,
    s_base_offset: int,
    dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:
    """:func:`recompute_intermediate` under its name of release 2.30, which called the intermediate hidden."""
    recompute_intermediate(gate_act_td, up_td, hidden_td, s_base_offset, dtype, run_with_lnc2)


@dataclass(frozen=True)
class KeptActivations:
    """The four checkpoints ``[S, I]``, bf16, under the names of release 2.31; None was not kept."""

    gate_pre: Tensor | None = None
    gate_act: Tensor | None = None
    up: Tensor | None = None
    intermediate: Tensor | None = None


class Activations(NamedTuple):
    """The four checkpoints, all present."""

    gate_pre: Tensor
    gate_act: Tensor
    up: Tensor
    intermediate: Tensor


def recompute_missing(
    kept: KeptActivations,
    buffers: KeptActivations,
    hidden_td: TensorDescriptor,
    gate_up_td: TensorDescriptor,
    *,
    use_scale_packing: bool,
    clamp_limits: ClampLimits | None = None,
    lone_384: bool = False,
    rule: ScaleRule = ScaleRule.NEURON,
) -> Activations:
    """Return the four checkpoints, the missing ones recomputed in the order projections, gate_act, intermediate.

    If gate_pre or up is missing the device recomputes both and goes on using the one that was kept; here the one that
    nobody sees is left out.

    Args:
        kept: what the forward saved.
        buffers: where recomputed values go; None is allocated where needed. A projection that was kept is recomputed
            into its buffer too.
        hidden_td: the forward's input; read only if a projection is missing.
        gate_up_td: the fused weight; likewise.
        use_scale_packing: layout of their scales.
        clamp_limits: of the recomputed projections.
        lone_384: group raw K = 384 as release 2.30 does.
        rule: block scale rule.
    """
    assert hidden_td.data is not None
    shape, device = (hidden_td.logical_shape[1], gate_up_td.logical_shape[1] // 2), hidden_td.data.device

    def target(name: str) -> Tensor:
        buffer: Tensor | None = getattr(buffers, name)
        return torch.empty(shape, dtype=torch.bfloat16, device=device) if buffer is None else buffer

    found: dict[str, Tensor | None] = dict(vars(kept))
    if kept.gate_pre is None or kept.up is None:
        made = {
            name: target(name)
            for name in ("gate_pre", "up")
            if found[name] is None or getattr(buffers, name) is not None
        }
        described = {name: TensorDescriptor(tensor) for name, tensor in made.items()}
        recompute_gate_up_projection(
            hidden_td, gate_up_td, described.get("gate_pre"), described.get("up"), 0, torch.bfloat16,
            use_scale_packing=use_scale_packing, run_with_lnc2=False, clamp_limits=clamp_limits, lone_384=lone_384,
            mx_scale_rule=rule,
        )  # fmt: skip
        found |= {name: tensor for name, tensor in made.items() if found[name] is None}
    gate_pre, up = found["gate_pre"], found["up"]
    assert gate_pre is not None and up is not None
    gate_act, intermediate = kept.gate_act, kept.intermediate
    if gate_act is None:
        gate_act = target("gate_act")
        recompute_gate_act(TensorDescriptor(gate_pre), TensorDescriptor(gate_act), 0, torch.bfloat16, False)
    if intermediate is None:
        intermediate = target("intermediate")
        sources = (TensorDescriptor(gate_act), TensorDescriptor(up))
        recompute_intermediate(*sources, TensorDescriptor(intermediate), 0, torch.bfloat16, False)
    return Activations(gate_pre, gate_act, up, intermediate)


def _elementwise(
    kernel: str,
    sources: dict[str, TensorDescriptor],
    target: tuple[str, TensorDescriptor],
    base: int,
    dtype: torch.dtype,
    lnc2: bool,
) -> tuple[tuple[Tensor, ...], Tensor, slice]:
    """Check an elementwise step's tensors and return them with the rows of this core."""
    _check_dtype(dtype)
    check_flags({"run_with_lnc2": lnc2})
    name, td = target
    shape = (td.logical_shape[1], td.logical_shape[0])
    out = check_buffer(td.data, shape, "[S, I]", _BF16, argument=name)
    tensors = tuple(
        check_buffer(source.data, shape, "[S, I]", _BF16, argument=argument) for argument, source in sources.items()
    )
    note_launch(kernel, run_with_lnc2=lnc2)
    return tensors, out, core_rows(shape[0], base, lnc2)


def _check_configs(
    gate: MatmulMxfp8KernelConfig | None, up: MatmulMxfp8KernelConfig | None, size: Sizes, lnc2: bool
) -> None:
    for name, config in (("gate_config", gate), ("up_config", up)):
        check_config(config, size, argument=name)
    automatic = automatic_config(*size, run_with_lnc2=lnc2)
    check_shared_hidden_tiles(gate or automatic, up or automatic, arguments=("gate_config", "up_config"))


def _steps(rows: slice, out: Tensor) -> list[slice]:
    return row_tiles(rows, max(1, _STEP_ELEMENTS // out.shape[1]))


def _clamp(values: Tensor, upper: float | None, lower: float | None) -> Tensor:
    """``max(min(x, upper), lower)`` in place, in this order; a missing limit does nothing."""
    if upper is not None:
        values.clamp_(max=upper)
    if lower is not None:
        values.clamp_(min=lower)
    return values


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise ConfigError.about(
            "dtype", "torch.bfloat16, the dtype of the checkpoints", str(dtype), "Pass bf16 buffers."
        )
