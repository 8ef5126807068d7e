"""Inference with so few rows per weight that reading the weights is all that counts: generation.

Legend: R token-expert pairs in expert order, H hidden, I intermediate.

No tiles, no casts, no scratch: each expert costs two products straight from the parameters, and everything between
them is done once for all rows. Rounding points are those of the tiled path. Used where nothing is kept for a backward
and the parameters already have the matmuls' dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import FEW_ROWS, bf16_matmul_is_fast
from hf_neuron_moe.backends.torch.experts import ExpertStack
from hf_neuron_moe.backends.torch.routing import SortedPairs, sort_pairs

MOST_ROWS = 512
"""Beyond this many rows in all the tiled path is as fast, and its temporaries are bounded."""


def suit(precision: str, dtype: torch.dtype, device: torch.device, rows: int, rows_per_expert: float) -> bool:
    """Whether this many rows are better computed here than in tiles.

    Args:
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        dtype: of the weights and the activations.
        device: where they are.
        rows: rows in all; none at all are left to the tiled path.
        rows_per_expert: rows that share one weight.
    """
    if not 0 < rows <= MOST_ROWS:
        return False
    if precision == "fp32":
        return dtype is torch.float32
    if precision != "bf16" or dtype is not torch.bfloat16:
        return False
    return rows_per_expert <= FEW_ROWS or bf16_matmul_is_fast(device)


def mlp(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """Return the dense MLP's output in the dtype of `x_SH`, which is that of the weights."""
    if 1 < len(x_SH) <= FEW_ROWS and _rows_one_by_one(x_SH):
        gate_SI, up_SI = _times_rows(x_SH, gate_IH), _times_rows(x_SH, up_IH)
        return _times_rows(_gated(gate_SI, up_SI, None), down_HI)
    gate_SI, up_SI = F.linear(x_SH, gate_IH), F.linear(x_SH, up_IH)
    return F.linear(_gated(gate_SI, up_SI, None), down_HI)


def experts(x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, stack: ExpertStack) -> Tensor:
    """Return the experts' weighted sum in the dtype of `x_TH`, which is that of the weights."""
    hidden = x_TH.shape[1]
    pairs = sort_pairs(index_TK, len(stack.gate_up))
    x_RH = x_TH.index_select(0, pairs.token_R)
    scale_R = weight_TK.reshape(-1).index_select(0, pairs.order_R)
    inner = stack.gate_up.shape[2 if stack.transposed else 1] // 2
    gate_up, down = stack.gate_up, stack.down
    if not stack.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_R2I = _times_experts(x_RH, gate_up, pairs)
    inter_RI = _gated(gate_up_R2I[:, :inner], gate_up_R2I[:, inner:], scale_R)
    out_RH = _times_experts(inter_RI, down, pairs)
    out_RH[pairs.offsets[-1] :].zero_()
    out_TKH = out_RH.index_select(0, pairs.slot_TK.reshape(-1)).view(*index_TK.shape, hidden)
    return out_TKH.sum(1, dtype=torch.float32).to(x_TH.dtype)


def _times_experts(x_RK: Tensor, weight_EKN: Tensor, pairs: SortedPairs) -> Tensor:
    """Return each row times its expert's matrix ``[R, N]``; rows of other ranks' experts hold anything.

    torch's grouped product multiplies the same runs without coming back to Python between them, but looks at every
    expert, idle or not.
    """
    runs = pairs.runs
    if 2 * len(runs) > len(weight_EKN) and x_RK.is_cpu and _is_aligned(x_RK) and _is_aligned(weight_EKN):
        ends_E = torch.tensor(pairs.offsets[1:], dtype=torch.int32)
        return F.grouped_mm(x_RK, weight_EKN, offs=ends_E)
    out_RN = x_RK.new_empty((len(x_RK), weight_EKN.shape[2]))
    for expert, start, end in runs:
        torch.mm(x_RK[start:end], weight_EKN[expert], out=out_RN[start:end])
    return out_RN


def _is_aligned(operand: Tensor) -> bool:
    """Whether the grouped product takes `operand`: all strides but the unit one are multiples of 16 bytes."""
    size = operand.element_size()
    return sum(stride == 1 for stride in operand.stride()) == 1 and all(
        stride * size % 16 == 0 for stride in operand.stride() if stride != 1
    )


def _rows_one_by_one(x_RK: Tensor) -> bool:
    """Whether a product of several rows takes longer than one product per row.

    Without bf16 instructions torch's bf16 matrix product takes a tenth longer than as many matrix-vector products.
    """
    return x_RK.dtype is torch.bfloat16 and not bf16_matmul_is_fast(x_RK.device)


def _times_rows(x_RK: Tensor, weight_FK: Tensor) -> Tensor:
    """Return ``x W^T``, row by row."""
    out_RF = x_RK.new_empty((len(x_RK), len(weight_FK)))
    for row_K, target_F in zip(x_RK.unbind(0), out_RF.unbind(0)):
        torch.mv(weight_FK, row_K, out=target_F)
    return out_RF


def _gated(gate_RI: Tensor, up_RI: Tensor, scale_R: Tensor | None) -> Tensor:
    """``silu(gate) * up [* scale]`` in fp32, rounded once; may overwrite `gate_RI`."""
    if gate_RI.dtype is torch.float32:
        act = F.silu(gate_RI, inplace=True)
        return act.mul_(up_RI) if scale_R is None else act.mul_(up_RI).mul_(scale_R[:, None])
    # In place, cast afterwards: out= with operands of two dtypes goes through temporaries and takes five times as long.
    act = F.silu(gate_RI.float(), inplace=True).mul_(up_RI)
    return (act if scale_R is None else act.mul_(scale_R[:, None])).to(gate_RI.dtype)
