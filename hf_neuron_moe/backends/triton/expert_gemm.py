"""Products of sorted rows with each expert's own weight, and sums over each expert's rows.

Operands are bf16 (MXFP8 values are exact in it), or codes and scales for ``tl.dot_scaled``: native on Blackwell, made
bf16 by Triton on Hopper. Sums are fp32 and rounded once, where they are stored. There are no atomic additions: a result
has the same bits in every run.

Legend: T tokens, R rows sorted by expert, E experts, N columns of a result, K the other axis of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_neuron_moe.backends.triton import device_functions as dev
from hf_neuron_moe.backends.triton.launch_grid import Tiles, as_bits, launch, tile_sizes
from hf_neuron_moe.backends.triton.mx_both_ways import Quantized
from hf_neuron_moe.checks import check_dtype, check_equal_shape

OPERANDS = (torch.bfloat16, torch.float32)
Operand = Tensor | Quantized
"""bf16 or fp32 with unit stride along its columns, or codes and scales."""


@triton.jit
def _multiply(a, b, total):
    """Return ``a @ b + total``. The interpreter multiplies bf16 as integers, so it gets fp32."""
    if dev.INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _multiply_scaled(a, a_scale, b, b_scale, total):
    """Return the product of e4m3 blocks, ``[M, K] @ [K, N] + total``; scales ``[M, K/32]`` and ``[N, K/32]``.

    The interpreter has no ``tl.dot_scaled``: there the values are multiplied.
    """
    if dev.INTERPRETED:
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
    return dev.scaled(dev.e4m3_values(code.to(tl.int32)), tl.reshape(byte, (M, K)))


@triton.jit
def _grouped_product(
    x, x_scales, token, weight, weight_scales, ends, added, out,
    R, N, K, E, x_row, weight_expert, weight_row, weight_column, out_row,
    GROUPS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Make one tile of rows of one expert. In MX, K is in the hardware's order, weights and scales are contiguous."""
    group, first, end = dev.group_of_tile(ends, tl.program_id(1), R, E, GROUPS, TILE_M)
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
            if b.dtype == tl.float32 and a.dtype == tl.bfloat16:
                b = dev.round_bf16(b)
            total = _multiply(a, b.to(a.dtype), total)
        else:
            has_block = (block < (K - at) // 32)[None, :]
            a_scale = tl.load(left_scales + at // 32, mask=real[:, None] & has_block, other=0)
            b_scale = tl.load(right_scales + at // 32, mask=inside[:, None] & has_block, other=0)
            total = _multiply_scaled(a, a_scale, b, b_scale, total)
    if added is not None:
        total += tl.load(added + expert * N + column, mask=column < tl.where(group < E, N, 0), other=0.0)[None, :]
    dev.store(out + row.to(tl.int64)[:, None] * out_row + column[None, :], total, real[:, None] & inside[None, :])


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
            row = start + (at + r) // BLOCK * BLOCK + dev.natural_position((at + r) % BLOCK, BLOCK, SINGLE)
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
            lead = start + lead // BLOCK * BLOCK + dev.natural_position(lead % BLOCK, BLOCK, SINGLE)
            place = (lead // 8 + group).to(tl.int64)[None, :]
            used = (lead < end)[None, :]
            a_scale = tl.load(left_scales + place * N + n[:, None], mask=in_n[:, None] & used, other=0)
            b_scale = tl.load(right_scales + place * K + k[:, None], mask=in_k[:, None] & used, other=0)
            total = _multiply_scaled(a, a_scale, b, b_scale, total)
    out += group.to(tl.int64) * out_expert
    target = out + n.to(tl.int64)[:, None] * out_row + k[None, :] * out_column
    dev.store(target, total, in_n[:, None] & in_k[None, :])


def grouped_product(
    x: Operand,
    weight: Operand,
    ends_E: Tensor,
    *,
    token_R: Tensor | None = None,
    added_EN: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return ``x[token] @ weight[e]^T + added[e]`` of each expert's rows: ``[R, N]``, summed in fp32.

    * x: ``[T, K]``; without `token_R` its rows are the sorted ones.
    * weight: ``[E, N, K]`` of any strides, bf16 or fp32, cast to the dtype of x. With codes and scales, both operands
      are quantized along columns, and the weight is that of ``[E * N, K]``.
    * ends_E: int32 end row of each expert; rows after the last end become zeros.
    * added_EN: fp32, added to the sums.
    * dtype: bf16 or fp32, to which the sum is rounded.
    """
    left, left_scales = _parts(x, "x")
    right, right_scales = _parts(weight, "weight")
    experts = len(ends_E)
    right = right if right.ndim == 3 else right.unflatten(0, (experts, -1))
    (_, N, K), rows = right.shape, len(left) if token_R is None else len(token_R)
    check_equal_shape(left, (len(left), K), "x", "[T, K] with the K of the weight")
    name = "grouped_product" if left_scales is None else "mx_product"
    sizes = tile_sizes(name, rows, experts) if tiles is None else tiles
    out_RN = left.new_empty(rows, N, dtype=dtype)
    # A tile less than whole for each expert, and one for the rows after the last end.
    row_tiles = rows // sizes["TILE_M"] + min(experts + 1, rows)
    launch(
        _grouped_product, (triton.cdiv(N, sizes["TILE_N"]), row_tiles), left,
        left, left_scales, token_R, right, right_scales, ends_E,
        None if added_EN is None else added_EN.float().contiguous(), as_bits(out_RN, "dtype"),
        rows, N, K, experts, left.stride(0), *right.stride(), N, GROUPS=triton.next_power_of_2(experts + 1), **sizes,
    )  # fmt: skip
    return out_RN


def weight_gradient(
    left: Operand,
    right: Operand,
    ends_E: Tensor,
    out_ENK: Tensor,
    *,
    tokens: tuple[Tensor | None, Tensor | None] = (None, None),
    block_size: int = 32,
    tiles: Tiles | None = None,
) -> Tensor:
    """Write ``left^T @ right`` over each expert's rows into `out_ENK` and return it; zeros for experts without rows.

    * left, right: ``[R, N]`` and ``[R, K]``, or tensors of which `tokens` are the sorted rows. Codes and scales are
      those of rows, quantized in blocks of `block_size`.
    * out_ENK: bf16 or fp32 with any strides; the sum is rounded once.
    """
    a, a_scales = _parts(left, "left")
    b, b_scales = _parts(right, "right")
    check_dtype(b, (a.dtype,), "right")
    (N, K), experts = (a.shape[1], b.shape[1]), len(ends_E)
    check_equal_shape(out_ENK, (experts, N, K), "out", "[E, N, K] of the operands")
    sizes = tile_sizes("weight_gradient" if a_scales is None else "mx_weight_gradient") if tiles is None else tiles
    launch(
        _weight_gradient, (triton.cdiv(K, sizes["TILE_K"]), triton.cdiv(N, sizes["TILE_N"]), experts), a,
        a, a_scales, tokens[0], b, b_scales, tokens[1], ends_E, as_bits(out_ENK, "out"),
        N, K, a.stride(0), b.stride(0), *out_ENK.stride(), BLOCK=block_size, SINGLE=block_size % 128 != 0, **sizes,
    )  # fmt: skip
    return out_ENK


def _parts(operand: Operand, name: str) -> tuple[Tensor, Tensor | None]:
    """Return values, or codes and scales; a matrix with unit stride along its columns."""
    if isinstance(operand, Quantized) and operand.codes is not None:
        return operand.codes, operand.scales
    values = operand.values if isinstance(operand, Quantized) else operand
    assert values is not None, "this operand was not quantized along the axis that is asked for"
    check_dtype(values, OPERANDS, name)
    return (values if values.ndim == 3 or values.stride(1) == 1 else values.contiguous()), None
