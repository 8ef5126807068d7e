"""A block's call once more for all rows, without MX and in the products' own dtype: where to look more closely.

What it finds is no alarm. Rows, experts and channels that are farthest from it are computed again in float64.

Legend: T tokens, E experts, R rows of an expert, H hidden, I intermediate, P pairs of token and expert in expert order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import choose_compute
from hf_neuron_moe.backends.torch.gating import gating_of
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.training.block_calls import Call, Run
from hf_neuron_moe.training.guard.second import Network, Pre

_CHUNK = 1024
_TINY = 1e-30
_SAMPLED = 8  # rows of an expert


@dataclass
class Coarse:
    """How far results are from the second computation, as a share of it: infinite where one is not finite."""

    error_T: Tensor
    saved_error_P: Tensor | None = None  # forward: of gate and up as they were saved
    pair_error_P: Tensor | None = None  # backward: of the routing weights' gradients
    channels: dict[int, list[Tensor]] = field(default_factory=dict)
    """Backward, by expert: the error of each intermediate channel's gradient of gate, up and down weights, ``[I]``."""
    inter_rows: list[Tensor] = field(default_factory=list)
    """Forward: samples of the operand of down, without routing weights, ``[R, I]``."""
    grad_rows: list[Tensor] = field(default_factory=list)
    """Backward: samples of the gradients of gate and up, without routing weights, ``[R, 2I]``."""


def relative(found: Tensor, expected: Tensor, dim: int = -1) -> Tensor:
    """Return the norm of the difference as a share of the norm of what was expected."""
    error = (found - expected).norm(dim=dim) / (expected.norm(dim=dim) + _TINY)
    return torch.where(found.isfinite().all(dim) & error.isfinite(), error, torch.inf)


def _dtype(call: Call) -> torch.dtype:
    weights = call.weights[0]
    return choose_compute(
        call.spec.precision, call.x_TH.device, rows_per_expert=_CHUNK, weight_dtype=weights.dtype
    ).operand


def _sums(network: Network, x_RH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_RH = x_RH.to(dtype)
    up = (x_RH @ network.up_IH.to(dtype).t()).float() + _plain(network.added[1])
    if network.gate_IH is None:
        return up, up
    return (x_RH @ network.gate_IH.to(dtype).t()).float() + _plain(network.added[0]), up


def _plain(added: Tensor | float) -> Tensor | float:
    return added if isinstance(added, float) else added.float()


def coarse_forward(call: Call, out_TH: Tensor, pre: Pre | None) -> Coarse:
    """Compare an output, and gate and up where they were saved whole."""
    gating, dtype = gating_of(call.spec.gate), _dtype(call)
    total_TH = torch.zeros(call.x_TH.shape, dtype=torch.float32, device=call.x_TH.device)
    errors, inter_rows = [], []
    for run in call.runs():
        network = Network.of(call, run.expert)
        down_HI = network.down_HI.to(dtype)
        for start in range(0, len(run.token_R), _CHUNK):
            token_R, part = run.token_R[start : start + _CHUNK], slice(run.start + start, run.start + start + _CHUNK)
            gate, up = _sums(network, call.x_TH[token_R], dtype)
            if pre is not None:
                end = run.start + len(run.token_R)
                kept = [None if each is None else each[part.start : min(part.stop, end)].float() for each in pre]
                assert kept[1] is not None
                error_R = relative(kept[1], up[:, : kept[1].shape[1]])  # "minimal" saves its first columns
                errors.append(error_R if kept[0] is None else torch.maximum(error_R, relative(kept[0], gate)))
            inter = gating.intermediate_(gate, up)
            if run.scale_R is not None:
                inter = inter * run.scale_R[start : start + _CHUNK].unsqueeze(1)
            rows_RH = (inter.to(dtype) @ down_HI.t()).float()
            if network.down_bias_H is not None:
                bias_H = network.down_bias_H.float()
                scale = 1.0 if run.scale_R is None else run.scale_R[start : start + _CHUNK].unsqueeze(1)
                rows_RH = rows_RH + bias_H * scale
            total_TH.index_add_(0, token_R, rows_RH)
            if not start:
                inter_rows.append(_sample(inter, run.scale_R))
    saved = torch.cat(errors) if errors else None
    return Coarse(relative(out_TH.float(), total_TH), saved, inter_rows=inter_rows)


def _sample(values_RC: Tensor, scale_R: Tensor | None) -> Tensor:
    """Return some rows of an expert without their routing weights, which differ by powers of ten."""
    few_RC = values_RC[:_SAMPLED]
    return few_RC if scale_R is None else few_RC / scale_R[:_SAMPLED].abs().clamp(min=_TINY).unsqueeze(1)


@dataclass
class WeightGrads:
    """Gradients of the weights in ``nn.Linear`` orientation, of all experts."""

    gate_EIH: Tensor | None
    up_EIH: Tensor
    down_EHI: Tensor


def coarse_backward(
    call: Call, dx_TH: Tensor | None, d_weight_TK: Tensor | None, grads: WeightGrads | None, pre: Pre | None
) -> Coarse:
    """Compare the gradients; `pre` are gate and up that are saved in a form of less precision."""
    grad_of = SwiGLUGrad(gating_of(call.spec.gate), False, lambda values: values)
    dtype, device = _dtype(call), call.dout_TH.device
    total_TH = torch.zeros(call.dout_TH.shape, dtype=torch.float32, device=device)
    found = Coarse(torch.zeros(len(call.dout_TH), dtype=torch.float32, device=device))
    scales = []
    signs_H = torch.where(
        torch.arange(call.dout_TH.shape[1], device=device).mul(2654435761).bitwise_and(64) > 0, 1.0, -1.0
    )
    for run in call.runs():
        network = Network.of(call, run.expert)
        weights = [None if part is None else part.to(dtype) for part in network[:3]]
        sums = torch.zeros(3, len(network.up_IH), dtype=torch.float32, device=device)
        for start in range(0, len(run.token_R), _CHUNK):
            part = slice(start, start + _CHUNK)
            token_R = run.token_R[part]
            x_RH, dout_RH = call.x_TH[token_R], call.dout_TH[token_R]
            gate, up = _pre(network, x_RH, dtype, pre, run, part)
            results = torch.empty(3, *up.shape, dtype=torch.float32, device=device)
            d_inter = (dout_RH.to(dtype) @ weights[2]).float()  # type: ignore[operator]
            scale_R = torch.zeros(len(token_R), dtype=torch.float32, device=device)
            factor = None if run.scale_R is None else run.scale_R[part].unsqueeze(1)
            grad_of.fill(results, d_inter, gate, up, torch.empty_like(up), scale_R1=factor, d_scale_R=scale_R)
            d_gate, d_up, inter = results
            rows_RH = d_up.to(dtype) @ weights[1]
            if weights[0] is not None:
                rows_RH = rows_RH + d_gate.to(dtype) @ weights[0]
            total_TH.index_add_(0, token_R, rows_RH.float())
            scales.append(scale_R)
            right_R, left_R = x_RH.float() @ signs_H, dout_RH.float() @ signs_H
            sums += torch.stack([d_gate.t() @ right_R, d_up.t() @ right_R, inter.t() @ left_R])
            if not start:
                both = [d_up] if weights[0] is None else [d_gate, d_up]
                found.grad_rows.append(torch.cat([_sample(each, run.scale_R) for each in both], 1))
        if grads is not None:
            found.channels[run.expert] = _channel_errors(grads, run.expert, sums, signs_H)
    if dx_TH is not None:
        found.error_T = relative(dx_TH.float(), total_TH)
    if d_weight_TK is not None and call.routing is not None and scales:
        expected_P = torch.cat(scales)
        flat = d_weight_TK.reshape(-1)
        order = torch.cat([run.pair_R for run in call.runs()])
        error = (flat[order].float() - expected_P).abs() / (expected_P.square().mean().sqrt() + _TINY)
        found.pair_error_P = torch.where(error.isfinite(), error, torch.inf)
    return found


def _pre(
    network: Network, x_RH: Tensor, dtype: torch.dtype, pre: Pre | None, run: Run, part: slice
) -> tuple[Tensor, Tensor]:
    if pre is None:
        return _sums(network, x_RH, dtype)
    rows = slice(run.start + part.start, run.start + min(part.stop, len(run.token_R)))
    gate, up = (None if each is None else each[rows].float() for each in pre)
    assert up is not None
    return (up if gate is None else gate), up


def _channel_errors(grads: WeightGrads, expert: int, sums_3I: Tensor, signs_H: Tensor) -> list[Tensor]:
    """How far each channel is, as a share of the mean: of sums of random signs."""
    parts = [grads.gate_EIH, grads.up_EIH, grads.down_EHI.transpose(1, 2)]
    errors = []
    for part, expected_I in zip(parts, sums_3I, strict=True):
        if part is None:
            errors.append(torch.zeros_like(expected_I))
            continue
        error_I = (part[expert].float() @ signs_H - expected_I).abs() / (expected_I.square().mean().sqrt() + _TINY)
        errors.append(torch.where(error_I.isfinite(), error_I, torch.inf))
    return errors
