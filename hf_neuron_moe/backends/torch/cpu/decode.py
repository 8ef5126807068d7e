"""Inference with so few rows per weight that reading the weights is all that counts: generation.

Legend: R token-expert pairs in expert order, H hidden, I intermediate.

No tiles: each expert costs two products straight from the parameters, which have the matmuls' dtype, and everything
between them is done once for all rows. Only a processor without bf16 instructions but with oneDNN casts bf16 weights,
part by part, for enough rows. Rounding points are those of the tiled path. Nothing is saved for a backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, FFNWeights, Routing
from hf_neuron_moe.backends.torch.biases import add_down_bias
from hf_neuron_moe.backends.torch.compute import FEW_ROWS, bf16_matmul_is_fast, call_scratch
from hf_neuron_moe.backends.torch.cpu.matmul import LARGE_WEIGHT, SMALL_WEIGHT, linear_of_few, uses_onednn
from hf_neuron_moe.backends.torch.experts import Runs, checked_ids, rows_per_run, sort_pairs, split_gate_up
from hf_neuron_moe.backends.torch.ffn_forward import added_to_sums
from hf_neuron_moe.backends.torch.gating import SILU, Gating, gating_of

_ROWS_WORTH_CASTING = 5  # rows from which a bf16 weight is cast to fp32 by parts, without bf16 instructions
_LONG_ROWS_WORTH_CASTING = 8  # the same for more than 2048 columns
_CAST_AT_ONCE = 1 << 20  # elements of a weight cast to fp32 at a time, which stay in the caches
MOST_ROWS = 512  # beyond this many rows in all the tiled path is as fast, and its temporaries are bounded


def suit(precision: str, dtype: torch.dtype, device: torch.device, rows: int, rows_per_expert: float) -> bool:
    """Whether this many rows are better computed here than in tiles.

    `rows_per_expert` rows share one weight; no rows at all are left to the tiled path.
    """
    if not 0 < rows <= MOST_ROWS:
        return False
    if precision == "fp32":
        return dtype is torch.float32
    fits = precision == "bf16" and dtype is torch.bfloat16
    return fits and (rows_per_expert <= FEW_ROWS or bf16_matmul_is_fast(device))


def mlp(
    x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, gate: Gate = SWIGLU
) -> Tensor | None:
    """Return the dense MLP's output in the dtype of `x_SH`; None where operands or rows ask for the tiled path."""
    if precision == "bf16" and x_SH.dtype is torch.bfloat16 and x_SH.dim() == 2 and x_SH.shape[0] == 1:
        # What follows below, by as few steps as possible. After all those weights the functions themselves come from
        # memory again, which at one row takes a few percent of the time. Rounding into gate spares allocating.
        try:
            gate_1I, up_1I = F.linear(x_SH, gate_IH), F.linear(x_SH, up_IH)
            if up_1I.shape == gate_1I.shape:
                act_1I = gating_of(gate, True).activate_(gate_1I.float()).mul_(up_1I)
                out_1H = F.linear(gate_1I.copy_(act_1I), down_HI)
                return out_1H if out_1H.shape == x_SH.shape else None  # functional.linear takes vectors and any H
        except RuntimeError:  # operands that do not fit: the tiled path casts them, or says what is wrong
            pass
        return None
    dtype, shape = x_SH.dtype, gate_IH.shape
    if not (gate_IH.dtype is up_IH.dtype is down_HI.dtype is dtype) or x_SH.dim() != 2 or len(shape) != 2:
        return None
    rows, hidden = x_SH.shape
    if up_IH.shape != shape or shape[1] != hidden or down_HI.shape != (hidden, shape[0]):
        return None
    if not suit(precision, dtype, x_SH.device, rows, rows):
        return None
    gate_SI, up_SI = _linear(x_SH, gate_IH), _linear(x_SH, up_IH)
    return _linear(_gated(gate_SI, up_SI, None, gating_of(gate, precision != "fp32")), down_HI).contiguous()


def network(x_SH: Tensor, weights: FFNWeights, precision: str, gating: Gating) -> Tensor | None:
    """Return the output of a dense MLP with any gate and biases; None as :func:`mlp`. Its operands fit each other.

    A product of bf16 operands is rounded before its bias is added, which the tiled path does not do.
    """
    gate_IH, up_IH, down_HI = weights[:3]
    if any(weight.dtype is not x_SH.dtype for weight in weights[:3]):
        return None
    if not suit(precision, x_SH.dtype, x_SH.device, len(x_SH), len(x_SH)):
        return None
    added = added_to_sums(up_IH, weights[3:5], gating)
    sums = (_plus(_linear(x_SH, weight_IH), part_I) for weight_IH, part_I in zip((gate_IH, up_IH), added, strict=True))
    inter_SI = gating.intermediate_(*sums).to(x_SH.dtype)
    return _plus(_linear(inter_SI, down_HI), weights.down_bias_H).to(x_SH.dtype).contiguous()


def _plus(product: Tensor, added: Tensor | None) -> Tensor:
    """Return fp32 ``product + added``, rounded to the product's dtype if there is something to add."""
    return product.float() if added is None else (product + added.float()).to(product.dtype).float()


def experts(x_TH: Tensor, routing: Routing, weights: ExpertWeights, spec: BlockSpec, gating: Gating = SILU) -> Tensor:
    """Return the experts' weighted sum in the dtype of `x_TH`, which is that of the weights.

    A product of bf16 operands is rounded before its bias is added, as in :func:`network`.
    """
    (index_TK, weight_TK), (gate_up, down) = routing, weights[:2]
    transposed = spec.transposed
    if not transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if len(x_TH) == 1:
        out_TKH = _one_token(x_TH, index_TK, weight_TK, (gate_up, down), _Between(weights, spec, gating))
        return _total(out_TKH, routing, weights)
    pairs = sort_pairs(index_TK, len(gate_up))
    runs, ends_E = pairs.runs, None
    busy = 2 * len(runs) > len(gate_up)
    if busy and _can_be_grouped(weights) and (transposed or not _better_single(x_TH, weights[1], runs)):
        ends_E = torch.tensor(pairs.offsets[1:], dtype=torch.int32)
    x_RH = x_TH.index_select(0, pairs.token_R)
    scale_R = weight_TK.reshape(-1).index_select(0, pairs.order_R)
    between = _Between(weights, spec, gating)
    expert_R = None if weights.gate_up_bias is None else index_TK.reshape(-1).index_select(0, pairs.order_R)
    inter_RI = between.intermediate(_times_experts(x_RH, gate_up, runs, ends_E), expert_R, scale_R)
    out_RH = _times_experts(inter_RI, down, runs, ends_E)
    if pairs.offsets[-1] < len(out_RH):
        out_RH[pairs.offsets[-1] :].zero_()
    out_TKH = out_RH.index_select(0, pairs.slot_TK.reshape(-1)).view(*index_TK.shape, x_TH.shape[1])
    return _total(out_TKH, routing, weights)


def _total(out_TKH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Return the sum over a token's experts, down's biases included."""
    total_TH = out_TKH.sum(1, dtype=torch.float32)
    if weights.down_bias is not None:
        total_TH = add_down_bias(total_TH, weights.down_bias, routing)
    return total_TH.to(out_TKH.dtype)


class _Between(NamedTuple):
    """What is computed between the products of experts."""

    weights: ExpertWeights
    spec: BlockSpec
    gating: Gating

    def intermediate(self, both_R2I: Tensor, expert_R: Tensor | None, scale_R: Tensor) -> Tensor:
        """Return down's operand of the products of gate_up; experts are read for the biases, some are not of here."""
        bias_E2I, spec, gating = self.weights.gate_up_bias, self.spec, self.gating
        if bias_E2I is not None and expert_R is not None:
            rows_R2I = bias_E2I.index_select(0, expert_R.long().clamp(max=len(bias_E2I) - 1))
            sums = both_R2I.float().add_(rows_R2I)
            offset = gating.up_offset
        elif not gating.up_offset and not spec.interleaved and spec.gate.reads_up_as_it_is:
            gate_RI, up_RI = both_R2I.chunk(2, dim=1)
            return _gated(gate_RI, up_RI, scale_R, gating)
        else:
            sums, offset = both_R2I.float(), gating.up_offset
        gate, up = (part.contiguous() for part in split_gate_up(sums, spec))
        if offset:
            up = up.add_(offset)
        gate, up = (part.to(both_R2I.dtype).float() for part in (gate, up))
        inter_RI = gating.intermediate_(torch.empty_like(up) if gating.skip_gate else gate, up)
        return inter_RI.mul_(scale_R[:, None]).to(both_R2I.dtype)


def _one_token(
    x_1H: Tensor, index_1K: Tensor, weight_1K: Tensor, stacks: tuple[Tensor, Tensor], between: _Between
) -> Tensor:
    """Return the rows ``[1, K, H]`` of a single token, which need neither sorting nor gathering."""
    gate_up_EH2I, down_EIH = stacks
    top_k, experts = index_1K.shape[1], len(down_EIH)
    ids = [(slot, expert) for slot, expert in enumerate(checked_ids(index_1K)) if expert < experts]
    gate_up_K2I = x_1H.new_empty((top_k, gate_up_EH2I.shape[2]))
    for slot, expert in ids:
        _multiply(x_1H, gate_up_EH2I[expert], gate_up_K2I[slot : slot + 1])
    inter_KI = between.intermediate(gate_up_K2I, index_1K.reshape(-1), weight_1K.reshape(-1))
    out_1KH = x_1H.new_zeros((1, top_k, x_1H.shape[1]))
    for slot, expert in ids:
        _multiply(inter_KI[slot : slot + 1], down_EIH[expert], out_1KH[:, slot])
    return out_1KH


def _times_experts(x_RK: Tensor, weight_EKN: Tensor, runs: Runs, ends_E: Tensor | None) -> Tensor:
    """Return each row times its expert's matrix ``[R, N]``; rows of other ranks' experts hold anything.

    With `ends_E`, the experts' last rows, by torch's grouped product, which looks at every expert, idle or not.
    """
    if ends_E is not None:
        return F.grouped_mm(x_RK, weight_EKN, offs=ends_E)
    out_RN = x_RK.new_empty((len(x_RK), weight_EKN.shape[2]))
    for expert, start, end in runs:
        _multiply(x_RK[start:end], weight_EKN[expert], out_RN[start:end])
    return out_RN


def _multiply(x_RK: Tensor, weight_KN: Tensor, out_RN: Tensor) -> None:
    """``out = x W``."""
    faster = _faster_linear(x_RK, weight_KN.t())
    if faster is None:
        torch.mm(x_RK, weight_KN, out=out_RN)
    else:
        out_RN.copy_(faster)


def _linear(x_RK: Tensor, weight_FK: Tensor) -> Tensor:
    """Return ``x W^T`` in any order of memory."""
    faster = _faster_linear(x_RK, weight_FK)
    if faster is not None:
        return faster
    if not 1 < len(x_RK) <= FEW_ROWS or not _rows_one_by_one(x_RK):
        return F.linear(x_RK, weight_FK)
    out_RF = x_RK.new_empty((len(x_RK), len(weight_FK)))
    for row_K, target_F in zip(x_RK.unbind(0), out_RF.unbind(0)):
        torch.mv(weight_FK, row_K, out=target_F)
    return out_RF


def _faster_linear(x_RK: Tensor, weight_FK: Tensor) -> Tensor | None:
    """Return ``x W^T`` by what is faster than torch's product; None where nothing is."""
    if x_RK.dtype is torch.float32:
        return linear_of_few(x_RK, weight_FK)
    least = _ROWS_WORTH_CASTING if x_RK.shape[1] <= 2048 else _LONG_ROWS_WORTH_CASTING
    if len(x_RK) < least or weight_FK.numel() < LARGE_WEIGHT or not weight_FK.is_contiguous():
        return None
    return _through_fp32(x_RK, weight_FK) if _rows_one_by_one(x_RK) and uses_onednn(x_RK.device) else None


def _through_fp32(x_RK: Tensor, weight_FK: Tensor) -> Tensor:
    """Return ``x W^T`` of bf16 operands, the same products with the same single rounding, by fp32 parts of W."""
    out_RF, scratch = x_RK.new_empty((len(x_RK), len(weight_FK))), call_scratch(x_RK.device)
    x32_RK, step = x_RK.float(), max(_CAST_AT_ONCE // weight_FK.shape[1], 1)
    for out_Rf, part_fK in zip(out_RF.split(step, dim=1), weight_FK.split(step), strict=True):
        part32_fK = scratch.get("few_rows", tuple(part_fK.shape), torch.float32).copy_(part_fK)
        product = linear_of_few(x32_RK, part32_fK)
        out_Rf.copy_(F.linear(x32_RK, part32_fK) if product is None else product)
    return out_RF


def _better_single(x_TH: Tensor, down: Tensor, runs: Runs) -> bool:
    """Whether :func:`_multiply` has something faster than the grouped product for the experts of `runs`."""
    if not uses_onednn(x_TH.device):
        return False
    if x_TH.dtype is torch.float32:
        return down[0].numel() >= SMALL_WEIGHT
    many = rows_per_run(runs) >= _ROWS_WORTH_CASTING  # for a single expert the first cast costs more than it brings
    return many and down[0].numel() >= LARGE_WEIGHT and _rows_one_by_one(x_TH)


def _can_be_grouped(weights: ExpertWeights) -> bool:
    """Whether torch's grouped product takes weights, rows and sums: all strides multiples of 16 bytes, on a CPU."""
    gate_up, down = weights[:2]
    aligned = all(size * down.element_size() % 16 == 0 for size in down.shape[1:])
    return aligned and all(weight.is_cpu and weight.is_contiguous() for weight in (gate_up, down))


def _rows_one_by_one(x_RK: Tensor) -> bool:
    """Whether a product of several rows takes longer than one product per row.

    Without bf16 instructions torch's bf16 matrix product takes a tenth longer than as many matrix-vector products.
    """
    return x_RK.dtype is torch.bfloat16 and not bf16_matmul_is_fast(x_RK.device)


def _gated(gate_RI: Tensor, up_RI: Tensor, scale_R: Tensor | None, gating: Gating) -> Tensor:
    """``act(gate) * up [* scale]`` in fp32, rounded once; may overwrite `gate_RI`."""
    if gate_RI.dtype is torch.float32:
        act = gating.activate_(gate_RI)
        return act.mul_(up_RI) if scale_R is None else act.mul_(up_RI).mul_(scale_R[:, None])
    # In place, cast afterwards: out= with operands of two dtypes goes through temporaries and takes five times as long.
    act = gating.activate_(gate_RI.float()).mul_(up_RI)
    return (act if scale_R is None else act.mul_(scale_R[:, None])).to(gate_RI.dtype)
