"""COAT's elementwise product of two group-quantised FP8 tensors, forward and backward.

In a SwiGLU block ``x1 = silu(gate)`` and ``x2 = up`` are stored in FP8 with one scale per 1 x QB group.

Legend: M rows, N columns, QB group size, G = N / QB groups of a row; ``[b, s, N]`` counts as ``[b * s, N]``.

Everything is computed in fp32 and rounded once per output. The scale of a group is ``(max|v| + 1e-10) / fp8_max``;
the largest of them serves the whole tensor, which saves a pass over it (COAT's "group scaling").

Source: NVlabs/COAT ``coat/activation/real_quantization/mul_fwd.py`` and ``mul_bwd.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_equal_shape, check_flags, check_same_device
from hf_neuron_moe.errors import ConfigError, DTypeError, public
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
def fp8_mul_forward(
    x1: Tensor, s_x1: Tensor, x2: Tensor, s_x2: Tensor, QB: int, transpose_output_2d: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply two FP8 tensors and quantise the product with one scale per tensor.

    The product is rounded to bf16 before it is divided by the scale, as upstream does.

    * x1, x2: FP8 codes ``[M, N]`` or ``[b, s, N]``, of one dtype. s_x1, s_x2: their scales ``[..., N/QB]``, bf16 or
      fp32. QB: group size, a divisor of N. (Upstream's tiles want a divisor of 16.)
    * transpose_output_2d: must be True for 3-D input, where upstream's False reinterprets the transpose's memory as a
      3-D tensor without meaning. No effect on 2-D input.

    Returns ``(codes, scale, codes_transposed)``: FP8 of the shape and dtype of `x1`, the 0-d scale in the dtype of
    `s_x1`, and FP8 ``[N, M]``.
    """
    check_flags({"transpose_output_2d": transpose_output_2d})
    _check_operands(x1, s_x1, x2, s_x2, QB)
    if x1.dtype != x2.dtype:
        expected = f"of dtype {x1.dtype} like x1 (one of them sets the range, the other the result's dtype)"
        raise DTypeError.about("x2", expected, str(x2.dtype), "Quantize both operands to the same FP8 format.")
    if x1.ndim == 3 and not transpose_output_2d:
        expected = "True for 3-D input (the transpose of [b, s, N] is the 2-D [N, b*s])"
        fix = "Pass transpose_output_2d=True, or flatten the input to 2-D."
        raise ConfigError.about("transpose_output_2d", expected, "False", fix)
    fmt = FP8_DTYPES[x1.dtype]
    rows1, rows2, scales1, scales2 = (as_rows(tensor) for tensor in (x1, x2, s_x1, s_x2))
    product = torch.empty(rows1.shape, dtype=torch.bfloat16, device=x1.device)
    scales = torch.empty_like(scales1)
    for rows in row_chunks(rows1):
        values = dequantize_rows(rows1[rows], scales1[rows]).mul_(dequantize_rows(rows2[rows], scales2[rows]))
        product[rows] = values.flatten(1).to(torch.bfloat16)
        scales[rows] = scale_of_groups(values, fmt).to(scales.dtype)
    scale = scales.max()
    codes, transposed = quantize_with_scale(product, scale, fmt)
    return codes.view(x1.shape), scale, transposed


@public
def fp8_mul_backward(
    x1: Tensor,
    s_x1: Tensor,
    x2: Tensor,
    s_x2: Tensor,
    g: Tensor,
    QB: int,
    fp8type: str | torch.dtype,
    stochastic: bool = False,
    output_quantized_transpose: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Differentiate ``x1 * x2``: the gradients towards both factors, the second optionally in FP8.

    ``y1 = bf16(g * v2)`` and ``y2 = bf16(g * v1)`` with ``v = code * scale`` in fp32.

    * x1, x2: FP8 codes of the factors (``silu(gate)`` and ``up``), ``[M, N]`` or ``[b, s, N]``. s_x1, s_x2: their
      scales ``[..., N/QB]``, bf16 or fp32. QB: group size, a divisor of N. (Upstream's tiles want a divisor of 16.)
    * g: gradient of the product, bf16 (documented), fp16 or fp32, same shape.
    * output_quantized_transpose: quantise `y2` with one scale per tensor to `fp8type` (``"E4M3"``, ``"E5M2"``, or the
      torch dtype) and return its transpose too.
    * stochastic: round `y2` to FP8 stochastically, unbiased, with random numbers of `generator`. Upstream accepts the
      flag and rounds to nearest; here it does what it says, and is an error where nothing is rounded to FP8.

    Returns ``(y1, (y2, s_y2))``: bf16 gradients of the shape of `g` and bf16 group scales ``[..., N/QB]``, by which
    `y2` is *not* divided; or ``(y1, (q, s_max, q_transposed))``: FP8 ``fp8(y2 / s_max)`` of the shape of `g`, the 0-d
    bf16 maximum of the group scales, FP8 ``[N, M]``.
    """
    fmt = fp8_type(fp8type)
    _check_operands(x1, s_x1, x2, s_x2, QB)
    check_gradient(g, x1, "x1", stochastic, output_quantized_transpose, generator)
    rows1, rows2, scales1, scales2, gradient = (as_rows(tensor) for tensor in (x1, x2, s_x1, s_x2, g))
    y1 = torch.empty(rows1.shape, dtype=torch.bfloat16, device=x1.device)
    y2 = torch.empty_like(y1)
    s_y2 = torch.empty(scales1.shape, dtype=torch.bfloat16, device=x1.device)
    for rows in row_chunks(rows1):
        g_MGQ = gradient[rows].to(torch.float32).unflatten(-1, (-1, QB))
        y1[rows] = dequantize_rows(rows2[rows], scales2[rows]).mul_(g_MGQ).flatten(1).to(torch.bfloat16)
        towards_x2 = dequantize_rows(rows1[rows], scales1[rows]).mul_(g_MGQ)
        y2[rows] = towards_x2.flatten(1).to(torch.bfloat16)
        s_y2[rows] = scale_of_groups(towards_x2, fmt).to(torch.bfloat16)
    y1 = y1.view(g.shape)
    if not output_quantized_transpose:
        return y1, (y2.view(g.shape), s_y2.view(s_x1.shape))
    scale = s_y2.max()
    codes, transposed = quantize_with_scale(y2, scale, fmt, stochastic=stochastic, generator=generator)
    return y1, (codes.view(g.shape), scale, transposed)


def _check_operands(x1: Tensor, s_x1: Tensor, x2: Tensor, s_x2: Tensor, QB: int) -> None:
    check_grouped(x1, s_x1, QB, "x1")
    check_grouped(x2, s_x2, QB, "x2")
    check_equal_shape(x2, tuple(x1.shape), "x2", "the shape of x1")
    check_same_device({"x1": x1, "x2": x2})
