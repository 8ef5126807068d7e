"""What COAT's FP8 elementwise operators share: argument checks, FP8 names, work in row chunks, the per-tensor stage.

Legend: M rows, N columns, QB group size, G = N / QB groups of a row. Operands are 2-D ``[M, N]`` or batched 3-D
``[b, s, N]`` with M = b * s.

Source: NVlabs/COAT, ``coat/activation/real_quantization`` (ICLR 2025 paper "COAT: Compressing Optimizer States and
Activation for Memory-Efficient FP8 Training").
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_flags
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, nearest
from hf_neuron_moe.formats.constants import E4M3FN, E5M2, ElementFormat
from hf_neuron_moe.formats.fp8_rounding import check_randomness, round_to_fp8_
from hf_neuron_moe.formats.group_fp8 import FP8_DTYPES, dequantize_groups, row_chunks

SCALE_DTYPES = (torch.bfloat16, torch.float32)
"""Not fp16: a scale is ``amax / 448`` or ``amax / 57344`` and smaller than fp16's smallest number for common values."""

VALUE_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

_FP8_NAMES = {"E4M3": E4M3FN, "E5M2": E5M2}


def fp8_type(fp8type: str | torch.dtype) -> ElementFormat:
    """Resolve ``"E4M3"``, ``"E5M2"`` (either case), torch.float8_e4m3fn or torch.float8_e5m2.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(fp8type, torch.dtype) and fp8type in FP8_DTYPES:
        return FP8_DTYPES[fp8type]
    if isinstance(fp8type, str) and fp8type.upper() in _FP8_NAMES:
        return _FP8_NAMES[fp8type.upper()]
    hint = nearest(fp8type.upper(), list(_FP8_NAMES)) if isinstance(fp8type, str) else ""
    raise ConfigError.about(
        "fp8type",
        '"E4M3", "E5M2", torch.float8_e4m3fn or torch.float8_e5m2',
        repr(fp8type),
        f"COAT uses E4M3 for activations and E5M2 for gradients.{hint}",
    )


def check_group_size(QB: int, columns: int) -> None:
    """Refuse a group size that is not a positive integer (ConfigError) or does not divide N (ShapeError)."""
    if isinstance(QB, bool) or not isinstance(QB, int) or QB <= 0:
        raise ConfigError.about("QB", "a positive number of elements per group", repr(QB), "COAT uses groups of 16.")
    if columns <= 0 or columns % QB:
        raise ShapeError.about(
            "QB",
            "a divisor of N, the last axis (groups are 1 x QB)",
            f"QB {QB} for N {columns}",
            "Zero-pad the last axis, or choose a group size that divides it.",
        )


def check_matrix(tensor: Tensor, dtypes: tuple[torch.dtype, ...], *, argument: str) -> None:
    """Refuse anything but a non-empty 2-D or 3-D tensor of one of `dtypes` (DTypeError, ShapeError)."""
    check_dtype(tensor, dtypes, argument=argument)
    if tensor.ndim not in (2, 3) or 0 in tensor.shape:
        raise ShapeError.about(
            argument,
            "a non-empty [M, N] or [batch, sequence, N]",
            str(list(tensor.shape)),
            "Flatten the leading axes into one.",
        )


def check_grouped(x: Tensor, s_x: Tensor, QB: int, *, names: tuple[str, str] = ("x", "s_x")) -> None:
    """Check an FP8 operand and its group scales.

    Raises:
        DTypeError: codes that are not FP8, scales that are not bf16 or fp32.
        ShapeError: codes that are not 2-D or 3-D; scales that are not ``[..., N/QB]`` of the same rank.
        ConfigError: a group size that is not a positive integer.
    """
    check_matrix(x, tuple(FP8_DTYPES), argument=names[0])
    check_scale_dtype(s_x, argument=names[1])
    check_group_size(QB, x.shape[-1])
    check_like(s_x, (*x.shape[:-1], x.shape[-1] // QB), argument=names[1], of=f"scales of {names[0]}")


def check_scale_dtype(scales: Tensor, *, argument: str) -> None:
    """Refuse scales that are not bf16 or fp32 (DTypeError), fp16 ones with the reason."""
    if isinstance(scales, Tensor) and scales.dtype == torch.float16:
        raise DTypeError.about(
            argument,
            "bf16 or fp32 (the scale 1e-10/448 of a zero group, and that of a small one, is 0 in fp16)",
            str(scales.dtype),
            "Convert it with .to(torch.float32).",
        )
    check_dtype(scales, SCALE_DTYPES, argument=argument)


def check_like(tensor: Tensor, shape: tuple[int, ...], *, argument: str, of: str) -> None:
    """Refuse a tensor whose shape is not `shape` (ShapeError); `of` says what the shape follows from."""
    if tuple(tensor.shape) != shape:
        raise ShapeError.about(
            argument,
            f"of shape {list(shape)} ({of})",
            str(list(tensor.shape)),
            "Pass tensors that belong together, all 2-D or all 3-D.",
        )


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
) -> tuple[Tensor | None, Tensor]:
    """Divide by one scale and round to FP8: codes ``[M, N]`` (None if `only_transposed`) and their transpose."""
    M, N = y_MN.shape
    divisor = scale.to(torch.float32)
    codes_MN = None if only_transposed else torch.empty(M, N, dtype=fmt.dtype, device=y_MN.device)
    codes_NM = torch.empty(N, M, dtype=fmt.dtype, device=y_MN.device)
    for rows in row_chunks(y_MN):
        scaled = y_MN[rows].to(torch.float32, copy=True).div_(divisor)
        codes = round_to_fp8_(scaled, fmt, stochastic=stochastic, generator=generator)
        if codes_MN is not None:
            codes_MN[rows] = codes
        # Bytes move several times faster than elements of an FP8 dtype.
        codes_NM.view(torch.uint8)[:, rows] = codes.view(torch.uint8).t()
    return codes_MN, codes_NM


def check_rounding(stochastic: bool, quantized: bool, generator: torch.Generator | None, device: torch.device) -> None:
    """Refuse stochastic rounding where nothing is rounded to FP8, and options of another type (ConfigError)."""
    check_randomness(stochastic, generator, device, argument="g")
    check_flags({"output_quantized_transpose": quantized})
    if stochastic and not quantized:
        raise ConfigError.about(
            "stochastic",
            "False unless output_quantized_transpose is True (the unquantized result is never rounded to FP8)",
            "True",
            "Pass output_quantized_transpose=True, or round afterwards with fp8_division_transpose.",
        )
