"""Phase 0 of the MXFP8 MLP backward: making checkpoints that were not kept (nki-library 2.30 and 2.31).

Legend: S tokens, H hidden, I intermediate. These are not the forward's bits: its gate_act and intermediate come from
fp32 values, those made here from bf16 ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.described_operand import TensorDescriptor
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    automatic_config,
    check_config,
    check_shared_hidden_tiles,
)
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import KernelCall
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import gate_up_tiles
from hf_neuron_moe.reference.moe_cte_saved import clamp_
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.tiled_product import cut

_STEP_ELEMENTS = 1 << 18  # of one elementwise step
CHECKPOINTS = ("gate_pre", "gate_act", "up", "intermediate")
"""What the backward needs of the forward: bf16 ``[S, I]``, under the names of release 2.31."""
_STORED = ("torch.bfloat16, the dtype of the checkpoints", "Pass bf16 buffers.")


@public
def recompute_gate_up_projection(
    hidden_td: TensorDescriptor, gate_up_td: TensorDescriptor,
    gate_pre_td: TensorDescriptor | None, up_td: TensorDescriptor | None,
    s_base_offset: int, dtype: torch.dtype, fp8_x4_dtype: object = torch.float8_e4m3fn,
    gate_config: MatmulMxfp8KernelConfig | None = None, up_config: MatmulMxfp8KernelConfig | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    clamp_limits: ClampLimits | None = None,
    *,
    lone_384: bool = False, mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Fill the rows from s_base_offset on of gate_pre and up ``[S, I]``: the forward's projections, rounded once.

    * hidden_td: F = S, K = H. gate_up_td: F = 2I, K = H, gate first. Any mode.
    * gate_pre_td, up_td: bf16; None is not computed (upstream always stores both).
    * clamp_limits: the fp32 accumulators become ``max(min(x, upper), lower)`` before they are rounded; gate takes the
      non-linear limits and up the linear ones.
    * gate_config, whose tiles are walked, and up_config: for M, K, N = S, H, I (half of S under LNC2), with the same
      tiles of the hidden states.
    """
    step = KernelCall("recompute_gate_up_projection", locals(), _STORED)
    hidden, gate_up = step.pair("hidden_td", "gate_up_td", "[2I, H]")
    shape = (hidden.F, gate_up.F // 2)
    targets = step.optional_buffers({"gate": "gate_pre_td", "up": "up_td"}, shape)
    rows = step.rows("s_base_offset", hidden.F)
    size = (rows.stop - rows.start, hidden.K, shape[1])
    automatic = automatic_config(*size, run_with_lnc2=run_with_lnc2)
    walk = step.walk(gate_config, size, "gate_config")
    check_config(up_config, size, argument="up_config")
    check_shared_hidden_tiles(gate_config or automatic, up_config or automatic, arguments=("gate_config", "up_config"))
    step.launch()
    limits = clamp_limits or ClampLimits()
    bounds = {"gate": limits.gate, "up": limits.up}
    assert hidden_td.data is not None
    scratch = call_scratch(hidden_td.data.device)
    with torch.no_grad():
        for part, columns, made in gate_up_tiles(hidden, gate_up, scratch, rows=rows, wanted=targets, walk=walk):
            for name, values in made.items():
                targets[name][part, columns].copy_(clamp_(values, *bounds[name]))


@public
def recompute_gate_act(
    gate_pre_td: TensorDescriptor, gate_act_td: TensorDescriptor,
    s_base_offset: int, dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:  # fmt: skip
    """Fill the rows from s_base_offset on of gate_act with ``bf16(silu(gate_pre))``; both bf16 ``[S, I]``."""
    parts, (gate_act, gate_pre) = _elementwise("recompute_gate_act", locals(), "gate_act_td", "gate_pre_td")
    with torch.no_grad():
        for part in parts:
            gate_act[part].copy_(F.silu(gate_pre[part].float(), inplace=True))


@public
def recompute_intermediate(
    gate_act_td: TensorDescriptor, up_td: TensorDescriptor, intermediate_td: TensorDescriptor,
    s_base_offset: int, dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:  # fmt: skip
    """Fill the rows from s_base_offset on of the intermediate with ``bf16(gate_act * up)``; all bf16 ``[S, I]``."""
    names = ("intermediate_td", "gate_act_td", "up_td")
    parts, (intermediate, gate_act, up) = _elementwise("recompute_intermediate", locals(), *names)
    with torch.no_grad():
        for part in parts:
            # bf16 times bf16 is exact in fp32: rounded once.
            torch.mul(gate_act[part], up[part], out=intermediate[part])


def recompute_hidden(
    gate_act_td: TensorDescriptor, up_td: TensorDescriptor, hidden_td: TensorDescriptor,
    s_base_offset: int, dtype: torch.dtype,
    run_with_lnc2: bool = True,
) -> None:  # fmt: skip
    """:func:`recompute_intermediate` under its name of release 2.30, which called the intermediate hidden."""
    recompute_intermediate(gate_act_td, up_td, hidden_td, s_base_offset, dtype, run_with_lnc2)


def recompute_missing(
    found: dict[str, TensorDescriptor],
    buffers: Mapping[str, Tensor],
    options: Mapping[str, Any],
    clamp_limits: ClampLimits | None,
    lone_384: bool,
    configs: MlpBwdMatmulConfig | None = None,
) -> None:
    """Add the missing :data:`CHECKPOINTS` to `found`: projections first, then gate_act, then the intermediate.

    `found` also has `hidden_states` and `gate_up_weights`, which are read only if a projection is missing. What is
    recomputed goes to `buffers`, or is allocated. A saved projection is recomputed into its buffer, where it has one,
    as on the device. It is used as it was saved.
    """
    hidden, gate_up, bf16 = found["hidden_states"], found["gate_up_weights"], torch.bfloat16
    shape = (hidden.logical_shape[1], gate_up.logical_shape[1] // 2)
    data = hidden.data
    assert data is not None

    def target(name: str) -> TensorDescriptor:
        return TensorDescriptor(buffers[name] if name in buffers else data.new_empty(shape, dtype=bf16))

    if not {"gate_pre", "up"} <= found.keys():
        made = {name: target(name) for name in ("gate_pre", "up") if name not in found or name in buffers}
        tiles, cores = configs or MlpBwdMatmulConfig(), 2 if options["run_with_lnc2"] else 1
        for base in range(0, shape[0], shape[0] // cores):
            recompute_gate_up_projection(
                hidden, gate_up, made.get("gate_pre"), made.get("up"), base, bf16, gate_config=tiles.recompute_gate,
                up_config=tiles.recompute_up, clamp_limits=clamp_limits, lone_384=lone_384, **options,
            )  # fmt: skip
        found |= made | found  # what was kept is used
    if "gate_act" not in found:
        found["gate_act"] = target("gate_act")
        recompute_gate_act(found["gate_pre"], found["gate_act"], 0, bf16, False)
    if "intermediate" not in found:
        found["intermediate"] = target("intermediate")
        recompute_intermediate(found["gate_act"], found["up"], found["intermediate"], 0, bf16, False)


def _elementwise(kernel: str, call: dict[str, Any], target: str, *sources: str) -> tuple[list[slice], list[Tensor]]:
    """Check an elementwise step; return the rows of this core in parts, then its target and its sources."""
    step = KernelCall(kernel, call, _STORED)
    shape = call[target].logical_shape[::-1]
    tensors = [step.buffer(name, shape, "[S, I]") for name in (target, *sources)]
    rows = step.rows("s_base_offset", shape[0])
    step.launch()
    return cut(rows, max(1, _STEP_ELEMENTS // shape[1])), tensors
