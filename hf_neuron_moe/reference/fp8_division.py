"""COAT's second stage: one scale per tensor, the FP8 codes and their transpose.

Legend: M rows, N columns, QB group size.

Source: NVlabs/COAT ``coat/activation/real_quantization/_division_transpose.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_neuron_moe.checks import FLOATS, check_flags
from hf_neuron_moe.errors import ConfigError, ShapeError, public
from hf_neuron_moe.formats.fp8_rounding import check_randomness
from hf_neuron_moe.formats.group_fp8 import SCALE_EPSILON
from hf_neuron_moe.reference.fp8_common import (
    as_rows,
    check_group_size,
    check_matrix,
    check_scale_dtype,
    fp8_type,
    quantize_with_scale,
)


@public
def fp8_division_transpose(
    x: Tensor,
    QB: int,
    fp8type: str | torch.dtype,
    s_y: Tensor | None = None,
    stochastic: bool = False,
    only_transposed: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor]:
    """Quantise a whole tensor with one scale and return the codes both ways round.

    ``code = fp8(x / s_y)`` with the division in fp32. Magnitudes beyond the format's range saturate.

    * x: bf16, fp16 or fp32 ``[M, N]`` or ``[b, s, N]``.
    * QB: group size of the operator that produced `x`; it must divide N and has no effect on values.
    * fp8type: ``"E4M3"``, ``"E5M2"``, or the torch dtype.
    * s_y: scale of one element, bf16 or fp32, positive and finite (checked where it is in host memory);
      ``(max|x| + 1e-10) / fp8_max`` if None, in the dtype of `x`, or fp32 for fp16, which would round it to 0.
    * stochastic: unbiased stochastic rounding instead of nearest, with random numbers of `generator`. Upstream's uses
      one fixed seed, always; here every call draws new random numbers.

    Returns ``(codes, s_y, codes_transposed)``: FP8 of the shape of `x`, the 0-d scale, FP8 ``[N, M]`` (2-D for 3-D
    input too); or ``(codes_transposed, s_y)`` if `only_transposed`.
    """
    fmt = fp8_type(fp8type)
    check_matrix(x, FLOATS, "x")
    check_group_size(QB, x.shape[-1])
    check_randomness(stochastic, generator, x.device)
    check_flags({"only_transposed": only_transposed})
    rows = as_rows(x)
    if s_y is None:
        largest = _amax(rows)
        largest = largest.float() if x.dtype == torch.float16 else largest
        scale = largest.add(SCALE_EPSILON).div(fmt.max)
    else:
        scale = _checked_scale(s_y)
    codes, transposed = quantize_with_scale(
        rows, scale, fmt, stochastic=stochastic, generator=generator, only_transposed=only_transposed
    )
    return (transposed, scale) if only_transposed else (codes.view(x.shape), scale, transposed)


def _amax(rows_MN: Tensor) -> Tensor:
    """Return the largest magnitude without a temporary of the tensor's size."""
    low, high = torch.aminmax(rows_MN)
    return torch.maximum(low.neg(), high)


def _checked_scale(s_y: Tensor) -> Tensor:
    check_scale_dtype(s_y, "s_y")
    if s_y.numel() != 1:
        got, fix = str(list(s_y.shape)), "Reduce group scales with .max() first."
        raise ShapeError.about("s_y", "one scale for the whole tensor", got, fix)
    scale = s_y.detach().reshape(())
    # Elsewhere, reading the value would wait for everything queued on the device.
    if scale.device.type == "cpu" and not 0 < float(scale) < math.inf:
        fix = "Pass (max|x| + 1e-10) / fp8_max, or None to have it computed."
        raise ConfigError.about("s_y", "positive and finite", str(float(scale)), fix)
    return scale
