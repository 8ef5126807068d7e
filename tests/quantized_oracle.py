"""A network of MX codes in a few lines: the codes' values as weights, activations rounded straight through."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.formats import fake_quantize_mx
from tests.backends.test_gates import formula


def through(x: Tensor, scheme: str, width: int | None = None) -> Tensor:
    """fp32 values rounded to MXFP8 along the last axis (zeros up to `width`), the gradient passing unchanged."""
    padded = F.pad(x.detach(), (0, (width or x.shape[-1]) - x.shape[-1]))
    rounded = fake_quantize_mx(padded.bfloat16(), scheme=scheme)[..., : x.shape[-1]]
    return x + (rounded.to(x.dtype) - x).detach()


def oracle(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    schemes: tuple[str, str],
    width: int,
    scale: Tensor | None = None,
    *,
    after: bool = False,
    gate: Gate = SWIGLU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One network, in the dtype of `x` (float64 or fp32), on the codes' values; `biases` of gate_up and down.

    Without a gate projection `gate_up` is up alone.

    `scale` multiplies the product, or with `after` the output; its gradient, too, counts rounding as the identity.
    """
    sums = through(x, schemes[0]) @ gate_up.to(x.dtype).T
    halves = (sums if biases is None else sums + biases[0].to(x.dtype)).chunk(2 if gate.gated else 1, dim=-1)
    g, u = halves[0], halves[-1]
    kept = formula(gate, _kept(g, gate.gate_min, gate.gate_max), _kept(u, gate.up_min, gate.up_max))
    product, weights = kept + (formula(gate, g, u) - kept).detach(), down.to(x.dtype).T
    bias = torch.zeros(len(down), dtype=x.dtype) if biases is None else biases[1].to(x.dtype)
    if scale is None or not after:
        factor = x.new_ones(len(x), 1) if scale is None else scale[:, None]
        return through(product * factor, schemes[1], width) @ weights + factor * bias
    fixed = scale.detach()
    plain = product.detach() @ weights + bias
    return fixed[:, None] * (through(product, schemes[1], width) @ weights + bias) + (scale - fixed)[:, None] * plain


def _kept(sums: Tensor, low: float | None, high: float | None) -> Tensor:
    """Pre-activations as the backward reads them: in bf16, where one that is rounded to a limit has no gradient."""
    rounded = sums.detach().bfloat16().to(sums.dtype)
    beyond = (rounded >= (torch.inf if high is None else high)).to(sums.dtype)
    beyond = beyond - (rounded <= (-torch.inf if low is None else low)).to(sums.dtype)
    return sums + (rounded + beyond - sums).detach()
