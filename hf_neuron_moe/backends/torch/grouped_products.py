"""bf16 products of many groups' rows, each with its own group's weight.

A product of bf16 operands is summed in fp32 and rounded to bf16 once, whatever the library: one call takes the whole
contraction axis, so that no partial sum is ever rounded. Where the sum itself is needed, two calls give it to 16 bits:
the product rounded to bf16, ``high``, and what is left of the sum after subtracting it, ``low``. (A product with an
fp32 result does not exist on CPUs, and costs twice a bf16 one there when it is made of fp32 operands.) On CUDA the fp32
result exists, and both come from it, because cuBLAS may round the parts of a bf16 product's sum.

Legend: G groups (experts, or one for a dense MLP), R rows in group order, N columns of a result, K contraction axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.tiling import Loader
from hf_neuron_moe.formats.padding import padded_size

Runs = Sequence[tuple[int, int, int]]
"""``(group, first row, end row)``, ascending and without gaps; empty groups are left out."""

ROW_MULTIPLE = 16
"""Rows are multiplied in multiples of so many where the buffers have them: libraries keep code for every number."""
FEW_ROWS = 64
"""Up to so many rows per group one call for all groups saves more time than it costs."""
PIECE = 1 << 20
"""Elements of a weight that are cast or quantized at a time; they stay in the caches until they are multiplied."""
TILE = 512
"""A contraction axis of a multiple of it has the same MX groups wherever a group's weight begins."""


class _Piece(NamedTuple):
    """Weights as operands: of the groups from `group` on, the columns from `column` on; ``[g, n, K]``."""

    group: int
    column: int
    values: Tensor


def project(
    left_RK: Tensor, weight_GNK: Tensor, runs: Runs, loader: Loader, high_RN: Tensor, low_RN: Tensor | None = None
) -> None:
    """``left @ weight^T``, group by group.

    Args:
        left_RK: bf16, K padded and quantized as the loader's precision asks. Rows after the last run's may be read.
        weight_GNK: ``[G, N, K]``, any float dtype and any strides; K not padded.
        runs: rows of each group.
        loader: casts, or quantizes along K.
        high_RN: bf16 result. Rows after a run's are overwritten, before the next run's are written.
        low_RN: the sum minus `high_RN`, rounded to bf16; None where it is not wanted.
    """
    if low_RN is None and _in_one_call(left_RK, weight_GNK, runs, loader):
        rows, ends = runs[-1][2], [0] * len(weight_GNK)
        for group, _, end in runs:
            ends[group] = end
        for group in range(1, len(ends)):
            ends[group] = max(ends[group], ends[group - 1])
        offsets = torch.tensor(ends, dtype=torch.int32)
        high_RN[:rows].copy_(F.grouped_mm(left_RK[:rows], weight_GNK.transpose(1, 2), offs=offsets))
        return
    first = {group: (start, end) for group, start, end in runs}
    # With few rows reading the weights is all: the second product finds them in the caches.
    twice = low_RN is not None and bool(runs) and runs[-1][2] <= FEW_ROWS
    for piece in _pieces(weight_GNK, first, loader, left_RK.shape[1], cut=twice):
        columns = slice(piece.column, piece.column + piece.values.shape[1])
        for group, weight_NK in enumerate(piece.values.unbind(0), piece.group):
            if group not in first:
                continue
            start, end = first[group]
            stop = min(start - (start - end) // ROW_MULTIPLE * ROW_MULTIPLE, len(left_RK), len(high_RN))
            low = None if low_RN is None else low_RN[start:stop, columns]
            _multiply(left_RK[start:stop], weight_NK.t(), high_RN[start:stop, columns], low)


def project_over_rows(left_RM: Tensor, right_RN: Tensor, out_MN: Tensor) -> None:
    """``out = left^T @ right``, the sum over all rows, in the dtype of `out_MN` (any strides, one of them 1)."""
    if out_MN.stride(-1) != 1:
        left_RM, right_RN, out_MN = right_RN, left_RM, out_MN.t()
    if out_MN.dtype == left_RM.dtype and out_MN.stride(-1) == 1:
        _multiply(left_RM.t(), right_RN, out_MN, None)
    else:
        product = left_RM.new_empty(out_MN.shape)
        _multiply(left_RM.t(), right_RN, product, None)
        out_MN.copy_(product)


def _multiply(left: Tensor, right: Tensor, high: Tensor, low: Tensor | None) -> None:
    if left.device.type == "cuda":
        total = torch.mm(left, right, out_dtype=torch.float32)
        high.copy_(total)
        if low is not None:
            low.copy_(total.sub_(high))
        return
    torch.mm(left, right, out=high)
    if low is not None:
        torch.addmm(high, left, right, beta=-1, out=low)


def _in_one_call(left_RK: Tensor, weight_GNK: Tensor, runs: Runs, loader: Loader) -> bool:
    """Whether torch's grouped product takes these operands as they are, and there are few rows per group."""
    if loader.compute.mx or weight_GNK.dtype != left_RK.dtype or not left_RK.is_cpu or not runs:
        return False
    inner = weight_GNK.stride(1) == 1 or weight_GNK.stride(2) == 1
    aligned = all(stride % 8 == 0 for stride in weight_GNK.stride() if stride != 1) and left_RK.stride(0) % 8 == 0
    return inner and aligned and len(runs) > 1 and runs[-1][2] <= FEW_ROWS * len(runs)


def _pieces(
    weight_GNK: Tensor, wanted: dict[int, tuple[int, int]], loader: Loader, width: int, *, cut: bool
) -> Iterator[_Piece]:
    """Cut the weights into parts that are cast together; groups that are not wanted are left out."""
    groups, columns, size = weight_GNK.shape
    if loader.ready_weights or (not loader.compute.mx and weight_GNK.dtype == loader.compute.operand):
        step = max(PIECE // width, TILE) if cut else columns
        for column in range(0, columns, step):
            yield _Piece(0, column, weight_GNK[:, column : column + step])
        return
    by_column = weight_GNK.stride(2) != 1 and weight_GNK.stride(1) == 1
    together = max(PIECE // (columns * width), 1) if not by_column or size % TILE == 0 else 1
    step = columns if together > 1 else max(PIECE // width // TILE * TILE, TILE)
    for group in range(0, groups, together):
        part = weight_GNK[group : group + together]
        if not any(number in wanted for number in range(group, group + len(part))):
            continue
        for column in range(0, columns, step):
            yield _Piece(group, column, _operand(part[:, column : column + step], loader, width, by_column))


def _operand(source_GNK: Tensor, loader: Loader, width: int, by_column: bool) -> Tensor:
    """Return `source_GNK` as an operand ``[g, n, width]``: cast, zero padded, and in MX quantized along K.

    The memory runs as the source's does, so that the copy is straight.
    """
    groups, columns, size = source_GNK.shape
    shape = (groups, width, columns) if by_column else (groups, columns, width)
    buffer = loader.scratch.get("grouped_weight", shape, loader.compute.operand)
    corner = buffer[:, :size] if by_column else buffer[..., :size]
    corner.copy_(source_GNK.transpose(1, 2) if by_column else source_GNK)
    if size < width:
        (buffer[:, size:] if by_column else buffer[..., size:]).zero_()
    if loader.compute.mx:
        loader.quantize(buffer.flatten(0, 1), axis=0 if by_column else 1)
    return buffer.transpose(1, 2) if by_column else buffer


def width_of(size: int, loader: Loader) -> int:
    """Return how long a contraction axis of `size` is held."""
    return padded_size(size) if loader.compute.mx else size
