"""A network of MX codes in a few lines: the codes' values as weights, activations rounded straight through."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from hf_neuron_moe.formats import fake_quantize_mx


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
) -> Tensor:
    """One network, in the dtype of `x` (float64 or fp32), on the codes' values.

    `scale` multiplies the product, or with `after` the output; its gradient, too, counts rounding as the identity.
    """
    gate, up = (through(x, schemes[0]) @ gate_up.to(x.dtype).T).chunk(2, dim=-1)
    product, weights = F.silu(gate) * up, down.to(x.dtype).T
    if scale is None or not after:
        return through(product if scale is None else product * scale[:, None], schemes[1], width) @ weights
    fixed = scale.detach()
    plain = product.detach() @ weights
    return fixed[:, None] * (through(product, schemes[1], width) @ weights) + (scale - fixed)[:, None] * plain
