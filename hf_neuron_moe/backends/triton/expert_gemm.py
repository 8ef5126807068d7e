"""Products of sorted rows with each expert's own weight, and sums over each expert's rows.

Operands are bf16 (MXFP8 values are exact in it), or codes and scales for ``tl.dot_scaled``: native on Blackwell, made
bf16 by Triton on Hopper. Sums are fp32 and rounded once, where they are stored. There are no atomic additions: a result
has the same bits in every run.

Legend: T tokens, R rows sorted by expert, E experts, N columns of a result, K the other axis of a weight.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_neuron_moe.backends.triton.device_functions import (
    INTERPRETED,
    e4m3_values,
    group_of_tile,
    natural_position,
    scaled,
    store,
)
from hf_neuron_moe.backends.triton.launch_grid import Tiles, as_bits, cdiv, launch, power_of_two_above, tile_sizes
from hf_neuron_moe.backends.triton.mx_both_ways import Quantized
from hf_neuron_moe.checks import check_dtype, check_equal_shape

OPERANDS = (torch.bfloat16, torch.float32)


@triton.jit
def _multiply(a, b, total):
    """Return ``a @ b + total``. The interpreter multiplies bf16 as integers, so it gets fp32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _multiply_scaled(a, a_scale, b, b_scale, total):
    """Return the product of e4m3 blocks, ``[M, K] @ [K, N] + total``; scales ``[M, K/32]`` and ``[N, K/32]``.

    The interpreter has no ``tl.dot_scaled``: there the values are multiplied.
    """
    if INTERPRETED:
        right = tl.trans(_dequantized(tl.trans(b), b_scale))
        total = tl.dot(_dequantized(a, a_scale), right, total, input_precision="ieee")
    else:
        total = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", total)
    return total


@triton.jit
def _dequantized(code, scale):
    M: tl.constexpr = code.shape[0]
    K: tl.constexpr = code.shape[1]
    byte = tl.broadcast_to(scale.to(tl.int32)[:, :, None], (M, K // 32, 32))
    return scaled(e4m3_values(code.to(tl.int32)), tl.reshape(byte, (M, K)))


@triton.jit
def _grouped_product(
    x, x_scales, token, weight, weight_scales, ends, added, out,
    R, N, K, E, x_row, weight_expert, weight_row, weight_column, out_row,
    GROUPS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Make one tile of rows of one expert. In MX, K is in the hardware's order, weights and scales are contiguous."""
    group, first, _start, end = group_of_tile(ends, tl.program_id(1), R, E, GROUPS, TILE_M)
    row = first + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    real, inside = row < end, column < N
    source = row.to(tl.int64)
    if token is not None:
        source = tl.load(token + row, mask=real, other=0).to(tl.int64)
    expert = tl.minimum(group, E - 1).to(tl.int64)
    left = x + source[:, None] * x_row + k[None, :]
    right = weight + expert * weight_expert + column.to(tl.int64)[None, :] * weight_row + k[:, None] * weight_column
    block = tl.arange(0, TILE_K // 32)
    if x_scales is not None:
        left_scales = x_scales + source[:, None] * (x_row // 32) + block[None, :]
        right_scales = weight_scales + (expert * N + column)[:, None] * (K // 32) + block[None, :]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    # Rows after the last group's meet no weight, tiles that do not exist have no rows.
    for at in range(0, tl.where(group < E, K, 0), TILE_K):
        a = tl.load(left + at, mask=real[:, None] & (k < K - at)[None, :], other=0)
        b = tl.load(right + at * weight_column, mask=inside[None, :] & (k < K - at)[:, None], other=0)
        if x_scales is None:
            total = _multiply(a, b.to(a.dtype), total)
        else:
            has_block = (block < (K - at) // 32)[None, :]
            a_scale = tl.load(left_scales + at // 32, mask=real[:, None] & has_block, other=0)
            b_scale = tl.load(right_scales + at // 32, mask=inside[:, None] & has_block, other=0)
            total = _multiply_scaled(a, a_scale, b, b_scale, total)
    if added is not None:
        total += tl.load(added + expert * N + column, mask=inside & (group < E), other=0.0)[None, :]
    store(out + row.to(tl.int64)[:, None] * out_row + column[None, :], total, real[:, None] & inside[None, :])


@triton.jit
def _weight_gradient(
    left, left_scales, left_token, right, right_scales, right_token, ends, out,
    N, K, left_row, right_row, out_expert, out_row, out_column,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Make one tile of one expert's sum over its rows; in MX by blocks of its rows in the hardware's order."""
    group = tl.program_id(2)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    r = tl.arange(0, TILE_R)
    in_n, in_k = n < N, k < K
    stop = end - start
    if left_scales is not None:
        stop = (stop + BLOCK - 1) // BLOCK * BLOCK
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    for at in range(0, stop, TILE_R):
        row = start + at + r
        if left_scales is not None:
            row = start + (at + r) // BLOCK * BLOCK + natural_position((at + r) % BLOCK, BLOCK, SINGLE)
        real = row < end
        left_at, right_at = row.to(tl.int64), row.to(tl.int64)
        if left_token is not None:
            left_at = tl.load(left_token + row, mask=real, other=0).to(tl.int64)
        if right_token is not None:
            right_at = tl.load(right_token + row, mask=real, other=0).to(tl.int64)
        a = tl.load(left + left_at[None, :] * left_row + n[:, None], mask=in_n[:, None] & real[None, :], other=0)
        b = tl.load(right + right_at[:, None] * right_row + k[None, :], mask=real[:, None] & in_k[None, :], other=0)
        if left_scales is None:
            total = _multiply(a, b, total)
        else:
            lead = at + tl.arange(0, TILE_R // 32) * 32
            lead = start + lead // BLOCK * BLOCK + natural_position(lead % BLOCK, BLOCK, SINGLE)
            place = (lead // 8 + group).to(tl.int64)[None, :]
            used = (lead < end)[None, :]
            a_scale = tl.load(left_scales + place * N + n[:, None], mask=in_n[:, None] & used, other=0)
            b_scale = tl.load(right_scales + place * K + k[:, None], mask=in_k[:, None] & used, other=0)
            total = _multiply_scaled(a, a_scale, b, b_scale, total)
    out += group.to(tl.int64) * out_expert
    target = out + n.to(tl.int64)[:, None] * out_row + k[None, :] * out_column
    store(target, total, in_n[:, None] & in_k[None, :])


def grouped_product(
    x_TK: Tensor,
    weight_ENK: Tensor,
    ends_E: Tensor,
    *,
    token_R: Tensor | None = None,
    added_EN: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return ``x[token] @ weight[e]^T + added[e]`` of each expert's rows: ``[R, N]``, summed in fp32.

    * x_TK: bf16, or fp32 for fp32 products; unit stride along K. Without `token_R` its rows are the sorted ones.
    * weight_ENK: bf16 or fp32, cast to the dtype of `x_TK`; any strides.
    * ends_E: int32 end row of each expert; rows after the last end become zeros.
    * added_EN: fp32, added to the sums.
    * dtype: bf16 or fp32, to which the sum is rounded.
    """
    check_dtype(x_TK, OPERANDS, "x")
    check_dtype(weight_ENK, OPERANDS, "weight")
    experts, N, K = weight_ENK.shape
    check_equal_shape(x_TK, (len(x_TK), K), "x", "[T, K] with the K of the weight")
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    rows = len(x_TK) if token_R is None else len(token_R)
    sizes = tile_sizes("grouped_product", rows, experts) if tiles is None else tiles
    operands = (x_TK, None, token_R, weight_ENK, None)
    return _product(operands, ends_E, added_EN, (rows, N, K), dtype, sizes)


def mx_product(
    x: Quantized,
    weight: Quantized,
    ends_E: Tensor,
    *,
    token_R: Tensor | None = None,
    added_EN: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the :func:`grouped_product` of codes and scales along columns; `weight` has ``[E * N, c]``."""
    assert x.codes is not None and weight.codes is not None
    experts, K = len(ends_E), x.codes.shape[1]
    rows, N = len(x.codes) if token_R is None else len(token_R), len(weight.codes) // experts
    check_equal_shape(weight.codes, (experts * N, K), "weight", "[E * N, c] with the c of x")
    sizes = tile_sizes("mx_product", rows, experts) if tiles is None else tiles
    operands = (x.codes, x.scales, token_R, weight.codes.view(experts, N, K), weight.scales)
    return _product(operands, ends_E, added_EN, (rows, N, K), dtype, sizes)


def _product(
    operands: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None],
    ends_E: Tensor,
    added_EN: Tensor | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    sizes: Tiles,
) -> Tensor:
    (rows, N, K), experts = shape, len(ends_E)
    out_RN = operands[0].new_empty(rows, N, dtype=dtype)
    # A tile less than whole for each expert, and one for the rows after the last end.
    row_tiles = rows // sizes["TILE_M"] + min(experts + 1, rows)
    added = None if added_EN is None else added_EN.float().contiguous()
    launch(
        _grouped_product, (cdiv(N, sizes["TILE_N"]), row_tiles), out_RN,
        *operands, ends_E, added, as_bits(out_RN, "dtype"),
        rows, N, K, experts, operands[0].stride(0), *operands[3].stride(), N,
        GROUPS=power_of_two_above(experts), **sizes,
    )  # fmt: skip
    return out_RN


def weight_gradient(
    left_RN: Tensor,
    right_RK: Tensor,
    ends_E: Tensor,
    out_ENK: Tensor,
    *,
    tokens: tuple[Tensor | None, Tensor | None] = (None, None),
    tiles: Tiles | None = None,
) -> Tensor:
    """Write ``left^T @ right`` over each expert's rows into `out_ENK` and return it; zeros for experts without rows.

    The operands are bf16 or fp32 with unit stride along their columns. `tokens` are the rows ``[R]`` of each that are
    the sorted ones. The result is bf16 or fp32, with any strides: the sum is rounded once.
    """
    for operand, name in ((left_RN, "left"), (right_RK, "right")):
        check_dtype(operand, (left_RN.dtype,) if left_RN.dtype in OPERANDS else OPERANDS, name)
    left_RN, right_RK = (part if part.stride(1) == 1 else part.contiguous() for part in (left_RN, right_RK))
    operands = (left_RN, None, tokens[0], right_RK, None, tokens[1])
    return _sum_over_rows(operands, ends_E, out_ENK, 32, tile_sizes("weight_gradient") if tiles is None else tiles)


def mx_weight_gradient(
    left: Quantized, right: Quantized, ends_E: Tensor, block_size: int, out_ENK: Tensor, tiles: Tiles | None = None
) -> Tensor:
    """Do what :func:`weight_gradient` does with codes and scales along rows, quantized with the same `block_size`."""
    assert left.codes is not None and right.codes is not None
    operands = (left.codes, left.scales, None, right.codes, right.scales, None)
    sizes = tile_sizes("mx_weight_gradient") if tiles is None else tiles
    return _sum_over_rows(operands, ends_E, out_ENK, block_size, sizes)


def _sum_over_rows(
    operands: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None],
    ends_E: Tensor,
    out_ENK: Tensor,
    block: int,
    sizes: Tiles,
) -> Tensor:
    left, right = operands[0], operands[3]
    (N, K), experts = (left.shape[1], right.shape[1]), len(ends_E)
    check_equal_shape(out_ENK, (experts, N, K), "out", "[E, N, K] of the operands")
    launch(
        _weight_gradient, (cdiv(K, sizes["TILE_K"]), cdiv(N, sizes["TILE_N"]), experts), out_ENK,
        *operands, ends_E, as_bits(out_ENK, "out"), N, K, left.stride(0), right.stride(0), *out_ENK.stride(),
        BLOCK=block, SINGLE=block % 128 != 0, **sizes,
    )  # fmt: skip
    return out_ENK
