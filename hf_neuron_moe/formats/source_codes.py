"""Codes of quantized checkpoints as they lie in files, to bf16: MXFP4 (gpt-oss), packed FP4 and FP8 in blocks.

Letters: N rows and K columns of a matrix, G groups of 32 values. The results are those of transformers' own
dequantization, bit for bit, where that follows the format (``docs/convert.md`` says where it does not).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import VIEW, check_axes, check_dtype, check_equal_shape, check_multiple, is_whole
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.formats.constants import E2M1, E4M3FN, MX_BLOCK, SCALE_DTYPES
from hf_neuron_moe.formats.e8m0 import multiply_by_scale_
from hf_neuron_moe.formats.elements import codes_as_bytes, decode

GROUP_BYTES = MX_BLOCK // 2  # Bytes of a group: two E2M1 codes in each
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@public
def dequantize_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode gpt-oss's ``*_blocks`` and ``*_scales`` to bf16 ``[..., N, 32 * G]``.

    `blocks` are uint8 ``[..., N, G, 16]``: byte b of a group has value 2b in its low nibble and 2b + 1 in its high one.
    `scales` are bytes ``[..., N, G]``, each 2**(byte - 127). The result is exact for bytes up to 252. Larger ones
    overflow to infinity with large codes, and byte 255 is NaN.
    """
    check_dtype(blocks, (torch.uint8,), "blocks", VIEW)
    check_dtype(scales, SCALE_DTYPES, "scales", VIEW)
    if blocks.ndim < 2 or blocks.shape[-1] != GROUP_BYTES:
        expected = f"of shape [..., G, {GROUP_BYTES}]"
        raise ShapeError.about("blocks", expected, list(blocks.shape), "Pass the tensor as the checkpoint has it.")
    check_equal_shape(scales, tuple(blocks.shape[:-1]), "scales", "one byte per group of 32 values")
    packed = blocks.detach()
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    values = multiply_by_scale_(decode(codes, E2M1), scales.detach().view(torch.uint8)[..., None])
    return values.to(torch.bfloat16).flatten(-2)


@public
def dequantize_packed_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Decode packed FP4 weights with a scale per row and 32 values (DeepSeek-V4's experts) to bf16 ``[..., N, K]``.

    `packed` is int8 or uint8 ``[..., N, K/2]``, low nibble first; `scales` are bytes ``[..., N, K/32]``.
    """
    check_dtype(packed, (torch.int8, torch.uint8), "packed", VIEW)
    check_multiple(packed.shape[-1], GROUP_BYTES, "packed.shape[-1]", remedy="Each group of 32 values has 16 bytes.")
    return dequantize_mxfp4_blocks(packed.view(torch.uint8).unflatten(-1, (-1, GROUP_BYTES)), scales)


@public
def dequantize_fp8_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Decode e4m3 weights with a scale per block of rows and columns to bf16 ``[..., N, K]``.

    `codes` are float8_e4m3fn (or their bytes) ``[..., N, K]``. `block` is ``weight_block_size``, and the last block of
    an axis may be partial: `scales` are ``[..., ceil(N/rows), ceil(K/columns)]``, fp32, bf16 or fp16 factors, or bytes
    2**(byte - 127). Code times scale is computed in fp32 and rounded to bf16 once. NaN codes stay NaN.
    """
    bytes_NK = codes_as_bytes(codes, E4M3FN)
    check_axes(scales, [*map(str, range(codes.ndim - 2)), "N blocks", "K blocks"], "scales")
    if len(block) != 2 or not all(is_whole(size) and size > 0 for size in block):
        fix = "Pass weight_block_size of the checkpoint's quantization_config."
        raise ShapeError.about("block", "two positive sizes, of rows and columns", block, fix)
    check_dtype(scales, (*FLOAT_SCALES, *SCALE_DTYPES), "scales", VIEW)
    *experts, N, K = codes.shape
    rows, columns = block
    grid = (*experts, -(-N // rows), -(-K // columns))
    check_equal_shape(scales, grid, "scales", f"a scale per {rows} x {columns} values, the last block partial")
    values = decode(bytes_NK, E4M3FN)
    if scales.dtype in SCALE_DTYPES:
        values = multiply_by_scale_(values, _spread(scales.detach().view(torch.uint8), block, N, K))
    else:
        values.mul_(_spread(scales.detach().float(), block, N, K))
    return values.to(torch.bfloat16)


def _spread(scales: Tensor, block: tuple[int, int], N: int, K: int) -> Tensor:
    """Repeat each block's scale for its rows and columns: ``[..., N, K]``."""
    rows, columns = (min(size, extent) for size, extent in zip(block, (N, K)))
    wide = scales.repeat_interleave(columns, dim=-1)[..., :K]
    return wide.repeat_interleave(rows, dim=-2)[..., :N, :]
