"""Biases of a block: those of down in its output, and the gradients of all.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, G groups: experts, or one dense MLP.
Sums are fp32, but on CPUs those for bf16 biases of gate and up, which are rounded. These biases are added where their
products are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import BlockSpec, Routing, Wants
from hf_neuron_moe.backends.torch.experts import GroupedWeights, split_gate_up


def add_down_bias(out_TH: Tensor, down_bias_GH: Tensor, routing: Routing | None) -> Tensor:
    """Return the fp32 output with ``sum_k a_k b_k`` of each token added, or ``b`` of a dense MLP."""
    total_TH = out_TH.float()
    if routing is None:
        return total_TH.add_(down_bias_GH[0].float())
    return total_TH.addmm_(_weight_of_expert(routing, len(down_bias_GH)), down_bias_GH.float())


def routed_bias_grad(dout_TH: Tensor, routing: Routing, down_bias_EH: Tensor) -> Tensor:
    """Return the bias's part of the routing weights' gradient, ``dY . b`` of each pair: fp32 ``[T, K]``."""
    E = len(down_bias_EH)
    products_TE = dout_TH.float() @ down_bias_EH.float().t()
    found_TK = products_TE.gather(1, routing.index_TK.long().clamp(max=E - 1))
    return found_TK.masked_fill_(routing.index_TK >= E, 0)


class BiasGrads:
    """Gradients of a block's biases in their own dtypes; None for one that it has not, or that nobody wants."""

    def __init__(self, weights: GroupedWeights, wants: Wants, anchor: Tensor) -> None:
        self.weights = weights
        self.wanted = wants.weights
        self.gate_up_G2I: Tensor | None = None
        """Of gate, then of up, fp32, for the backward to fill; the gate's half stays unused where there is no gate."""
        if self.wanted and weights.biased:
            shape = (len(weights.down_GHI), 2 * weights.inner)
            self.gate_up_G2I = torch.zeros(shape, dtype=torch.float32, device=anchor.device)

    def gate_and_up(self) -> tuple[Tensor | None, Tensor | None]:
        """Return those of a dense MLP's gate and up ``[I]``."""
        if self.gate_up_G2I is None:
            return None, None
        halves = self.gate_up_G2I[0].chunk(2)
        biases = (self.weights.gate_bias_GI, self.weights.up_bias_GI)
        gate, up = (None if b is None else half.to(b.dtype, copy=True) for b, half in zip(biases, halves, strict=True))
        return gate, up

    def gate_up(self, spec: BlockSpec) -> Tensor | None:
        """Return that of the experts' joint bias ``[E, 2I]`` (``[E, I]`` without a gate), in its order."""
        bias_EI = self.weights.up_bias_GI
        if self.gate_up_G2I is None or bias_EI is None:
            return None
        halves = self.gate_up_G2I.chunk(2, dim=1)
        columns = (2 if spec.gate.gated else 1) * self.weights.inner
        joint = self.gate_up_G2I.new_empty((len(bias_EI), columns), dtype=bias_EI.dtype)
        for target, half in zip(split_gate_up(joint, spec), halves, strict=True):
            target.copy_(half[:, : target.shape[1]])
        return joint

    def down_of_rows(self, dout_SH: Tensor) -> Tensor | None:
        """Return that of a dense MLP's down ``[H]``."""
        bias_GH = self.weights.down_bias_GH
        return None if bias_GH is None or not self.wanted else dout_SH.sum(0, dtype=torch.float32).to(bias_GH.dtype)

    def down_of_pairs(self, dout_TH: Tensor, routing: Routing) -> Tensor | None:
        """Return that of the experts' down ``[E, H]``."""
        bias_EH = self.weights.down_bias_GH
        if bias_EH is None or not self.wanted:
            return None
        return (_weight_of_expert(routing, len(bias_EH)).t() @ dout_TH.float()).to(bias_EH.dtype)


def _weight_of_expert(routing: Routing, experts: int) -> Tensor:
    """Return each token's weight of each expert, fp32 ``[T, E]``; other ranks' experts are left out."""
    index_TK, weight_TK = routing
    table = weight_TK.new_zeros((len(index_TK), experts + 1), dtype=torch.float32)
    return table.scatter_add_(1, index_TK.long().clamp(max=experts), weight_TK.float())[:, :experts]
