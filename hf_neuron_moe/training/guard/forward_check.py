"""The forward of a block's call, looked at: operands, what was saved, and the output, product by product.

Legend: T tokens, H hidden, I intermediate, E experts, P pairs in expert order, N picked rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import FFNWeights, Routing
from hf_neuron_moe.backends.torch.gating import Limits, gating_of
from hf_neuron_moe.backends.torch.saved import GROUP, FP8Rows
from hf_neuron_moe.formats.group_fp8 import group_dequantize_fp8, group_quantize_fp8
from hf_neuron_moe.modules.op_watch import OpCall
from hf_neuron_moe.training.block_calls import Call
from hf_neuron_moe.training.guard.coarse import coarse_forward
from hf_neuron_moe.training.guard.findings import (
    Evidence,
    Finding,
    RowErrors,
    magnitudes,
    operand,
    picked,
    row_errors,
    weights,
)
from hf_neuron_moe.training.guard.second import Forward, Network, Pre

WORST, DRAWN = 2, 2
"""Rows that are computed again: those farthest from the coarse second computation, and random ones."""


def saved_pre(seen: OpCall) -> Pre | None:
    """Return gate and up as they were saved in the compute dtype; of up perhaps only its first columns."""
    names, gated = seen.call.keep.names, seen.call.spec.gate.gated
    if seen.call.keep.fp8 or "up" not in names or (gated and "gate_pre" not in names):
        return None
    return seen.saved[0] if gated else None, seen.saved[1]


def fp8_pre(seen: OpCall) -> Pre:
    """Return gate and up that were saved in FP8, as the backward reads them."""
    columns = slice(0, seen.saved[0].shape[-1])
    both = zip(seen.saved[0], seen.saved[1], _limits(seen), strict=True)
    *gate, up = [FP8Rows(codes, scales, limits).take(slice(None), columns) for codes, scales, limits in both]
    return gate[0] if gate else None, up


def _limits(seen: OpCall) -> tuple[Limits, ...]:
    gating = gating_of(seen.call.spec.gate)
    return (gating.gate_limits, gating.up_limits)[-len(seen.saved[0]) :]


def _through_fp8(values_RI: Tensor, limits: Limits) -> Tensor:
    """Return values as they come back from FP8, which limits do without rounding."""
    upper, lower = limits
    inside_RI = values_RI if limits == (None, None) else values_RI.clamp(lower, upper)
    padded_RI = F.pad(inside_RI.bfloat16(), (0, -inside_RI.shape[1] % GROUP))
    found_RI = group_dequantize_fp8(*group_quantize_fp8(padded_RI, GROUP)).double()[:, : inside_RI.shape[1]]
    if limits == (None, None):
        return found_RI
    on_limit = torch.stack([inside_RI == limit for limit in limits if limit is not None]).any(0)
    return torch.where(on_limit, inside_RI, found_RI.clamp(lower, upper))


def check_forward(call: Call, seen: OpCall, generator: torch.Generator, suspicious: float) -> list[Finding]:
    """Return what was found of a forward, in the order in which it is computed.

    A row of the output that is farther off than `suspicious` is computed once more by the backend with gate and up
    saved, where they were not. That tells the products apart.
    """
    out_TH, pre = seen.results[0], saved_pre(seen)
    coarse = coarse_forward(call, out_TH, pre)
    tokens = picked(coarse.error_T, generator, WORST, DRAWN)
    if coarse.saved_error_P is not None and len(coarse.saved_error_P):
        pair = coarse.saved_error_P.argmax()
        tokens = torch.cat([tokens, torch.cat([run.token_R for run in call.runs()])[pair].reshape(1)]).unique()
    second = _Second(call, tokens)
    gate_EIH, up_EIH, down_EHI = call.projections
    inputs = [part for part in (gate_EIH, up_EIH) if part is not None]
    findings = [operand("gate_up", "activations", call.x_TH), weights("gate_up", inputs)]
    found_out = second.output(out_TH)
    if pre is None and found_out.figures["worst"] > suspicious:
        few = _with_pre(call, seen, tokens)
        findings += _Second(few, torch.arange(len(tokens), device=tokens.device)).saved(*few_saved(few, seen))
    else:
        findings += second.saved(pre, seen)
    if coarse.inter_rows:
        inter = torch.cat(coarse.inter_rows)
        findings.append(operand("down", "activations", inter, inter))
    return [*findings, weights("down", [down_EHI]), found_out]


def _with_pre(call: Call, seen: OpCall, tokens: Tensor) -> Call:
    routing = None if call.routing is None else Routing(*(part[tokens] for part in call.routing))
    return replace(call, x_TH=call.x_TH[tokens], routing=routing)


def few_saved(few: Call, seen: OpCall) -> tuple[Pre, None]:
    """Return gate and up of a backend's own forward over few rows."""
    backend, keep = get_backend(seen.call.backend), parse_keep("gate_pre+up" if few.spec.gate.gated else "up")
    saved: Sequence[Tensor]
    if isinstance(seen.weights, MXExpertStack):
        _, *saved = backend.quantized_forward(few.x_TH, few.routing, seen.weights, keep)
    elif isinstance(few.weights, FFNWeights):
        saved = backend.mlp_forward(few.x_TH, few.weights, few.spec, keep)[1]
    else:
        assert few.routing is not None
        saved = backend.experts_forward(few.x_TH, few.routing, few.weights, few.spec, keep)[1]
    return (saved[0] if few.spec.gate.gated else None, saved[1]), None


class _Second:
    """The second computation of some tokens' rows."""

    def __init__(self, call: Call, tokens: Tensor) -> None:
        self.call, self.tokens = call, tokens
        self.parts: list[tuple[int, Tensor, Tensor, Network, Forward]] = []
        """By expert: its number, places among `tokens`, rows among the pairs, network, and what it makes of them."""
        self.pairs = 0  # those behind belong to experts of other processes, and nobody writes them
        self.out_NH = torch.zeros(len(tokens), call.x_TH.shape[1], dtype=torch.float64, device=tokens.device)
        self.bias_NH = torch.zeros_like(self.out_NH)
        for run in call.runs():
            self.pairs = run.start + len(run.token_R)
            place_N, row_N = (run.token_R[None] == tokens[:, None]).nonzero(as_tuple=True)
            if not len(place_N):
                continue
            network = Network.of(call, run.expert)
            scale = None if run.scale_R is None else run.scale_R[row_N]
            found = network.forward(call.x_TH[tokens[place_N]], scale)
            self.parts.append((run.expert, place_N, run.start + row_N, network, found))
            self.out_NH.index_add_(0, place_N, found.out_RH)
            if network.down_bias_H is not None:
                bias = network.down_bias_H.double().expand(len(place_N), -1)
                self.bias_NH.index_add_(0, place_N, bias if scale is None else bias * scale.double()[:, None])

    def output(self, out_TH: Tensor) -> Finding:
        """Compare the output."""
        figures, _ = magnitudes(out_TH)
        found_NH, expected_NH = out_TH[self.tokens], self.out_NH + self.bias_NH
        errors = row_errors(found_NH, expected_NH)
        row = errors.row
        gone = found_NH[row].double() - expected_NH[row]
        inside = [(expert, (place == row).nonzero()) for expert, place, *_ in self.parts]
        shares = [
            (float((part[4].out_RH[places[0, 0]] @ gone).abs() / (part[4].out_RH[places[0, 0]].norm() + 1e-30)), expert)
            for part, (expert, places) in zip(self.parts, inside, strict=True)
            if len(places)
        ]
        expert = max(shares)[1] if shares and self.call.routing is not None else -1

        def evidence() -> Evidence:
            lefts: list[Tensor] = []
            rights: list[Tensor] = []
            for _, place, *_, found in self.parts:
                for index in (place == row).nonzero()[:, 0].tolist():
                    lefts += [part[index : index + 1] for part in found.down.left_RK]
                    rights += found.down.right_CK
            observed = (found_NH[row].double() - self.bias_NH[row]).unsqueeze(0)
            return Evidence(observed, self.parts[0][4].down._replace(left_RK=lefts, right_CK=rights))

        return Finding("down", "y", figures | errors.figures, expert, evidence)

    def saved(self, pre: Pre | None, seen: OpCall | None) -> Iterator[Finding]:
        """Compare what was saved."""
        fp8 = seen is not None and seen.call.keep.fp8
        limits: dict[str, Limits] = {}
        if seen is not None and fp8:
            pre = fp8_pre(seen)
            limits = dict(zip(("gate", "up")[-len(seen.saved[0]) :], _limits(seen), strict=True))
        if pre is not None:
            for name, kept in zip(("gate", "up"), pre, strict=True):
                if kept is not None and len(kept) and self.parts:
                    yield self._one("gate_up", name, kept, limits.get(name))
        names = frozenset[str]() if seen is None or fp8 else seen.call.keep.names
        for name, place in (("gate_act", 2), ("intermediate", 3)):
            if name in names and seen is not None and len(seen.saved[place]) and self.parts:
                yield self._one("gate", name, seen.saved[place])

    def _one(self, product: str, name: str, saved_PI: Tensor, fp8: Limits | None = None) -> Finding:
        """Compare what was saved of one kind; `fp8` are the limits of what was saved in FP8."""
        figures, _ = magnitudes(saved_PI[: self.pairs])
        field = {"gate": "gate_RI", "up": "up_RI", "gate_act": "act_RI", "intermediate": "product_RI"}[name]
        compared = []
        for *_, rows, _, found in self.parts:
            expected_RI = getattr(found, field)[:, : saved_PI.shape[1]]
            expected_RI = expected_RI if fp8 is None else _through_fp8(expected_RI, fp8)
            compared.append(row_errors(saved_PI[rows], expected_RI))
        index = max(range(len(compared)), key=lambda number: compared[number].worst)
        errors, expert, row = compared[index], self.parts[index][0], compared[index].row
        typical = sorted(each.rounding for each in compared)[(len(compared) - 1) // 2]

        def evidence() -> Evidence:
            _, place, rows, network, _ = self.parts[index]
            observed = saved_PI[rows[row]].double().unsqueeze(0)
            if product != "gate_up":
                return Evidence(observed)
            weight, added = (network.gate_IH, network.added[0]) if name == "gate" else (network.up_IH, network.added[1])
            assert weight is not None
            added = added if isinstance(added, float) else added[: observed.shape[1]]
            x_1H = self.call.x_TH[self.tokens[place[row]]].unsqueeze(0)
            return Evidence(observed - added, network.project(x_1H, weight[: observed.shape[1]]))

        figures |= RowErrors(errors.worst, typical, row).figures
        return Finding(product, name, figures, expert if self.call.routing is not None else -1, evidence)
