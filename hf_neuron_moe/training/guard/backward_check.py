"""The backward of a block's call, looked at: its gradients and which product made the wrong one.

Legend: T tokens, K experts per token, H hidden, I intermediate, E experts, P pairs in expert order, N picked rows,
C picked intermediate channels, R rows of an expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.backends.torch.saved import FP8Rows
from hf_neuron_moe.modules.op_watch import OpCall
from hf_neuron_moe.training.block_calls import Call, halves, oriented
from hf_neuron_moe.training.guard.coarse import Coarse, WeightGrads, coarse_backward
from hf_neuron_moe.training.guard.findings import Evidence, Finding, errors_of, magnitudes, operand, picked, row_errors
from hf_neuron_moe.training.guard.forward_check import DRAWN, WORST, fp8_pre, saved_pre
from hf_neuron_moe.training.guard.second import Inner, Network, Pre, Product, over_rows, rounded

CHANNELS = 2  # drawn at random of every expert whose weight gradients are computed again


class Gradients(NamedTuple):
    """What a backward returned; None where nobody wants it."""

    x_TH: Tensor | None
    weight_TK: Tensor | None
    weights: WeightGrads | None

    @classmethod
    def of(cls, call: Call, seen: OpCall) -> Gradients:
        """Sort an operator's results."""
        results = [part if part.numel() else None for part in seen.results]
        if call.codes is not None:
            return cls(results[0], results[1], None)
        if isinstance(call.weights, FFNWeights):
            gate, up, down = (None if part is None else part.unsqueeze(0) for part in results[1:4])
            weights = None if up is None or down is None else WeightGrads(gate, up, down)
            return cls(results[0], None, weights)
        x, weight, gate_up, down = results[:4]
        if gate_up is None or down is None:
            return cls(x, weight, None)
        return cls(x, weight, WeightGrads(*halves(gate_up, call.spec), oriented(down, call.spec)))


def as_backward_sees(call: Call, seen: OpCall) -> tuple[Call, Pre | None]:
    """Return the call with its input, and gate and up, as they were saved; None where they are made again."""
    pre = saved_pre(seen)
    if call.codes is not None:  # whose backward reads the input where gate and up are made again
        x_TH = seen.x_TH if len(seen.x_TH) else torch.zeros_like(call.dout_TH)
        return replace(call, x_TH=x_TH), fp8_pre(seen) if seen.call.keep.fp8 else pre
    if not seen.call.keep.fp8:
        whole = pre is not None and pre[1].shape[1] == call.projections.up_EIH.shape[1]
        return call, pre if whole else None
    x_TH = FP8Rows(seen.saved[2], seen.saved[3]).take(slice(None), slice(0, seen.saved[2].shape[1]))
    return replace(call, x_TH=x_TH.to(call.dout_TH.dtype)), fp8_pre(seen)


def check_backward(call: Call, seen: OpCall, generator: torch.Generator) -> list[Finding]:
    """Return what was found of a backward, in the order in which it is computed."""
    gradients = Gradients.of(call, seen)
    call, pre = as_backward_sees(call, seen)
    coarse = coarse_backward(call, *gradients, pre)
    findings = [operand("down.dx", "gradients", call.dout_TH)]
    fp8 = seen.call.keep.fp8
    rows = _Rows(call, _tokens(call, coarse, generator), pre, fp8)
    if gradients.weight_TK is not None and rows.parts:
        findings.append(rows.routing(gradients.weight_TK))
    if coarse.grad_rows:
        sample = torch.cat(coarse.grad_rows)
        findings.append(operand("gate_up.dx", "gradients", sample, sample))
    if gradients.x_TH is not None and rows.parts:
        findings.append(rows.input(gradients.x_TH))
    if gradients.weights is not None:
        findings += _weights(call, gradients.weights, coarse, pre, generator, fp8)
    return findings


def _tokens(call: Call, coarse: Coarse, generator: torch.Generator) -> Tensor:
    """Rows to compute again, of those that have a gradient."""
    some = call.dout_TH.ne(0).any(1)
    tokens = picked(torch.where(some, coarse.error_T, -1.0), generator, WORST, DRAWN)
    if coarse.pair_error_P is not None:
        pair = coarse.pair_error_P.argmax()
        tokens = torch.cat([tokens, torch.cat([run.token_R for run in call.runs()])[pair].reshape(1)]).unique()
    return tokens


def _of_rows(pre: Pre, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    gate, up = (None if part is None else part[rows].double() for part in pre)
    assert up is not None
    return gate, up


class _Rows:
    """The second computation of some tokens' gradients."""

    def __init__(self, call: Call, tokens: Tensor, pre: Pre | None, fp8: bool) -> None:
        self.call, self.tokens = call, tokens
        self.parts: list[tuple[int, Tensor, Tensor, Network, Inner]] = []
        """By expert: its number, places among `tokens`, pairs, network, and what it makes of them."""
        for run in call.runs():
            place_N, row_N = (run.token_R[None] == tokens[:, None]).nonzero(as_tuple=True)
            if not len(place_N):
                continue
            network, token_N = Network.of(call, run.expert, fp8=fp8), tokens[place_N]
            if pre is None:
                sums = network.sums(call.x_TH[token_N])
                gate, up = (None if part is None else rounded(part, network.precision) for part in sums)
            else:
                gate, up = _of_rows(pre, run.start + row_N)
            assert up is not None
            scale = None if run.scale_R is None else run.scale_R[row_N]
            inner = network.inner(call.dout_TH[token_N], gate, up, scale)
            self.parts.append((run.expert, place_N, run.pair_R[row_N], network, inner))

    def routing(self, found_TK: Tensor) -> Finding:
        """Compare the routing weights' gradients; an error is a share of their root mean square."""
        figures, _ = magnitudes(found_TK)
        found, expected, experts = [], [], []
        for expert, place, pairs, network, inner in self.parts:
            expected.append(inner.d_scale_R)
            if network.down_bias_H is not None:
                of_bias_N = self.call.dout_TH[self.tokens[place]].double() @ network.down_bias_H.double()
                expected[-1] = expected[-1] + of_bias_N
            found.append(found_TK.reshape(-1)[pairs].double())
            experts += [expert] * len(pairs)
        found_N, expected_N = torch.cat(found), torch.cat(expected)
        error_N = (found_N - expected_N).abs() / expected_N.square().mean().sqrt().clamp(min=1e-30)
        error_N = torch.where(error_N.isfinite(), error_N, torch.inf)
        errors, evidence = errors_of(error_N), Evidence(torch.stack([found_N, expected_N]))
        return Finding("down.dx", "routing", figures | errors.figures, experts[errors.row], lambda: evidence)

    def input(self, found_TH: Tensor) -> Finding:
        """Compare the input's gradient."""
        figures, _ = magnitudes(found_TH)
        expected_NH = torch.zeros(len(self.tokens), found_TH.shape[1], dtype=torch.float64, device=found_TH.device)
        products: list[tuple[Tensor, Product, Tensor]] = []
        for _, place, _, network, inner in self.parts:
            product = network.input_gradient(inner)
            value = product.value()
            products.append((place, product, value))
            expected_NH.index_add_(0, place, value)
        found_NH = found_TH[self.tokens]
        errors = row_errors(found_NH, expected_NH)
        row = errors.row
        gone, expert, most = found_NH[row].double() - expected_NH[row], -1, -1.0
        for (number, *_), (place, _, value) in zip(self.parts, products, strict=True):
            for index in (place == row).nonzero()[:, 0].tolist():
                share = float((value[index] @ gone).abs() / (value[index].norm() + 1e-30))
                if share > most and self.call.routing is not None:
                    expert, most = number, share

        def evidence() -> Evidence:
            lefts: list[Tensor] = []
            rights: list[Tensor] = []
            for place, product, _ in products:
                for index in (place == row).nonzero()[:, 0].tolist():
                    lefts += [left[index : index + 1] for left in product.left_RK]
                    rights += product.right_CK
            return Evidence(found_NH[row : row + 1].double(), Product(lefts, rights, self.call.spec.precision))

        return Finding("gate_up.dx", "dx", figures | errors.figures, expert, evidence)


def _weights(
    call: Call, grads: WeightGrads, coarse: Coarse, pre: Pre | None, generator: torch.Generator, fp8: bool
) -> list[Finding]:
    """Compare channels of the weights' gradients, of the experts that are farthest off and a random one."""
    parts = {"gate": grads.gate_EIH, "up": grads.up_EIH, "down": grads.down_EHI.transpose(1, 2)}
    present = {name: part for name, part in parts.items() if part is not None}
    worst: dict[str, tuple[float, int, Evidence | None]] = dict.fromkeys(present, (0.0, -1, None))
    typical: dict[str, list[float]] = {name: [] for name in present}
    runs = {run.expert: run for run in call.runs()}
    experts = list(coarse.channels)
    if experts:
        farthest = torch.stack([torch.stack([part.max() for part in coarse.channels[each]]).max() for each in experts])
        experts = [experts[place] for place in picked(farthest, generator, WORST, 1).tolist()]
    for expert in experts:
        run, network = runs[expert], Network.of(call, expert, fp8=fp8)
        drawn = torch.randint(len(network.up_IH), (CHANNELS,), generator=generator).to(call.x_TH.device)
        channels = torch.cat([drawn, *(part.argmax().reshape(1) for part in coarse.channels[expert])]).unique()
        x_RH, dout_RH = call.x_TH[run.token_R], call.dout_TH[run.token_R]
        rows = slice(run.start, run.start + len(run.token_R))
        of_run = None if pre is None else (None if pre[0] is None else pre[0][rows], pre[1][rows])
        inner = network.inner_of_channels(channels, x_RH, dout_RH, of_run, run.scale_R)
        for name, left, right in (
            ("gate", inner.d_gate_RI, x_RH),
            ("up", inner.d_up_RI, x_RH),
            ("down", inner.inter_RI, dout_RH),
        ):
            if left is None or name not in present:
                continue
            block = None if call.routing is None else call.spec.block_size
            product = over_rows(left, right, call.spec.precision, block)
            value = product.value()
            value = value if call.spec.precision == "fp32" else value.float()
            value = value.bfloat16() if call.spec.precision == "mxfp8" else value
            found = present[name][expert][channels]
            errors = row_errors(found, value)
            typical[name].append(errors.rounding)
            if errors.worst >= worst[name][0]:
                row = slice(errors.row, errors.row + 1)
                one = product._replace(left_RK=[part[row] for part in product.left_RK])
                number = expert if call.routing is not None else -1
                worst[name] = errors.worst, number, Evidence(found[row].double(), one)
    for expert in range(len(grads.up_EIH)):
        for name, part in present.items():
            if expert not in runs and part[expert].any():
                worst[name] = float("inf"), expert, Evidence(part[expert][:8])
    findings = []
    for name in ("down", "gate", "up"):
        if name in present:
            error, expert, found_evidence = worst[name]
            product_name = "down.dw" if name == "down" else "gate_up.dw"
            middle = sorted(typical[name] or [0.0])[(len(typical[name]) - 1) // 2]
            measured = magnitudes(present[name], by_expert=False)[0] | {
                "worst": error,
                "rounding": middle,
            }
            shown = Evidence(present[name][0][:1]) if found_evidence is None else found_evidence
            findings.append(Finding(product_name, name, measured, expert, lambda shown=shown: shown))  # type: ignore[misc]
    return findings
