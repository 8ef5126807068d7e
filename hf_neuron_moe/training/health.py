"""How MXFP8 quantisation treats a tensor: what is lost, and whether anything falls off either end of the range.

The measure does not depend on the precision a block computes with, so a bf16 run shows what mxfp8 would do to it.

Legend: R rows, K contraction axis of the matmul that the rows are an operand of.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.mx import dequantize_mx_natural, quantize_mx
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import unswizzle

MEASURES = ("amax", "flushed", "saturated", "sqnr_db")
"""The four figures of :func:`quantization_health`, in their order."""

SAMPLED_ROWS = 64
"""Rows taken of every tensor: the figures of a projection then rest on 64 K values, whatever its size."""

_MAGNITUDE, _LARGEST_CODE = 0x7F, 0x7E
"""Bits of an e4m3 code without its sign, and those of its largest finite value, 448."""


def quantization_health(rows_RK: Tensor) -> Tensor:
    """Return what MXFP8 (e4m3, Neuron scale rule) along K does to `rows_RK`.

    The rows are rounded to bf16 and zero padded to a multiple of 128 first, as the kernels get them (nki-library 2.31
    ``mlp_fwd_mxfp8``); the padding does not count.

    Args:
        rows_RK: ``[R, K]``, any float dtype, any device.

    Returns:
        fp32 ``[4]`` on the same device, in the order of :data:`MEASURES`: the largest magnitude; the share of elements
        that are not zero but become it; the share that gets the largest code, 448 times the scale (the Neuron rule
        leaves headroom, so anything but 0 means infinities); and the signal-to-quantisation-noise ratio
        ``10 log10(sum x^2 / sum (x - q)^2)`` in dB, infinite where nothing is lost. All NaN for no rows.
    """
    if rows_RK.numel() == 0:
        return torch.full((len(MEASURES),), torch.nan, device=rows_RK.device)
    K = rows_RK.shape[1]
    values = rows_RK.detach().float()
    quantized = quantize_mx(F.pad(values.to(torch.bfloat16), (0, padded_size(K) - K)))
    codes_RK = unswizzle(quantized.codes)
    restored = dequantize_mx_natural(codes_RK, quantized.scales)[:, :K]
    magnitude = codes_RK[:, :K].bitwise_and_(_MAGNITUDE)
    flushed = ((magnitude == 0) & (values != 0)).float().mean()
    saturated = (magnitude == _LARGEST_CODE).float().mean()
    noise = (values - restored).square().sum()
    sqnr = 10.0 * torch.log10(values.square().sum() / noise)
    return torch.stack([values.abs().amax(), flushed, saturated, sqnr])
