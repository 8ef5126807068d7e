"""COAT's FP8 elementwise operators: SiLU and the product of a SwiGLU block, and the per-tensor quantization.

``silu(gate)`` and ``up`` are stored in FP8 with one scale ``(max|v| + 1e-10) / fp8_max`` per 1 x QB group. The largest
of them serves a whole tensor, which saves a pass (COAT's "group scaling"). All is fp32 and rounded once per output.

Legend: M rows, N columns, QB group size, G = N / QB groups of a row. Operands are 2-D ``[M, N]`` or batched 3-D
``[b, s, N]`` with M = b * s. QB divides N (upstream's tiles want a divisor of 16). Codes are FP8, scales bf16 or fp32.

Source: NVlabs/COAT, ``coat/activation/real_quantization`` (ICLR 2025 paper "COAT: Compressing Optimizer States and
Activation for Memory-Efficient FP8 Training"). Upstream's exponential is the GPU's and may differ from torch's in its
last bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.checks import CONVERT, FLOATS, VIEW, check_dtype, check_equal_shape, check_flags, check_same_device
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, nearest, public
from hf_neuron_moe.formats.constants import ElementFormat
from hf_neuron_moe.formats.elements import check_randomness, round_to_fp8_
from hf_neuron_moe.formats.group_fp8 import (
    FP8_DTYPES,
    FP8_FORMATS,
    SCALE_EPSILON,
    check_group_size,
    dequantize_groups,
    row_chunks,
    scale_of_groups,
)

SCALE_DTYPES = (torch.bfloat16, torch.float32)  # scales of common values are smaller than fp16's smallest number


@public
def fp8_silu_forward(x: Tensor, s_x: Tensor, QB: int) -> tuple[Tensor, Tensor]:
    """Apply SiLU to FP8 codes with group scales ``[..., N/QB]`` and group-quantize the result in the same format.

    Returns codes of the shape and dtype of `x`, and scales of those of `s_x`. Values are divided by the fp32 scale, not
    by the returned rounded one (``silu_fwd.py``), by which ``formats.group_quantize_fp8`` divides.
    """
    operand = _grouped(x, s_x, QB)
    out, s_out = torch.empty_like(operand.codes), torch.empty_like(operand.scales)
    for rows in row_chunks(out):
        values = operand.values(rows)
        values = _sigmoid(values).mul_(values)
        scale = scale_of_groups(values, operand.fmt)
        out[rows] = round_to_fp8_(values.div_(scale.unsqueeze(-1)), operand.fmt).flatten(1)
        s_out[rows] = scale.to(s_out.dtype)
    return out.view(x.shape), s_out.view(s_x.shape)


@public
def fp8_silu_backward(
    x: Tensor, s_x: Tensor, g: Tensor,
    QB: int,
    fp8type: str | torch.dtype, stochastic: bool = False, output_quantized_transpose: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Differentiate SiLU at FP8 values: ``y = bf16((s + v*s*(1-s)) * g)`` with ``s = sigmoid(v)``.

    x are codes of the pre-activation (``gate``) with scales ``[..., N/QB]``; g is bf16, fp16 or fp32 of their shape.

    Returns ``(y, s_y)``: bf16 gradient, not divided by the bf16 group scales ``[..., N/QB]``; or ``(q, s_max,
    q_transposed)``: FP8 of the shape of `x`, 0-d bf16 scale, FP8 ``[N, M]``. Source: ``silu_bwd.py``.
    """
    rounding = _Rounding(fp8_type(fp8type), stochastic, generator)
    operand = _grouped(x, s_x, QB)
    gradient_MGQ = _checked_gradient(g, x, "x", QB, rounding, output_quantized_transpose)
    y, s_y = _empty_bf16(operand)
    for rows in row_chunks(y):
        values = operand.values(rows)
        sigmoid = _sigmoid(values)
        # The order of upstream's operations; each is one fp32 rounding.
        slope = values.mul_(sigmoid).mul_(1 - sigmoid).add_(sigmoid)
        values = slope.mul_(gradient_MGQ[rows].to(torch.float32))
        y[rows] = values.flatten(1).to(torch.bfloat16)
        s_y[rows] = scale_of_groups(values, rounding.fmt).to(torch.bfloat16)
    if output_quantized_transpose:
        return rounding.per_tensor(y, s_y, x.shape)
    return y.view(x.shape), s_y.view(s_x.shape)


@public
def fp8_mul_forward(
    x1: Tensor, s_x1: Tensor, x2: Tensor, s_x2: Tensor, QB: int, transpose_output_2d: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply FP8 codes of one dtype, scales ``[..., N/QB]``, and quantize the product with one scale per tensor.

    The product is rounded to bf16 before it is divided by the scale, as upstream does (``mul_fwd.py``).
    transpose_output_2d must be True for 3-D input, where upstream's False gives a 3-D tensor without meaning.

    Returns ``(codes, scale, codes_transposed)``: FP8 of the shape and dtype of `x1`, the 0-d scale in the dtype of
    `s_x1`, and FP8 ``[N, M]``.
    """
    check_flags({"transpose_output_2d": transpose_output_2d})
    one, two = _factors(x1, s_x1, x2, s_x2, QB)
    if x1.dtype != x2.dtype:
        expected = f"of dtype {x1.dtype} like x1 (one of them sets the range, the other the result's dtype)"
        raise DTypeError.about("x2", expected, str(x2.dtype), "Quantize both operands to the same FP8 format.")
    if x1.ndim == 3 and not transpose_output_2d:
        expected = "True for 3-D input (the transpose of [b, s, N] is the 2-D [N, b*s])"
        fix = "Pass transpose_output_2d=True, or flatten the input to 2-D."
        raise ConfigError.about("transpose_output_2d", expected, "False", fix)
    product = torch.empty(one.codes.shape, dtype=torch.bfloat16, device=x1.device)
    scales = torch.empty_like(one.scales)
    for rows in row_chunks(product):
        values = one.values(rows).mul_(two.values(rows))
        product[rows] = values.flatten(1).to(torch.bfloat16)
        scales[rows] = scale_of_groups(values, one.fmt).to(scales.dtype)
    return _Rounding(one.fmt).per_tensor(product, scales, x1.shape)


@public
def fp8_mul_backward(
    x1: Tensor, s_x1: Tensor, x2: Tensor, s_x2: Tensor, g: Tensor,
    QB: int,
    fp8type: str | torch.dtype, stochastic: bool = False, output_quantized_transpose: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Differentiate ``x1 * x2``: the gradients towards both factors, the second optionally in FP8.

    ``y1 = bf16(g * v2)`` and ``y2 = bf16(g * v1)`` with ``v = code * scale`` in fp32, of FP8 codes x1 (``silu(gate)``)
    and x2 (``up``) with scales ``[..., N/QB]``; g is bf16, fp16 or fp32 of their shape.

    Returns ``(y1, (y2, s_y2))``: bf16 gradients, not divided by the bf16 group scales ``[..., N/QB]``; or ``(y1, (q,
    s_max, q_transposed))`` as :func:`fp8_silu_backward` returns them. Source: ``mul_bwd.py``.
    """
    rounding = _Rounding(fp8_type(fp8type), stochastic, generator)
    one, two = _factors(x1, s_x1, x2, s_x2, QB)
    gradient_MGQ = _checked_gradient(g, x1, "x1", QB, rounding, output_quantized_transpose)
    y2, s_y2 = _empty_bf16(one)
    y1 = torch.empty_like(y2)
    for rows in row_chunks(y1):
        g_MGQ = gradient_MGQ[rows].to(torch.float32)
        y1[rows] = two.values(rows).mul_(g_MGQ).flatten(1).to(torch.bfloat16)
        towards_x2 = one.values(rows).mul_(g_MGQ)
        y2[rows] = towards_x2.flatten(1).to(torch.bfloat16)
        s_y2[rows] = scale_of_groups(towards_x2, rounding.fmt).to(torch.bfloat16)
    y1 = y1.view(g.shape)
    if output_quantized_transpose:
        return y1, rounding.per_tensor(y2, s_y2, g.shape)
    return y1, (y2.view(g.shape), s_y2.view(s_x1.shape))


@public
def fp8_division_transpose(
    x: Tensor,
    QB: int,
    fp8type: str | torch.dtype,
    s_y: Tensor | None = None,
    stochastic: bool = False, only_transposed: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize a whole tensor with one scale and return the codes both ways round.

    ``code = fp8(x / s_y)`` with the division in fp32. Magnitudes beyond the format's range saturate.

    x is bf16, fp16 or fp32 ``[M, N]`` or ``[b, s, N]``. Without s_y the scale is ``(max|x| + 1e-10) / fp8_max``, in the
    dtype of x, or fp32 for fp16, which would round it to 0. QB, the group size of what produced x, changes no value.

    Returns ``(codes, s_y, codes_transposed)``: FP8 of the shape of `x`, the 0-d scale, FP8 ``[N, M]`` (2-D for 3-D
    input too); or ``(codes_transposed, s_y)`` if `only_transposed`. Source: ``_division_transpose.py``.
    """
    rounding = _Rounding(fp8_type(fp8type), stochastic, generator)
    _check_matrix(x, FLOATS, "x")
    _check_group_size(QB, x.shape[-1])
    check_randomness(stochastic, generator, x.device)
    check_flags({"only_transposed": only_transposed})
    rows_MN = _as_rows(x)
    if s_y is None:
        low, high = torch.aminmax(rows_MN)  # no temporary of the tensor's size
        largest = torch.maximum(low.neg(), high)
        largest = largest.float() if x.dtype == torch.float16 else largest
        scale = largest.add(SCALE_EPSILON).div(rounding.fmt.max)
    else:
        scale = _checked_scale(s_y)
    codes, transposed = rounding.quantize(rows_MN, scale, only_transposed)
    return (transposed, scale) if only_transposed else (codes.view(x.shape), scale, transposed)


class _Grouped(NamedTuple):
    """FP8 codes ``[M, N]`` with one scale per group ``[M, G]``."""

    codes: Tensor
    scales: Tensor
    fmt: ElementFormat

    def values(self, rows: slice) -> Tensor:
        """Return ``code * scale`` of some rows as fp32 ``[M, G, QB]``; exact for bf16 scales."""
        return dequantize_groups(self.codes[rows].view(torch.uint8), self.scales[rows], self.fmt)


class _Rounding(NamedTuple):
    """How values become FP8."""

    fmt: ElementFormat
    stochastic: bool = False
    generator: torch.Generator | None = None

    def per_tensor(self, y_MN: Tensor, scales_MG: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize with the largest group scale: codes of `shape`, the 0-d scale, codes ``[N, M]``."""
        scale = scales_MG.max()
        codes, transposed = self.quantize(y_MN, scale)
        return codes.view(shape), scale, transposed

    def quantize(self, y_MN: Tensor, scale: Tensor, only_transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Divide by one scale and round: codes ``[M, N]`` (without rows if `only_transposed`), their transpose."""
        M, N = y_MN.shape
        divisor = scale.to(torch.float32)
        codes_MN = torch.empty(0 if only_transposed else M, N, dtype=self.fmt.dtype, device=y_MN.device)
        codes_NM = torch.empty(N, M, dtype=self.fmt.dtype, device=y_MN.device)
        for rows in row_chunks(y_MN):
            scaled = y_MN[rows].to(torch.float32, copy=True).div_(divisor)
            codes = round_to_fp8_(scaled, self.fmt, stochastic=self.stochastic, generator=self.generator)
            if not only_transposed:
                codes_MN[rows] = codes
            # Bytes move several times faster than elements of an FP8 dtype.
            codes_NM.view(torch.uint8)[:, rows] = codes.view(torch.uint8).t()
        return codes_MN, codes_NM


def fp8_type(fp8type: str | torch.dtype) -> ElementFormat:
    """Resolve ``"E4M3"``, ``"E5M2"`` (either case), torch.float8_e4m3fn or torch.float8_e5m2."""
    name = fp8type.lower() if isinstance(fp8type, str) else ""
    found = FP8_DTYPES.get(fp8type) if isinstance(fp8type, torch.dtype) else FP8_FORMATS.get(name)
    if found is None:
        hint = nearest(name.upper(), [known.upper() for known in FP8_FORMATS])
        expected = '"E4M3", "E5M2", torch.float8_e4m3fn or torch.float8_e5m2'
        fix = f"COAT uses E4M3 for activations and E5M2 for gradients.{hint}"
        raise ConfigError.about("fp8type", expected, repr(fp8type), fix)
    return found


def _factors(x1: Tensor, s_x1: Tensor, x2: Tensor, s_x2: Tensor, QB: int) -> tuple[_Grouped, _Grouped]:
    """Check both operands of a product and return them as rows."""
    one, two = _grouped(x1, s_x1, QB, "x1"), _grouped(x2, s_x2, QB, "x2")
    check_equal_shape(x2, tuple(x1.shape), "x2", "the shape of x1")
    check_same_device({"x1": x1, "x2": x2})
    return one, two


def _grouped(x: Tensor, s_x: Tensor, QB: int, name: str = "x") -> _Grouped:
    """Check FP8 codes, called `name`, and their group scales ``[..., N/QB]``; return both as rows."""
    _check_matrix(x, tuple(FP8_DTYPES), name, VIEW)
    _check_scale_dtype(s_x, f"s_{name}")
    _check_group_size(QB, x.shape[-1])
    check_equal_shape(s_x, (*x.shape[:-1], x.shape[-1] // QB), f"s_{name}", f"scales of {name}")
    check_same_device({name: x, f"s_{name}": s_x})
    return _Grouped(_as_rows(x), _as_rows(s_x), FP8_DTYPES[x.dtype])


def _check_matrix(tensor: Tensor, dtypes: tuple[torch.dtype, ...], argument: str, fix: str = CONVERT) -> None:
    check_dtype(tensor, dtypes, argument, fix)
    if tensor.ndim not in (2, 3) or 0 in tensor.shape:
        expected, fix = "a non-empty [M, N] or [batch, sequence, N]", "Flatten the leading axes into one."
        raise ShapeError.about(argument, expected, str(list(tensor.shape)), fix)


def _check_group_size(QB: int, columns: int) -> None:
    check_group_size(QB, "QB")
    if columns % QB:
        expected = "a divisor of N, the last axis (groups are 1 x QB)"
        fix = "Zero-pad the last axis, or choose a group size that divides it."
        raise ShapeError.about("QB", expected, f"QB {QB} for N {columns}", fix)


def _check_scale_dtype(scales: Tensor, argument: str) -> None:
    if isinstance(scales, Tensor) and scales.dtype == torch.float16:
        expected = "bf16 or fp32 (the scale 1e-10/448 of a zero group, and that of a small one, is 0 in fp16)"
        raise DTypeError.about(argument, expected, str(scales.dtype), "Convert it with .to(torch.float32).")
    check_dtype(scales, SCALE_DTYPES, argument)


def _checked_scale(s_y: Tensor) -> Tensor:
    """Return the caller's scale of a whole tensor as 0-d."""
    _check_scale_dtype(s_y, "s_y")
    if s_y.numel() != 1:
        got, fix = str(list(s_y.shape)), "Reduce group scales with .max() first."
        raise ShapeError.about("s_y", "one scale for the whole tensor", got, fix)
    scale = s_y.detach().reshape(())
    # Elsewhere, reading the value would wait for everything queued on the device.
    if scale.device.type == "cpu" and not 0 < float(scale) < math.inf:
        fix = "Pass (max|x| + 1e-10) / fp8_max, or None to have it computed."
        raise ConfigError.about("s_y", "positive and finite", str(float(scale)), fix)
    return scale


def _checked_gradient(g: Tensor, x: Tensor, name: str, QB: int, rounding: _Rounding, quantized: bool) -> Tensor:
    """Check the gradient of a result of `x`, called `name`, and how its product is rounded; return it as groups."""
    _check_matrix(g, FLOATS, "g")
    check_equal_shape(g, tuple(x.shape), "g", f"the shape of {name}")
    check_same_device({name: x, "g": g})
    check_randomness(rounding.stochastic, rounding.generator, g.device, argument="g")
    check_flags({"output_quantized_transpose": quantized})
    if rounding.stochastic and not quantized:
        rule = "False unless output_quantized_transpose is True (the unquantized result is never rounded to FP8)"
        fix = "Pass output_quantized_transpose=True, or round afterwards with fp8_division_transpose."
        raise ConfigError.about("stochastic", rule, "True", fix)
    return _as_rows(g).unflatten(-1, (-1, QB))


def _as_rows(tensor: Tensor) -> Tensor:
    """Detach a 2-D or 3-D tensor and view it as ``[M, N]``."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _empty_bf16(like: _Grouped) -> tuple[Tensor, Tensor]:
    """Return room for a gradient ``[M, N]`` and its group scales ``[M, G]``."""
    values, scales = (torch.empty(each.shape, dtype=torch.bfloat16, device=each.device) for each in like[:2])
    return values, scales


def _sigmoid(values: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-v))`` spelt out: torch.sigmoid rounds differently."""
    return values.neg().exp_().add_(1.0).reciprocal_()
