"""A network of MX codes in a few lines: the codes' values as weights, activations rounded straight through."""

from __future__ import annotations

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

    `scale` multiplies the product, or with `after` the output; its gradient, too, counts rounding as the identity.
    """
    sums = through(x, schemes[0]) @ gate_up.to(x.dtype).T
    g, u = (sums if biases is None else sums + biases[0].to(x.dtype)).chunk(2, dim=-1)
    product, weights = formula(gate, g, u), down.to(x.dtype).T
    if biases is not None:
        assert not after, "words have no biases in these tests"
        factor = x.new_ones(len(x)) if scale is None else scale
        hidden = through(product * factor[:, None], schemes[1], width)
        return hidden @ weights + factor[:, None] * biases[1].to(x.dtype)
    if scale is None or not after:
        return through(product if scale is None else product * scale[:, None], schemes[1], width) @ weights
    fixed = scale.detach()
    plain = product.detach() @ weights
    return fixed[:, None] * (through(product, schemes[1], width) @ weights) + (scale - fixed)[:, None] * plain
