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
from hf_neuron_moe.backends.torch.experts import ExpertStack, Runs
from hf_neuron_moe.backends.torch.routing import checked_ids, sort_pairs

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


def mlp(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str) -> Tensor | None:
    """Return the dense MLP's output in the dtype of `x_SH`; None where operands or rows ask for the tiled path."""
    dtype, shape = x_SH.dtype, gate_IH.shape
    if not (gate_IH.dtype is up_IH.dtype is down_HI.dtype is dtype) or x_SH.dim() != 2 or len(shape) != 2:
        return None
    rows, hidden = x_SH.shape
    if up_IH.shape != shape or shape[1] != hidden or down_HI.shape != (hidden, shape[0]):
        return None
    if rows == 1 and precision == "bf16" and dtype is torch.bfloat16:
        # What follows below, in one function: after all those weights the functions themselves come from memory again,
        # which at one row takes a few percent of the time.
        act_1I = F.silu(F.linear(x_SH, gate_IH).float(), inplace=True).mul_(F.linear(x_SH, up_IH))
        return F.linear(act_1I.to(dtype), down_HI)
    if not suit(precision, dtype, x_SH.device, rows, rows):
        return None
    if 1 < len(x_SH) <= FEW_ROWS and _rows_one_by_one(x_SH):
        gate_SI, up_SI = _times_rows(x_SH, gate_IH), _times_rows(x_SH, up_IH)
        return _times_rows(_gated(gate_SI, up_SI, None), down_HI)
    gate_SI, up_SI = F.linear(x_SH, gate_IH), F.linear(x_SH, up_IH)
    return F.linear(_gated(gate_SI, up_SI, None), down_HI)


def experts(x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, stack: ExpertStack) -> Tensor:
    """Return the experts' weighted sum in the dtype of `x_TH`, which is that of the weights."""
    gate_up, down = stack.gate_up, stack.down
    if not stack.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if len(x_TH) == 1:
        return _one_token(x_TH, index_TK, weight_TK, gate_up, down)
    pairs = sort_pairs(index_TK, len(gate_up))
    runs, ends_E = pairs.runs, None
    if 2 * len(runs) > len(gate_up) and _can_be_grouped(stack):
        ends_E = torch.tensor(pairs.offsets[1:], dtype=torch.int32)
    x_RH = x_TH.index_select(0, pairs.token_R)
    scale_R = weight_TK.reshape(-1).index_select(0, pairs.order_R)
    gate_RI, up_RI = _times_experts(x_RH, gate_up, runs, ends_E).chunk(2, dim=1)
    out_RH = _times_experts(_gated(gate_RI, up_RI, scale_R), down, runs, ends_E)
    if pairs.offsets[-1] < len(out_RH):
        out_RH[pairs.offsets[-1] :].zero_()
    out_TKH = out_RH.index_select(0, pairs.slot_TK.reshape(-1)).view(*index_TK.shape, x_TH.shape[1])
    return out_TKH.sum(1, dtype=torch.float32).to(x_TH.dtype)


def _one_token(x_1H: Tensor, index_1K: Tensor, weight_1K: Tensor, gate_up_EH2I: Tensor, down_EIH: Tensor) -> Tensor:
    """The same for a single token, whose rows need neither sorting nor gathering."""
    top_k, experts = index_1K.shape[1], len(down_EIH)
    ids = [(slot, expert) for slot, expert in enumerate(checked_ids(index_1K)) if expert < experts]
    gate_up_K2I = x_1H.new_empty((top_k, gate_up_EH2I.shape[2]))
    for slot, expert in ids:
        torch.mm(x_1H, gate_up_EH2I[expert], out=gate_up_K2I[slot : slot + 1])
    gate_KI, up_KI = gate_up_K2I.chunk(2, dim=1)
    inter_KI = _gated(gate_KI, up_KI, weight_1K.reshape(-1))
    out_1KH = x_1H.new_zeros((1, top_k, x_1H.shape[1]))
    for slot, expert in ids:
        torch.mm(inter_KI[slot : slot + 1], down_EIH[expert], out=out_1KH[:, slot])
    return out_1KH.sum(1, dtype=torch.float32).to(x_1H.dtype)


def _times_experts(x_RK: Tensor, weight_EKN: Tensor, runs: Runs, ends_E: Tensor | None) -> Tensor:
    """Return each row times its expert's matrix ``[R, N]``; rows of other ranks' experts hold anything.

    With `ends_E`, the experts' last rows, by torch's grouped product: it multiplies the same runs without coming back
    to Python between them, but looks at every expert, idle or not.
    """
    if ends_E is not None:
        return F.grouped_mm(x_RK, weight_EKN, offs=ends_E)
    out_RN = x_RK.new_empty((len(x_RK), weight_EKN.shape[2]))
    for expert, start, end in runs:
        torch.mm(x_RK[start:end], weight_EKN[expert], out=out_RN[start:end])
    return out_RN


def _can_be_grouped(stack: ExpertStack) -> bool:
    """Whether torch's grouped product takes weights, rows and sums: all strides multiples of 16 bytes, on a CPU."""
    weights = (stack.gate_up, stack.down)
    aligned = all(size * stack.down.element_size() % 16 == 0 for size in stack.down.shape[1:])
    return aligned and all(weight.is_cpu and weight.is_contiguous() for weight in weights)


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
