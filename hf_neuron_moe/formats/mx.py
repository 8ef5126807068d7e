"""MX quantization: blocks of 32 values, one power-of-two scale byte each, 8-bit or 4-bit elements.

Letters: F free axis of the operand, K contraction axis, P = K/4 swizzled rows, B = K/32 blocks along K,
R tiles, J = 4 lanes, s = tile/4. In a tile seen as ``[4, s]``, a block is ``[4, 8]`` (NKI ``quantize_mx``).

On CPUs :mod:`~hf_neuron_moe.formats.mx_operand` quantizes operands; elsewhere codes are swizzled after quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_neuron_moe.checks import (
    VIEW,
    check_axes,
    check_dtype,
    check_equal_shape,
    check_float,
    check_same_device,
    is_whole,
)
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.formats.constants import (
    LANES,
    MX_BLOCK,
    PATCH_ROWS,
    SCALE_DTYPES,
    ElementFormat,
    ScaleRule,
    SwizzleScheme,
    choose,
    element_format,
)
from hf_neuron_moe.formats.e8m0 import multiply_by_scale_
from hf_neuron_moe.formats.elements import check_contraction, codes_as_bytes, decode
from hf_neuron_moe.formats.mx_operand import per_element, quantize_into, quantize_tiles
from hf_neuron_moe.formats.swizzle import block_segments, check_swizzled, swizzle, unswizzle

CPU_CHUNK = 1 << 18  # elements worked on at a time on CPUs: the fp32 copy and its temporaries stay in a core's cache
DEVICE_CHUNK = 1 << 26  # elements worked on at a time elsewhere: bounds the temporaries to a few hundred MiB


@dataclass(frozen=True)
class MXTensor:
    """A quantized matmul operand in the kernels' layout.

    ``codes.view(fmt.dtype)`` is the fp8 tensor and :func:`~hf_neuron_moe.formats.swizzle.pack_x4` gives the x4 words.
    """

    codes: Tensor  # uint8 [K/4, 4F], swizzled; one code per byte
    scales: Tensor  # uint8 [K/32, F], compact: entry [i, f] belongs to codes[8i:8i+8, 4f:4f+4]
    fmt: ElementFormat


@public
def quantize_mx(
    weight_FK: Tensor,
    *,
    fmt: str | ElementFormat = "e4m3fn",
    rule: str | ScaleRule = "neuron",
    scheme: str | SwizzleScheme = "wrapX",
) -> MXTensor:
    """Quantize an operand ``[F, K]`` (bf16, fp16 or fp32, any strides) along K, a multiple of 32, and swizzle it.

    ``scale = 2**(byte - 127)`` with the byte of `rule`, clamped to 0 from below; ``code = RNE(clip(x / scale))``. With
    the default rule zero blocks get byte 0, Inf becomes the largest finite code, NaN stays NaN (NKI ``quantize_mx``;
    :class:`ScaleRule` states every rule's behaviour). `scheme` says which K values share a block. No gradient flows.
    NKI takes bf16 and fp16; fp32 is for tests and offline conversion.
    """
    fmt, rule, scheme = _chosen(fmt, rule, scheme)
    check_float(weight_FK, "weight_FK")
    check_axes(weight_FK, ("F", "K"), "weight_FK")
    check_contraction(weight_FK.shape[1], "weight_FK.shape[1] (K)")
    weight_FK = weight_FK.detach()
    if weight_FK.device.type == "cpu":
        F, K = weight_FK.shape
        codes_P4F = torch.empty(K // LANES, LANES * F, dtype=torch.uint8)
        scales_BF = torch.empty(K // MX_BLOCK, F, dtype=torch.uint8)
        quantize_into(weight_FK, codes_P4F, scales_BF, fmt=fmt, rule=rule, scheme=scheme)
        return MXTensor(codes_P4F, scales_BF, fmt)
    codes_FK, scales_FB = _quantize_natural(weight_FK, fmt, rule, scheme)
    return MXTensor(swizzle(codes_FK, scheme), scales_FB.t().contiguous(), fmt)


@public
def quantize_mx_swizzled(
    swizzled_P4F: Tensor, *, fmt: str | ElementFormat = "e4m3fn", rule: str | ScaleRule = "neuron"
) -> MXTensor:
    """Quantize an operand ``[K/4, 4F]`` swizzled with any scheme, as ``quantize_mx`` does the unswizzled one."""
    check_float(swizzled_P4F, "swizzled_P4F")
    check_swizzled(swizzled_P4F, argument="swizzled_P4F")
    # A block is an 8x4 patch, exactly what the 1x32 scheme makes of 32 consecutive values.
    consecutive = SwizzleScheme.CONSECUTIVE
    return quantize_mx(unswizzle(swizzled_P4F, consecutive), fmt=fmt, rule=rule, scheme=consecutive)


@public
def dequantize_mx(codes_P4F: Tensor, scales_BF: Tensor, *, fmt: str | ElementFormat = "e4m3fn") -> Tensor:
    """Return ``code * 2**(byte - 127)`` as fp32 in the swizzled layout ``[K/4, 4F]``, exact.

    Codes are uint8 ``[K/4, 4F]`` or the fp8 dtype of `fmt`, scales compact ``[K/32, F]`` uint8 or float8_e8m0fnu. Byte
    255 and NaN codes give NaN, a product above fp32's range infinity.
    """
    fmt = element_format(fmt)
    codes_P4F = codes_as_bytes(codes_P4F, fmt)
    P, F = check_swizzled(codes_P4F, argument="codes")
    B = P // PATCH_ROWS
    scales_BF = _scales_as_bytes(scales_BF, codes_P4F, B, F)
    out_P4F = torch.empty(P, LANES * F, dtype=torch.float32, device=codes_P4F.device)
    step = _rows_per_chunk(codes_P4F.device, PATCH_ROWS * LANES * F)
    for b in range(0, B, step):
        byte = scales_BF[b : b + step].repeat_interleave(LANES, dim=1).unsqueeze(1)
        rows = slice(b * PATCH_ROWS, (b + step) * PATCH_ROWS)
        values = decode(codes_P4F[rows], fmt).view(-1, PATCH_ROWS, LANES * F)
        out_P4F[rows].view(values.shape).copy_(multiply_by_scale_(values, byte))
    return out_P4F


@public
def fake_quantize_mx(
    x: Tensor,
    axis: int = -1,
    *,
    fmt: str | ElementFormat = "e4m3fn",
    rule: str | ScaleRule = "neuron",
    scheme: str | SwizzleScheme = "wrapX",
) -> Tensor:
    """Return the values a kernel's matmul sees of `x`, as fp32 in the layout of `x`. Not differentiable.

    `x` is bf16, fp16 or fp32 of any shape; `axis`, a multiple of 32 long, is the matmul's contraction axis.
    """
    fmt, rule, scheme = _chosen(fmt, rule, scheme)
    check_float(x, "x")
    if not is_whole(axis) or not -x.ndim <= axis < x.ndim:
        expected = f"an axis of a tensor of shape {list(x.shape)}"
        raise ShapeError.about("axis", expected, repr(axis), "Pass the contraction axis of the matmul.")
    moved = x.detach().movedim(axis, -1)
    K = moved.shape[-1]
    check_contraction(K, f"x.shape[{axis}]")
    x_FK = moved.reshape(moved.numel() // K, K)
    codes_FK, scales_FB = _quantize_natural(x_FK, fmt, rule, scheme)
    out_FK = torch.empty(x_FK.shape, dtype=torch.float32, device=x.device)
    _for_each_chunk(codes_FK, scales_FB, out_FK, scheme, partial(_dequantize_tiles, fmt=fmt))
    return out_FK.view(moved.shape).movedim(-1, axis)


@public
def dequantize_mx_natural(
    codes_FK: Tensor,
    scales_BF: Tensor,
    *,
    fmt: str | ElementFormat = "e4m3fn",
    scheme: str | SwizzleScheme = "wrapX",
    out_FK: Tensor | None = None,
) -> Tensor:
    """Return ``code * 2**(byte - 127)`` as fp32 ``[F, K]`` of codes in the operand's own layout.

    * codes_FK: ``[F, K]``, uint8 or the fp8 dtype of `fmt`, any strides: ``unswizzle(mx.codes, scheme)``.
    * scales_BF: compact ``[K/32, F]`` uint8 or float8_e8m0fnu, in the order of the blocks of `scheme`.
    * out_FK: fp32 ``[F, K]`` to write into and return, any strides; a new tensor where absent.
    """
    fmt, _, scheme = _chosen(fmt, ScaleRule.NEURON, scheme)
    codes_FK = codes_as_bytes(codes_FK, fmt)
    check_axes(codes_FK, ("F", "K"), "codes")
    F, K = codes_FK.shape
    check_contraction(K, "codes.shape[1] (K)")
    scales_BF = _scales_as_bytes(scales_BF, codes_FK, K // MX_BLOCK, F)
    if out_FK is None:
        out_FK = torch.empty(F, K, dtype=torch.float32, device=codes_FK.device)
    check_dtype(out_FK, (torch.float32,), "out_FK")
    check_equal_shape(out_FK, (F, K), "out_FK", "the shape of codes")
    check_same_device({"codes": codes_FK, "out_FK": out_FK})
    _for_each_chunk(codes_FK, scales_BF.t().contiguous(), out_FK, scheme, partial(_dequantize_tiles, fmt=fmt))
    return out_FK


def _chosen(
    fmt: str | ElementFormat, rule: str | ScaleRule, scheme: str | SwizzleScheme
) -> tuple[ElementFormat, ScaleRule, SwizzleScheme]:
    chosen = element_format(fmt), choose(ScaleRule, rule, argument="rule")
    return *chosen, choose(SwizzleScheme, scheme, argument="scheme")


def _scales_as_bytes(scales_BF: Tensor, codes: Tensor, B: int, F: int) -> Tensor:
    """Check the compact scales ``[B, F]`` of `codes` and return them as uint8."""
    check_dtype(scales_BF, SCALE_DTYPES, "scales", VIEW)
    check_equal_shape(scales_BF, (B, F), "scales", f"compact scales of codes {list(codes.shape)}")
    check_same_device({"codes": codes, "scales": scales_BF})
    return scales_BF.detach().view(torch.uint8)


def _dequantize_tiles(tile_RJs: Tensor, byte_Rb: Tensor, out_RJs: Tensor, fmt: ElementFormat) -> None:
    out_RJs.copy_(multiply_by_scale_(decode(tile_RJs, fmt), per_element(byte_Rb)))


def _quantize_natural(
    x_FK: Tensor, fmt: ElementFormat, rule: ScaleRule, scheme: SwizzleScheme
) -> tuple[Tensor, Tensor]:
    """Quantize ``[F, K]`` in place of layout: uint8 codes ``[F, K]`` and scale bytes ``[F, K/32]``."""
    F, K = x_FK.shape
    codes_FK = torch.empty(F, K, dtype=torch.uint8, device=x_FK.device)
    scales_FB = torch.empty(F, K // MX_BLOCK, dtype=torch.uint8, device=x_FK.device)
    _for_each_chunk(x_FK, scales_FB, codes_FK, scheme, partial(quantize_tiles, fmt=fmt, rule=rule))
    return codes_FK, scales_FB


def _for_each_chunk(
    source_FK: Tensor,
    scales_FB: Tensor,
    target_FK: Tensor,
    scheme: SwizzleScheme,
    work: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Call `work` with matching views: source ``[..., 4, s]``, scales ``[..., s/8]``, target ``[..., 4, s]``."""
    F, K = source_FK.shape
    for segment in block_segments(K, scheme):
        columns = slice(segment.start, segment.stop)
        blocks = slice(segment.start // MX_BLOCK, segment.stop // MX_BLOCK)
        tiles = (segment.tiles, LANES, segment.tile // LANES)
        step = _rows_per_chunk(source_FK.device, segment.tile * segment.tiles)
        for f in range(0, F, step):
            work(
                source_FK[f : f + step, columns].unflatten(1, tiles),
                scales_FB[f : f + step, blocks].unflatten(1, (segment.tiles, segment.tile // MX_BLOCK)),
                target_FK[f : f + step, columns].unflatten(1, tiles),
            )


def _rows_per_chunk(device: torch.device, elements_per_row: int) -> int:
    chunk = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    return max(1, chunk // elements_per_row)
