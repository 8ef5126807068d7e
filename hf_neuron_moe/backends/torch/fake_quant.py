"""MXFP8 rounding in place: the values of :func:`hf_neuron_moe.formats.mx.fake_quantize_mx`, several times faster.

The matmuls of the torch backend multiply dequantized values, so the codes and scale bytes never have to exist. A value
``v`` of a block whose scale is ``2^s`` lands on the e4m3 grid of step ``2^(max(e, s - 6) - 3)``, ``e`` being the
exponent of ``v``. That is three mantissa bits for normal codes, a fixed step for subnormal ones. Adding and subtracting
``1.5 * 2^20`` times ``2^max(e, s - 6)`` rounds an fp32 value to exactly that step, to nearest even, because one unit in
the last place of the sum is the step. For bf16 values the constant is ``1.5 * 2^4``: torch adds them in fp32 and rounds
the sum once. (What fp32 cannot hold next to the constant is far below half a step.) With the Neuron scale rule
(``s = emax - 7``, ``emax`` the block's largest exponent) no finite value saturates.

Blocks are 8 neighboring positions times 4 lanes along the contraction axis, the lanes a quarter of a tile apart (tiles
of 512, then 256, then 128). Sources: NKI ``quantize_mx`` (SDK 2.32), the wrapX swizzle of nki-library 2.30.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.mx import fake_quantize_mx
from hf_neuron_moe.formats.swizzle import tile_segments


class FloatBits(NamedTuple):
    """A float format's bits as integers, and the constant whose last place is the step of a value below 2."""

    integer: torch.dtype
    magnitude: int
    exponent: int
    field: int
    constant: float


_BITS = {
    torch.float32: FloatBits(torch.int32, 0x7FFFFFFF, 0x7F800000, 1 << 23, 1.5 * 2.0**20),
    torch.bfloat16: FloatBits(torch.int16, 0x7FFF, 0x7F80, 1 << 7, 1.5 * 2.0**4),
}
# Fields between a block's largest exponent and that of the smallest normal e4m3 code: (emax - 7) - 6 = emax - 13.
_SUBNORMAL_FIELDS = 13
# Outside these fields the constant over- or underflows fp32; such a tensor takes the byte-exact path.
_EXACT_BELOW_FIELD, _EXACT_FROM_FIELD = 16, 230


def fake_quantize_(values: Tensor, axis: int, scratch: Tensor | None = None, *, scheme: str = "wrapX") -> Tensor:
    """Round `values` to MXFP8 (e4m3, Neuron scale rule) in place, blocks along `axis`; return them.

    They are fp32 or bf16 ``[R, C]`` with unit stride in the last dimension; `axis`, 0 or 1, is a multiple of 128 long.
    `scratch` has at least as many elements, int32 for fp32, int16 for bf16; None is allocated. `scheme` is a wrapX
    variant of :class:`hf_neuron_moe.formats.constants.SwizzleScheme`.
    """
    if not values.numel():
        return values
    if scratch is None:
        scratch = torch.empty(values.numel(), dtype=integer_like(values.dtype), device=values.device)
    for segment in tile_segments(values.shape[axis], scheme):
        part = values.narrow(axis, segment.start, segment.tile * segment.tiles)
        fake_quantize_tile_(part, axis, segment.tile // 4, scratch)
    return values


def fake_quantize_tile_(values: Tensor, axis: int, lane: int, scratch: Tensor) -> Tensor:
    """Round equal contraction tiles in place, whatever their size; otherwise as :func:`fake_quantize_`.

    Along `axis` there is any number of tiles of 4 lanes; along axis 0 also less than one tile: its first lanes, the
    missing ones standing for zeros. `lane` is the distance of a block's lanes, a quarter of the tile; a multiple of 8.
    """
    bits = _BITS[values.dtype]
    exponents = scratch[: values.numel()].view(values.shape)
    torch.bitwise_and(values.view(bits.integer), bits.magnitude, out=exponents)
    rows, columns = values.shape
    if axis == 0:
        lanes = min(4, rows // lane)
        tiled = exponents.view(-1, lanes, lane // 8, 8, columns)
        # Two reductions in turn; torch takes many times longer for both dimensions at once.
        block_max = tiled.amax(dim=1, keepdim=True).amax(dim=3, keepdim=True)
    else:
        lanes = 4
        tiled = exponents.view(rows, -1, lanes, lane)
        block_max = tiled.amax(dim=2).view(rows, -1, lane // 8, 8).amax(dim=-1, keepdim=True)
    if _needs_exact_path(block_max, bits.field):
        return values.copy_(_exact(values, axis, lane, lanes))
    exponents.bitwise_and_(bits.exponent)
    floor = block_max.bitwise_and_(bits.exponent).sub_(_SUBNORMAL_FIELDS * bits.field)
    if axis == 1:
        floor = floor.expand(-1, -1, -1, 8).reshape(rows, -1, 1, lane)
    torch.maximum(tiled, floor, out=tiled)
    steps = exponents.view(values.dtype)
    return values.add_(steps, alpha=bits.constant).sub_(steps, alpha=bits.constant)


def integer_like(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of the bits of `dtype`, which the scratch of such values has."""
    return _BITS[dtype].integer


def float_bits(dtype: torch.dtype) -> FloatBits:
    """Return the bits of fp32 or bf16."""
    return _BITS[dtype]


def _exact(values: Tensor, axis: int, lane: int, lanes: int) -> Tensor:
    """Return the byte-exact rounding: blocks gathered to 32 consecutive values, missing lanes filled with zeros."""
    moved = values.movedim(axis, -1)
    blocks = moved.reshape(len(moved), -1, lanes, lane // 8, 8).transpose(2, 3)
    whole = F.pad(blocks, (0, 0, 0, 4 - lanes)).reshape(len(moved), -1)
    rounded = fake_quantize_mx(whole, scheme="1x32").view(*blocks.shape[:3], 4, 8)[..., :lanes, :]
    return rounded.transpose(2, 3).reshape(moved.shape).movedim(-1, axis)


def _needs_exact_path(block_max: Tensor, field: int) -> bool:
    """Whether a block other than an all-zero one is outside the range in which the constant rounds exactly."""
    low, high = (int(bound) for bound in torch.aminmax(block_max))
    if low == 0 and high:  # blocks of zeros count for nothing
        low = int(block_max.masked_fill(block_max == 0, high).min())
    return high >= _EXACT_FROM_FIELD * field or 0 < low < _EXACT_BELOW_FIELD * field
