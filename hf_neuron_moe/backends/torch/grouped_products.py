"""bf16 products of many groups' rows, each with its own group's weight.

A product of bf16 operands is summed in fp32 and rounded to bf16 once, whatever the library. One call takes the whole
contraction axis, so that no partial sum is ever rounded. CPUs have no such product with an fp32 result. Where the sum
itself is needed there are two ways, each twice as long as one product:

* ``low``: a second product that takes the rounded first one away. Both together hold 16 bits of the sum, which is
  enough where the next rounding is one to bf16.
* :func:`project_sums`: the product of fp32 operands, for sums that are quantized to MXFP8 further on. There a value
  that is rounded differently can move by a sixteenth of itself.

What is added to a sum before its rounding, as a bias, is part of the product. oneDNN adds fp32 numbers itself
(:func:`adds_to_sums`). Elsewhere three more columns of the contraction axis hold the bf16 parts of such a number, and
the rows hold ones there (:func:`rows_with_ones`). Weights with more columns, and those that do not lie straight, are
copied part by part.

On CUDA the fp32 result exists, and everything comes from it: cuBLAS may round the parts of a bf16 product's sum.

Legend: G groups (experts, or one for a dense MLP), R rows in group order, N columns of a result, K contraction axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast
from hf_neuron_moe.backends.torch.cpu.matmul import FEW_TOKENS, linear_into
from hf_neuron_moe.backends.torch.experts import Runs, rows_per_run
from hf_neuron_moe.backends.torch.tiles import Loader

ROW_MULTIPLE = 8  # so many rows are multiplied together at least (:func:`whole_rows`)
FEW_ROWS = 16  # up to so many rows per group one call for all groups saves more time than the copy of its result costs
ROWS_WORTH_CASTING = 5  # per group, from which a CPU without bf16 instructions multiplies a weight's fp32 copy faster
PIECE = 1 << 20  # about so many elements of a weight are cast or quantized at a time, which stay in the caches
MOST_AT_ONCE = 1 << 21  # elements of a device's weight that are quantized at a time, or half of it
ADDED = 16  # columns of a contraction axis for what is added to the sums: three, as libraries like them
CAST_PIECE = 1 << 21  # the same of one that is quantized already, and only cast
TILE = 512  # a contraction axis of a multiple of it has the same MX groups wherever a group's weight begins


def whole_rows(rows: int) -> int:
    """Return how many rows are multiplied together for a group's `rows`: a multiple of 8, for many rows of more.

    oneDNN generates code for each number of rows, which takes as long as the product of some hundred rows, and keeps
    that of its last 1024 shapes. Routing and texts of different lengths make other numbers in every step. Here there
    are at most 16 between one power of two and the next, from 512 rows on 32.
    """
    power = 1 << rows.bit_length()
    multiple = max(ROW_MULTIPLE, min(2 * ROW_MULTIPLE, power >> 5), power >> 6)
    return -(-rows // multiple) * multiple


def whole_end(runs: Runs) -> int:
    """Return where the rows end that are multiplied together with some run's; 0 without runs."""
    return max((start + whole_rows(end - start) for _, start, end in runs), default=0)


def adds_to_sums(device: torch.device) -> bool:
    """Whether the products of a group on `device` add fp32 numbers before they round: those of oneDNN do.

    Its operators are not in torch's documentation. The processor is asked, not only the option: without bf16
    instructions oneDNN refuses such operands, whatever is wished.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    able = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(able and bf16_matmul_is_fast(device))


class PackedWeight:
    """A weight ``[G, N, K]`` in the order in which oneDNN multiplies few rows fastest, in parts that fit the caches.

    oneDNN brings a weight into that order in every call, which takes most of the time of a product of few rows.
    """

    def __init__(self, weight_GNK: Tensor) -> None:
        self.shape, self.nbytes = weight_GNK.shape, weight_GNK.nbytes
        step = max(PIECE // weight_GNK.shape[2], 64)
        parts = [slice(column, column + step) for column in range(0, weight_GNK.shape[1], step)]
        pack = torch.ops.mkldnn._reorder_linear_weight
        self.groups = [
            [(part, pack(weight_NK[part].contiguous(), 1)) for part in parts] for weight_NK in weight_GNK.unbind(0)
        ]

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether oneDNN has such an order here."""
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and adds_to_sums(weight.device)

    def multiply(self, left_RK: Tensor, runs: Runs, out_RN: Tensor) -> None:
        """As :func:`project`."""
        for group, start, end in runs:
            rows = left_RK[start:end].contiguous()
            for part, weight in self.groups[group]:
                out_RN[start:end, part].copy_(_linear(rows, weight, None))


Operand = Tensor | PackedWeight  # a weight ``[G, N, K]``


def rows_with_ones(values_RK: Tensor) -> Tensor:
    """Return bf16 rows ``[R, K + ADDED]`` for a product with something added."""
    return F.pad(F.pad(values_RK, (0, 3), value=1.0), (0, ADDED - 3))


def three_parts(values_GN: Tensor) -> list[Tensor]:
    """Return bf16 values whose sum is the fp32 `values_GN`, to 24 bits."""
    parts, rest_GN = [], values_GN
    for _ in range(3):
        parts.append(rest_GN.to(torch.bfloat16))
        rest_GN = rest_GN - parts[-1]
    return parts


def project(
    left_RK: Tensor,
    weight_GNK: Operand,
    runs: Runs,
    loader: Loader,
    high_RN: Tensor,
    low_RN: Tensor | None = None,
    added_GN: Tensor | None = None,
) -> None:
    """``high = left @ weight^T``, group by group, and where it is wanted ``low``, the sum minus `high_RN`; all bf16.

    `added_GN`, fp32, is added to the sum, and nothing is quantized: oneDNN does it, where :func:`adds_to_sums`, unless
    `left_RK` is one of :func:`rows_with_ones`. `left_RK` is padded and quantized along K as the loader's precision
    asks; rows after the last run's may be read. The weight has any float dtype and any strides, its K is not padded;
    the loader casts it, or quantizes it along K. Rows after a run's are overwritten, before the next run's are written.
    """
    if isinstance(weight_GNK, PackedWeight):
        assert low_RN is None and added_GN is None, "packed weights are multiplied once, and nothing is added"
        weight_GNK.multiply(left_RK, runs, high_RN)
        return
    if added_GN is None and _in_one_call(left_RK, weight_GNK, runs, loader):
        rows, ends, weight_GKN = runs[-1][2], [0] * len(weight_GNK), weight_GNK.transpose(1, 2)
        for group, _, end in runs:
            ends[group] = end
        for group in range(1, len(ends)):
            ends[group] = max(ends[group], ends[group - 1])
        offsets = torch.tensor(ends, dtype=torch.int32)
        high_RN[:rows].copy_(F.grouped_mm(left_RK[:rows], weight_GKN, offs=offsets))
        if low_RN is not None:
            weights = weight_GKN.unbind(0)
            for group, left, high, low in each_run(runs, left_RK, high_RN, low_RN):
                torch.addmm(high, left, weights[group], beta=-1, out=low)
        return
    assert low_RN is None or added_GN is None, "what is left of a sum with something added is never wanted"
    casts = left_RK.is_cpu and not bf16_matmul_is_fast(left_RK.device)  # generation with copies of weights
    if casts and low_RN is None and added_GN is None and rows_per_run(runs) >= ROWS_WORTH_CASTING:
        end = runs[-1][2]
        sums_RN = loader.scratch.get("grouped_sums", (end, high_RN.shape[1]), torch.float32)
        project_sums(left_RK, weight_GNK, runs, loader, sums_RN)
        high_RN[:end].copy_(sums_RN)
        return
    added = added_GN is not None and left_RK.shape[1] == weight_GNK.shape[2]  # else the rows have ones
    columns_GN, width = None if added else added_GN, left_RK.shape[1]
    for group, (start, end), column, weight_NK in _each(
        weight_GNK, runs, loader, width, cut=False, dense=added, added_GN=columns_GN
    ):
        stop = end if casts else _padded(start, end, left_RK, high_RN)
        columns = slice(column, column + len(weight_NK))
        if added and added_GN is not None:
            high_RN[start:stop, columns].copy_(_linear(left_RK[start:stop], weight_NK, added_GN[group, columns]))
            continue
        low = None if low_RN is None else low_RN[start:stop, columns]
        _multiply(left_RK[start:stop], weight_NK.t(), high_RN[start:stop, columns], low)


def project_sums(
    left_RK: Tensor, weight_GNK: Operand, runs: Runs, loader: Loader, out_RN: Tensor, added_GN: Tensor | None = None
) -> None:
    """The fp32 sums of :func:`project`, of a weight that is not packed; `added_GN` needs no ones here."""
    assert isinstance(weight_GNK, Tensor)
    scratch, left32_RK, rows = loader.scratch, left_RK, len(left_RK)
    if not left_RK.is_cuda:
        held = max(rows, whole_end(runs))
        left32_RK = scratch.get("grouped_left_fp32", (held, left_RK.shape[1]), torch.float32)
        left32_RK[:rows].copy_(left_RK)
        left32_RK[rows:].zero_()
    for _, (start, end), column, weight_NK in _each(weight_GNK, runs, loader, left_RK.shape[1], cut=True):
        out = out_RN[start:end, column : column + len(weight_NK)]
        if left_RK.is_cuda:
            out.copy_(torch.mm(left_RK[start:end], weight_NK.t(), out_dtype=torch.float32))
            continue
        by_column = weight_NK.stride(1) != 1
        shape = tuple(weight_NK.t().shape if by_column else weight_NK.shape)
        weight32 = scratch.get("grouped_weight_fp32", shape, torch.float32)
        weight32_NK = (weight32.t() if by_column else weight32).copy_(weight_NK)
        stop = end if end - start <= FEW_TOKENS else _padded(start, end, left32_RK)
        linear_into(out, left32_RK[start:stop], weight32_NK)
    if added_GN is not None:
        for group, sums in each_run(runs, out_RN):
            sums.add_(added_GN[group])


def _linear(left_RK: Tensor, weight_NK: Tensor, added_N: Tensor | None) -> Tensor:
    """oneDNN's product of bf16 rows and a weight that is packed or without gaps: those with gaps take seconds.

    It reads other operands as if they had no gaps.
    """
    added_N = None if added_N is None else added_N.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left_RK.contiguous(), weight_NK, added_N, "none", [], "")
    return product


def _each(
    weight_GNK: Tensor,
    runs: Runs,
    loader: Loader,
    width: int,
    *,
    cut: bool,
    dense: bool = False,
    added_GN: Tensor | None = None,
) -> Iterator[tuple[int, tuple[int, int], int, Tensor]]:
    """For every part of a group's weight: the group, its first and end row, the part's first column, its ``[n, K]``."""
    wanted = {group: (start, end) for group, start, end in runs}
    for first, column, values_gnK in _pieces(
        weight_GNK, wanted, loader, width, cut=cut, dense=dense, added_GN=added_GN
    ):
        for group, weight_NK in enumerate(values_gnK.unbind(0), first):
            if group in wanted:
                yield group, wanted[group], column, weight_NK


def each_run(runs: Runs, *tensors_R: Tensor) -> Iterator[tuple[Any, ...]]:
    """For every run: its group, and its rows of each tensor."""
    sizes = [end - start for _, start, end in runs]
    parts = [tensor[: runs[-1][2]].split(sizes) for tensor in tensors_R]
    return zip([group for group, _, _ in runs], *parts, strict=True)


def each_whole_run(runs: Runs, *tensors_R: Tensor) -> Iterator[tuple[Any, ...]]:
    """The same in descending order, with as many rows as are multiplied together: zeros are written after a run's.

    These are the first rows of the runs before, which are then of no more use.
    """
    for group, start, end in reversed(runs):
        stop = _padded(start, end, *tensors_R)
        for tensor in tensors_R if stop > end else ():
            tensor[end:stop].zero_()
        yield group, *(tensor[start:stop] for tensor in tensors_R)


def _padded(start: int, end: int, *buffers: Tensor) -> int:
    """Where rows end that are multiplied together: :func:`whole_rows` after `start`, if the buffers have as many."""
    return min(start + whole_rows(end - start), *map(len, buffers))


def project_over_rows(left_RM: Tensor, right_RN: Tensor, out_MN: Tensor) -> None:
    """``out = left^T @ right``, the sum over all rows, in the dtype of `out_MN` (any strides, one of them 1)."""
    if out_MN.stride(-1) != 1:
        left_RM, right_RN, out_MN = right_RN, left_RM, out_MN.t()
    direct = out_MN.dtype == left_RM.dtype and out_MN.stride(-1) == 1
    product = out_MN if direct else left_RM.new_empty(out_MN.shape)
    _multiply(left_RM.t(), right_RN, product, None)
    if not direct:
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
    inner = (weight_GNK.stride(1) == 1) != (weight_GNK.stride(2) == 1)  # of a single column or row both are 1
    aligned = all(stride % 8 == 0 for stride in weight_GNK.stride() if stride != 1) and left_RK.stride(0) % 8 == 0
    return inner and aligned and len(runs) > 1 and runs[-1][2] <= FEW_ROWS * len(runs)


def _pieces(
    weight_GNK: Tensor,
    wanted: dict[int, tuple[int, int]],
    loader: Loader,
    width: int,
    *,
    cut: bool,
    dense: bool,
    added_GN: Tensor | None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Cut the weights into operands that are made together: first group and column, ``[g, n, K]``.

    Groups that are not wanted are left out. With `dense` a group's part has no gaps in memory.
    """
    groups, columns, size = weight_GNK.shape
    strides, gaps = weight_GNK.stride()[1:], False
    if dense:
        gaps = max(strides) != weight_GNK.shape[1 if strides[0] == 1 else 2]
    straight = added_GN is None and 1 in strides and weight_GNK.dtype == loader.compute.operand
    if not gaps and (loader.ready_weights or (not loader.compute.mx and straight)):
        step = max(CAST_PIECE // width, TILE) if cut else columns
        for column in range(0, columns, step):
            yield 0, column, weight_GNK[:, column : column + step]
        return
    by_column = weight_GNK.stride(2) > weight_GNK.stride(1)
    together = max(PIECE // (columns * width), 1) if not by_column or size % TILE == 0 else 1
    step = columns if together > 1 else max(PIECE // width // TILE * TILE, TILE)
    if not loader.compute.mx:  # no MX groups to keep whole: as few products as fit, about equal
        step = -(-columns // max(round(columns * width / PIECE), 1))
    for group in range(0, groups, together):
        part = weight_GNK[group : group + together]
        if not any(number in wanted for number in range(group, group + len(part))):
            continue
        for column in range(0, columns, step):
            operand_gnK = weight_operand(part[:, column : column + step], loader, width, by_column)
            if added_GN is not None:
                added_gn = added_GN[group : group + together, column : column + step]
                for place, values_gn in enumerate(three_parts(added_gn), size):
                    operand_gnK[..., place].copy_(values_gn)
            yield group, column, operand_gnK


def weight_operand(source_GNK: Tensor, loader: Loader, width: int, by_column: bool) -> Tensor:
    """Return `source_GNK` as an operand ``[g, n, width]``: cast, zero padded, and in MX quantized along K.

    The memory runs as the source's does, so that the copy is straight.
    """
    groups, columns, size = source_GNK.shape
    shape = (groups, width, columns) if by_column else (groups, columns, width)
    buffer = loader.scratch.get("grouped_weight", shape, loader.compute.operand)
    operand_GNK = buffer.transpose(1, 2) if by_column else buffer
    operand_GNK[..., :size].copy_(source_GNK)
    if size < width:
        operand_GNK[..., size:].zero_()
    if loader.compute.mx and loader.on_device:
        for part in buffer.split(max(MOST_AT_ONCE // buffer[0].numel(), -(-groups // 2))):
            loader.quantize(part, axis=1 if by_column else 2)
    elif loader.compute.mx:
        loader.quantize(buffer.flatten(0, 1), axis=0 if by_column else 1)
    return operand_GNK
