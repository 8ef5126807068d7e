"""COAT's SiLU on group-quantised FP8 tensors, forward and backward.

Legend: M rows, N columns, QB group size, G = N / QB groups of a row; ``[b, s, N]`` counts as ``[b * s, N]``.

Source: NVlabs/COAT ``coat/activation/real_quantization/silu_fwd.py`` and ``silu_bwd.py``. Upstream's exponential is the
GPU's, torch's is used here: results can differ where the two exponentials differ in their last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.errors import public
from hf_neuron_moe.formats.fp8_rounding import round_to_fp8_
from hf_neuron_moe.formats.group_fp8 import FP8_DTYPES, row_chunks, scale_of_groups
from hf_neuron_moe.reference.fp8_common import (
    as_rows,
    check_gradient,
    check_grouped,
    dequantize_rows,
    fp8_type,
    quantize_with_scale,
)


@public
def fp8_silu_forward(x: Tensor, s_x: Tensor, QB: int) -> tuple[Tensor, Tensor]:
    """Apply SiLU to an FP8 tensor and group-quantise the result in the same format.

    The values are divided by the fp32 scale; what is returned is that scale rounded to the dtype of `s_x`, as upstream
    does. (``formats.group_quantize_fp8`` rounds first and divides by the rounded scale.)

    * x: FP8 codes ``[M, N]`` or ``[b, s, N]``. s_x: their scales ``[..., N/QB]``, bf16 or fp32.
    * QB: group size, a divisor of N. (Upstream's tiles want a divisor of 16.)

    Returns FP8 codes of the shape and dtype of `x`, and scales of the shape and dtype of `s_x`.
    """
    check_grouped(x, s_x, QB)
    fmt = FP8_DTYPES[x.dtype]
    codes, scales = as_rows(x), as_rows(s_x)
    out, s_out = torch.empty_like(codes), torch.empty_like(scales)
    for rows in row_chunks(codes):
        values = dequantize_rows(codes[rows], scales[rows])
        values = _sigmoid(values).mul_(values)
        scale = scale_of_groups(values, fmt)
        out[rows] = round_to_fp8_(values.div_(scale.unsqueeze(-1)), fmt).flatten(1)
        s_out[rows] = scale.to(s_out.dtype)
    return out.view(x.shape), s_out.view(s_x.shape)


@public
def fp8_silu_backward(
    x: Tensor,
    s_x: Tensor,
    g: Tensor,
    QB: int,
    fp8type: str | torch.dtype,
    stochastic: bool = False,
    output_quantized_transpose: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Differentiate SiLU at FP8 values: ``y = bf16((s + v*s*(1-s)) * g)`` with ``s = sigmoid(v)``.

    * x: FP8 codes of the pre-activation (``gate``), ``[M, N]`` or ``[b, s, N]``. s_x: their scales ``[..., N/QB]``,
      bf16 or fp32. QB: group size, a divisor of N. (Upstream's tiles want a divisor of 16.)
    * g: gradient of the activation, bf16 (documented), fp16 or fp32, same shape as `x`.
    * output_quantized_transpose: quantise with one scale per tensor to `fp8type` (``"E4M3"``, ``"E5M2"``, or the torch
      dtype) and return the transpose too.
    * stochastic: round to FP8 stochastically, unbiased, with random numbers of `generator` (upstream accepts the flag
      and rounds to nearest); an error where nothing is rounded to FP8.

    Returns ``(y, s_y)``: bf16 gradient, not divided by the bf16 group scales ``[..., N/QB]``; or ``(q, s_max,
    q_transposed)``: FP8 of the shape of `x`, 0-d bf16 scale, FP8 ``[N, M]``.
    """
    fmt = fp8_type(fp8type)
    check_grouped(x, s_x, QB)
    check_gradient(g, x, "x", stochastic, output_quantized_transpose, generator)
    codes, scales, gradient = (as_rows(tensor) for tensor in (x, s_x, g))
    y = torch.empty(codes.shape, dtype=torch.bfloat16, device=x.device)
    s_y = torch.empty(scales.shape, dtype=torch.bfloat16, device=x.device)
    for rows in row_chunks(codes):
        values = dequantize_rows(codes[rows], scales[rows])
        sigmoid = _sigmoid(values)
        # The order of upstream's operations; each is one fp32 rounding.
        slope = values.mul_(sigmoid).mul_(1 - sigmoid).add_(sigmoid)
        values = slope.mul_(gradient[rows].to(torch.float32).unflatten(-1, (-1, QB)))
        y[rows] = values.flatten(1).to(torch.bfloat16)
        s_y[rows] = scale_of_groups(values, fmt).to(torch.bfloat16)
    if not output_quantized_transpose:
        return y.view(x.shape), s_y.view(s_x.shape)
    scale = s_y.max()
    quantized, transposed = quantize_with_scale(y, scale, fmt, stochastic=stochastic, generator=generator)
    return quantized.view(x.shape), scale, transposed


def _sigmoid(values: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-v))`` spelt out: torch.sigmoid rounds differently."""
    return values.neg().exp_().add_(1.0).reciprocal_()
