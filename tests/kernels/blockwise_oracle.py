"""A readable float64 reference of the blockwise experts: the dense formula and autograd, no blocks.

Legend: T tokens, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.reference.activations import BY_TYPE
from hf_neuron_moe.reference.moe_types import ActFnType, ClampLimits


@dataclass
class Problem:
    """Leaves in float64; `affinity_TE` is zero where a token does not go to an expert."""

    x_TH: Tensor
    affinity_TE: Tensor
    chosen_TE: Tensor
    gate_up_EH2I: Tensor
    down_EIH: Tensor
    gate_up_bias_E2I: Tensor
    down_bias_EH: Tensor
    dout_TH: Tensor

    def leaves(self) -> list[Tensor]:
        return [
            self.x_TH, self.affinity_TE, self.gate_up_EH2I, self.down_EIH, self.gate_up_bias_E2I, self.down_bias_EH,
        ]  # fmt: skip


class StrictClamp(torch.autograd.Function):
    """Clamp whose gradient is zero on the limit too, as the kernels' masks are."""

    @staticmethod
    def forward(ctx, values: Tensor, upper: float | None, lower: float | None) -> Tensor:  # type: ignore[no-untyped-def]
        upper, lower = torch.inf if upper is None else upper, -torch.inf if lower is None else lower
        ctx.save_for_backward((values < upper) & (values > lower))
        return values.clamp(lower, upper)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return grad * ctx.saved_tensors[0], None, None


def experts(problem: Problem, kind: ActFnType, limits: ClampLimits, skip_gate: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[T, H]``, pre-activations ``[E, T, 2, I]``, down projections without bias ``[E, T, H]``."""
    sums = torch.einsum("th,ehki->etki", problem.x_TH, problem.gate_up_EH2I) + problem.gate_up_bias_E2I[:, None]
    gate = StrictClamp.apply(sums[:, :, 0], limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit)
    up = StrictClamp.apply(sums[:, :, 1], limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit)
    act = BY_TYPE[kind].value
    inter = act(up) if skip_gate else act(gate) * up
    down = torch.einsum("eti,eih->eth", inter, problem.down_EIH)
    weighted = (down + problem.down_bias_EH[:, None]) * (problem.affinity_TE * problem.chosen_TE).T[:, :, None]
    return weighted.sum(0), torch.stack([gate, up], 2), down


def gradients(problem: Problem, kind: ActFnType, limits: ClampLimits, skip_gate: bool) -> list[Tensor]:
    """Return d x, d affinity, d gate_up, d down, d gate_up bias and d down bias."""
    leaves = [leaf.requires_grad_() for leaf in problem.leaves()]
    output, _, _ = experts(problem, kind, limits, skip_gate)
    found = torch.autograd.grad(output, leaves, problem.dout_TH, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]
