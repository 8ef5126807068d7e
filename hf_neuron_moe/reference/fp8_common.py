"""What COAT's FP8 elementwise operators share: argument checks, FP8 names, work in row chunks, the per-tensor stage.

Legend: M rows, N columns, QB group size, G = N / QB groups of a row. Operands are 2-D ``[M, N]`` or batched 3-D
``[b, s, N]`` with M = b * s.

Source: NVlabs/COAT, ``coat/activation/real_quantization`` (ICLR 2025 paper "COAT: Compressing Optimizer States and
Activation for Memory-Efficient FP8 Training").
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import FLOATS, check_dtype, check_equal_shape, check_flags, check_same_device
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, nearest
from hf_neuron_moe.formats.constants import E4M3FN, E5M2, ElementFormat
from hf_neuron_moe.formats.fp8_rounding import check_randomness, round_to_fp8_
from hf_neuron_moe.formats.group_fp8 import FP8_DTYPES, dequantize_groups, row_chunks

SCALE_DTYPES = (torch.bfloat16, torch.float32)
"""Not fp16: a scale is ``amax / 448`` or ``amax / 57344`` and smaller than fp16's smallest number for common values."""

_FP8_NAMES = {"E4M3": E4M3FN, "E5M2": E5M2}


def fp8_type(fp8type: str | torch.dtype) -> ElementFormat:
    """Resolve ``"E4M3"``, ``"E5M2"`` (either case), torch.float8_e4m3fn or torch.float8_e5m2."""
    if isinstance(fp8type, torch.dtype) and fp8type in FP8_DTYPES:
        return FP8_DTYPES[fp8type]
    if isinstance(fp8type, str) and fp8type.upper() in _FP8_NAMES:
        return _FP8_NAMES[fp8type.upper()]
    hint = nearest(fp8type.upper(), list(_FP8_NAMES)) if isinstance(fp8type, str) else ""
    expected = '"E4M3", "E5M2", torch.float8_e4m3fn or torch.float8_e5m2'
    fix = f"COAT uses E4M3 for activations and E5M2 for gradients.{hint}"
    raise ConfigError.about("fp8type", expected, repr(fp8type), fix)


def check_group_size(QB: int, columns: int) -> None:
    """Raise ConfigError for a group size that is not a positive integer, ShapeError for one that does not divide N."""
    if isinstance(QB, bool) or not isinstance(QB, int) or QB <= 0:
        raise ConfigError.about("QB", "a positive number of elements per group", repr(QB), "COAT uses groups of 16.")
    if columns <= 0 or columns % QB:
        fix = "Zero-pad the last axis, or choose a group size that divides it."
        got = f"QB {QB} for N {columns}"
        raise ShapeError.about("QB", "a divisor of N, the last axis (groups are 1 x QB)", got, fix)


def check_matrix(tensor: Tensor, dtypes: tuple[torch.dtype, ...], argument: str) -> None:
    """Raise DTypeError or ShapeError for anything but a non-empty 2-D or 3-D tensor of one of `dtypes`."""
    check_dtype(tensor, dtypes, argument)
    if tensor.ndim not in (2, 3) or 0 in tensor.shape:
        expected, fix = "a non-empty [M, N] or [batch, sequence, N]", "Flatten the leading axes into one."
        raise ShapeError.about(argument, expected, str(list(tensor.shape)), fix)


def check_grouped(x: Tensor, s_x: Tensor, QB: int, name: str = "x") -> None:
    """Check FP8 codes, called `name`, and their group scales ``[..., N/QB]``, of the same rank and on their device."""
    check_matrix(x, tuple(FP8_DTYPES), name)
    check_scale_dtype(s_x, f"s_{name}")
    check_group_size(QB, x.shape[-1])
    check_equal_shape(s_x, (*x.shape[:-1], x.shape[-1] // QB), f"s_{name}", f"scales of {name}")
    check_same_device({name: x, f"s_{name}": s_x})


def check_scale_dtype(scales: Tensor, argument: str) -> None:
    """Raise DTypeError for scales that are not bf16 or fp32, with the reason for fp16 ones."""
    if isinstance(scales, Tensor) and scales.dtype == torch.float16:
        expected = "bf16 or fp32 (the scale 1e-10/448 of a zero group, and that of a small one, is 0 in fp16)"
        raise DTypeError.about(argument, expected, str(scales.dtype), "Convert it with .to(torch.float32).")
    check_dtype(scales, SCALE_DTYPES, argument)


def check_gradient(
    g: Tensor, x: Tensor, name: str, stochastic: bool, quantized: bool, generator: torch.Generator | None
) -> None:
    """Check the gradient of a result of `x`, called `name`, and how what comes of it is rounded to FP8, if at all."""
    check_matrix(g, FLOATS, "g")
    check_equal_shape(g, tuple(x.shape), "g", f"the shape of {name}")
    check_same_device({name: x, "g": g})
    check_randomness(stochastic, generator, g.device, argument="g")
    check_flags({"output_quantized_transpose": quantized})
    if stochastic and not quantized:
        rule = "False unless output_quantized_transpose is True (the unquantized result is never rounded to FP8)"
        fix = "Pass output_quantized_transpose=True, or round afterwards with fp8_division_transpose."
        raise ConfigError.about("stochastic", rule, "True", fix)


def as_rows(tensor: Tensor) -> Tensor:
    """Detach a 2-D or 3-D tensor and view it as ``[M, N]``."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def dequantize_rows(codes_MN: Tensor, scales_MG: Tensor) -> Tensor:
    """Return ``code * scale`` of some rows as fp32 ``[M, G, QB]``; exact for bf16 scales."""
    return dequantize_groups(codes_MN.view(torch.uint8), scales_MG, FP8_DTYPES[codes_MN.dtype])


def quantize_with_scale(
    y_MN: Tensor,
    scale: Tensor,
    fmt: ElementFormat,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
    only_transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Divide by one scale and round to FP8: codes ``[M, N]`` (without rows if `only_transposed`), their transpose."""
    M, N = y_MN.shape
    divisor = scale.to(torch.float32)
    codes_MN = torch.empty(0 if only_transposed else M, N, dtype=fmt.dtype, device=y_MN.device)
    codes_NM = torch.empty(N, M, dtype=fmt.dtype, device=y_MN.device)
    for rows in row_chunks(y_MN):
        scaled = y_MN[rows].to(torch.float32, copy=True).div_(divisor)
        codes = round_to_fp8_(scaled, fmt, stochastic=stochastic, generator=generator)
        if not only_transposed:
            codes_MN[rows] = codes
        # Bytes move several times faster than elements of an FP8 dtype.
        codes_NM.view(torch.uint8)[:, rows] = codes.view(torch.uint8).t()
    return codes_MN, codes_NM
