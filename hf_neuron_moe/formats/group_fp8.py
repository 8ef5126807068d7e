"""Per-group FP8: groups of consecutive elements of a row share one bf16 scale that is not a power of two.

The storage format of saved activations in COAT ("Compressing Optimizer States and Activation for Memory-Efficient FP8
Training", ICLR 2025): ``value = code * scale``, groups of 16 by default. The scale is rounded to bf16 *before* the
division, so that code * scale is the nearest value the pair can express. Rounding is to nearest, ties to even, and
saturates. A group with NaN or Inf has a NaN or infinite scale and dequantizes to NaN throughout.

Letters: M rows, N columns, G = N/group_size groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_neuron_moe.checks import VIEW, check_dtype, check_equal_shape, check_float, check_multiple, check_same_device
from hf_neuron_moe.errors import ConfigError, not_one_of, public
from hf_neuron_moe.formats.constants import E4M3FN, E5M2, ElementFormat
from hf_neuron_moe.formats.elements import check_randomness, decode, round_to_fp8_

SCALE_EPSILON = 1e-10
"""Added to a group's largest magnitude so that an all-zero group has a usable scale (COAT: SCALE_MIN_THRES)."""
DEFAULT_GROUP_SIZE = 16  # COAT's group size for activations

FP8_FORMATS = {"e4m3": E4M3FN, "e5m2": E5M2}
FP8_DTYPES = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}

CPU_CHUNK = 1 << 17  # elements worked on at a time on CPUs
DEVICE_CHUNK = 1 << 25  # elements worked on at a time elsewhere


def fp8_format(fp8: str) -> ElementFormat:
    """Return the format of ``"e4m3"`` or ``"e5m2"``, in either case (COAT writes E4M3)."""
    if isinstance(fp8, str) and fp8.lower() in FP8_FORMATS:
        return FP8_FORMATS[fp8.lower()]
    raise not_one_of("fp8", fp8, FP8_FORMATS)


def row_chunks(rows_MN: Tensor) -> Iterator[slice]:
    """Yield slices of the rows whose fp32 copies fit into a core's cache (CPUs), or a few hundred MiB."""
    rows, columns = rows_MN.shape
    chunk = CPU_CHUNK if rows_MN.device.type == "cpu" else DEVICE_CHUNK
    step = max(1, chunk // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def scale_of_groups(values_MGQ: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the fp32 scale ``(max|v| + 1e-10) / fp8_max`` of every group of fp32 values ``[M, G, Q]``: ``[M, G]``."""
    # A tensor divisor: CUDA multiplies by the reciprocal of a plain number, and 1/448 is not exact.
    fp8_max = torch.full((), fmt.max, device=values_MGQ.device)
    return values_MGQ.abs().amax(dim=-1).add_(SCALE_EPSILON).div_(fp8_max)


@public
def group_scales(x_MN: Tensor, group_size: int = DEFAULT_GROUP_SIZE, fp8: str = "e4m3") -> Tensor:
    """Return every group's scale ``bf16((max|x| + 1e-10) / fp8_max)``, computed in fp32: ``[..., N/group_size]``.

    `x_MN` is ``[..., N]`` bf16, fp16 or fp32; fp8_max is 448 for ``"e4m3"``, 57344 for ``"e5m2"``.
    """
    fmt = fp8_format(fp8)
    rows_MN = _rows(x_MN, group_size)
    scales_MG = torch.empty(rows_MN.shape[0], rows_MN.shape[1] // group_size, dtype=torch.bfloat16, device=x_MN.device)
    for rows in row_chunks(rows_MN):
        scales_MG[rows] = scale_of_groups(rows_MN[rows].to(torch.float32).unflatten(-1, (-1, group_size)), fmt)
    return scales_MG.view(*x_MN.shape[:-1], scales_MG.shape[1])


@public
def group_quantize_fp8(
    x_MN: Tensor,
    group_size: int = DEFAULT_GROUP_SIZE,
    fp8: str = "e4m3",
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``[..., N]`` bf16, fp16 or fp32 to FP8 with one bf16 scale per `group_size` elements of a row.

    Rounds to nearest, or stochastically and unbiased with random numbers of `generator`. No gradient flows. Returns
    codes as float8_e4m3fn (``"e4m3"``) or float8_e5m2 (``"e5m2"``) ``[..., N]``, and scales ``[..., N/group_size]``.
    """
    fmt = fp8_format(fp8)
    rows_MN = _rows(x_MN, group_size)
    check_randomness(stochastic, generator, x_MN.device)
    M, N = rows_MN.shape
    codes_MN = torch.empty(M, N, dtype=fmt.dtype, device=x_MN.device)
    scales_MG = torch.empty(M, N // group_size, dtype=torch.bfloat16, device=x_MN.device)
    for rows in row_chunks(rows_MN):
        values = rows_MN[rows].to(torch.float32, copy=True).unflatten(-1, (-1, group_size))
        scales_MG[rows] = scale_of_groups(values, fmt)
        scaled = values.div_(scales_MG[rows].to(torch.float32).unsqueeze(-1))
        codes_MN[rows] = round_to_fp8_(scaled, fmt, stochastic=stochastic, generator=generator).flatten(1)
    return codes_MN.view(x_MN.shape), scales_MG.view(*x_MN.shape[:-1], N // group_size)


@public
def group_dequantize_fp8(codes_MN: Tensor, scales_MG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``code * scale`` as ``[..., N]``, computed in fp32 (exact for bf16 scales) and rounded once to `dtype`.

    Codes are float8_e4m3fn or float8_e5m2 ``[..., N]``, scales bf16 or fp32 ``[..., G]``, G a divisor of N.
    """
    check_dtype(codes_MN, tuple(FP8_DTYPES), "codes", VIEW)
    check_dtype(scales_MG, (torch.bfloat16, torch.float32), "scales")
    groups, remedy = scales_MG.shape[-1] if scales_MG.ndim else 0, "The scales' last axis has one entry per group."
    check_multiple(groups, 1, "scales.shape[-1]", remedy=remedy)
    check_multiple(codes_MN.shape[-1] if codes_MN.ndim else 0, groups, "codes.shape[-1]", remedy=remedy)
    check_equal_shape(scales_MG, (*codes_MN.shape[:-1], groups), "scales", "one row of scales per row of codes")
    check_same_device({"codes": codes_MN, "scales": scales_MG})
    if codes_MN.numel() == 0:
        return torch.empty(codes_MN.shape, dtype=dtype, device=codes_MN.device)
    codes = codes_MN.detach().view(torch.uint8).reshape(-1, codes_MN.shape[-1])
    scales = scales_MG.detach().reshape(-1, groups)
    values_MN = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for rows in row_chunks(codes):
        values_MN[rows] = dequantize_groups(codes[rows], scales[rows], FP8_DTYPES[codes_MN.dtype]).flatten(1)
    return values_MN.view(codes_MN.shape)


def dequantize_groups(codes_MN: Tensor, scales_MG: Tensor, fmt: ElementFormat) -> Tensor:
    """Return ``code * scale`` of uint8 codes as fp32 ``[M, G, Q]``, all at once."""
    values = decode(codes_MN, fmt).unflatten(-1, (scales_MG.shape[-1], -1))
    return values.mul_(scales_MG.to(torch.float32).unsqueeze(-1))


def _rows(x_MN: Tensor, group_size: int) -> Tensor:
    """View ``[..., N]`` as ``[M, N]``, checked and detached."""
    check_float(x_MN, "x")
    check_group_size(group_size, "group_size")
    columns = x_MN.shape[-1] if x_MN.ndim else 0
    remedy = "Pad the last axis, or choose a group size that divides it."
    check_multiple(columns, group_size, "x.shape[-1]", remedy=remedy)
    return x_MN.detach().reshape(-1, columns)


def check_group_size(size: int, argument: str) -> None:
    """Raise ConfigError for what is not a positive int."""
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ConfigError.about(argument, "a positive number of elements", repr(size), "COAT uses 16.")
