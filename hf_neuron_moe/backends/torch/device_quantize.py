"""MXFP8 rounding in place without a look at any value: the results of ``fake_quant.py`` on every range of numbers.

Each block is first multiplied by a power of two that brings its largest exponent to 1, and at the end by the inverse.
Between the two the constants of ``fake_quant.py`` cannot overflow or vanish. Both factors are exact, but for numbers so
far below their block's largest that they are rounded to zero. Blocks whose scale byte would be negative get byte 0, as
in the format; infinities and NaN stay.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.device_runs import MXRowBlocks
from hf_neuron_moe.backends.torch.fake_quant import float_bits
from hf_neuron_moe.formats.constants import PATCH_ROWS
from hf_neuron_moe.formats.swizzle import tile_segments

warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta", category=UserWarning)

_SMALLEST_FIELD = 7  # of a block: its scale byte is 0
_FIELD_OF_2 = 128
_SUBNORMAL = 13  # binades from a block's largest exponent down to that of the smallest normal code


def quantize_(values: Tensor, axis: int, *, scheme: str = "wrapX") -> Tensor:
    """Round `values`, fp32 or bf16 of any number of dimensions, to MXFP8 in place, blocks along `axis`; return them.

    `axis`, 0 or above, is a multiple of 128 long; `scheme` is a wrapX variant.
    """
    for segment in tile_segments(values.shape[axis], scheme):
        part = values.narrow(axis, segment.start, segment.tile * segment.tiles)
        quantize_tiles_(part, axis, segment.tile // 4)
    return values


def quantize_tiles_(values: Tensor, axis: int, lane: int) -> Tensor:
    """Round equal contraction tiles along `axis`, or the first lanes of one; `lane` is their distance."""
    bits = float_bits(values.dtype)
    lanes = min(4, values.shape[axis] // lane)
    tiled = values.unflatten(axis, (-1, lanes, lane // PATCH_ROWS, PATCH_ROWS))
    fields = tiled.view(bits.integer) & bits.exponent
    back = _half_of_largest_(fields.amax(axis + 1, keepdim=True).amax(axis + 3, keepdim=True), values.dtype)
    if axis == values.ndim - 1 and values.is_cpu:  # slow where the innermost dimension is broadcast
        tiled = values.unflatten(axis, (-1, lanes, lane))
        back = back.expand(*back.shape[:-1], PATCH_ROWS).flatten(-2)
    tiled.mul_(back.reciprocal())
    _round_(tiled, fields.view(tiled.shape))
    tiled.mul_(back)
    return values


def quantize_rows_(values_RC: Tensor, blocks: MXRowBlocks) -> Tensor:
    """Round rows to MXFP8 in place, blocks made of rows; return them."""
    bits = float_bits(values_RC.dtype)
    fields_RC = values_RC.view(bits.integer) & bits.exponent
    zeros = fields_RC.new_zeros((blocks.count, values_RC.shape[1]))
    back = _half_of_largest_(zeros.index_reduce_(0, blocks.block_R, fields_RC, "amax"), values_RC.dtype)
    values_RC.mul_(back.reciprocal().index_select(0, blocks.block_R))
    _round_(values_RC, fields_RC)
    return values_RC.mul_(back.index_select(0, blocks.block_R))


def _half_of_largest_(fields: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn each block's largest exponent field into half of that power of two."""
    bits = float_bits(dtype)
    return fields.clamp_(min=_SMALLEST_FIELD * bits.field).sub_(bits.field).view(dtype)


def _round_(values: Tensor, scratch: Tensor) -> None:
    """Round `values` to the steps of blocks whose largest exponent is 1."""
    bits = float_bits(values.dtype)
    fields = torch.bitwise_and(values.view(bits.integer), bits.exponent, out=scratch)
    fields.clamp_((_FIELD_OF_2 - _SUBNORMAL) * bits.field, _FIELD_OF_2 * bits.field)
    steps = fields.view(values.dtype)
    values.add_(steps, alpha=bits.constant).sub_(steps, alpha=bits.constant)
