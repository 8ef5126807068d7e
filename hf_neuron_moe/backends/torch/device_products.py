"""Products of all groups' rows as one operator each, where only the device knows the borders (``device_runs.py``).

How an operator multiplies is the device's affair. On CPUs the host has the borders, so these are the products of
``grouped_products.py``. They take fp32 copies of the operands for fp32 sums, and for all sums where there are no bf16
instructions. On CUDA a bf16 result is torch's grouped product. It gives no fp32 result, which is a product of
``backends/triton`` there. Without Triton every group is multiplied by itself, and the host waits for the borders.

Legend: G groups, R rows, N columns of a result, K contraction axis, M rows of a result that sums over rows.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import (
    FEW_PAIRS,
    SMALL_EXPERT,
    bf16_matmul_is_fast,
    call_scratch,
    grouped_operands,
    most_pairs,
)
from hf_neuron_moe.backends.torch.cpu.matmul import matmul_over_rows_into
from hf_neuron_moe.backends.torch.device_runs import DeviceRuns
from hf_neuron_moe.backends.torch.experts import Runs
from hf_neuron_moe.backends.torch.gradient_memory import gradient_memory
from hf_neuron_moe.backends.torch.grouped_products import (
    Operand,
    project,
    project_over_rows,
    project_sums,
    three_parts,
    weight_operand,
)
from hf_neuron_moe.backends.torch.tiles import Loader

_Tokens = tuple[Tensor | None, Tensor | None]  # whose rows an operand's are, in the order of the sorted pairs
GATHERED = 1 << 18  # elements of tokens' rows that are gathered at once
CAST = 1 << 17  # elements of the weights whose groups are cast at once, so that copies stay small
_ALIGNED = 8  # elements; torch's grouped product wants strides of whole 16 bytes


@torch.library.custom_op("hf_neuron_moe::grouped_product", mutates_args=())
def grouped_product(left_RK: Tensor, weight_GNK: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ weight^T`` ``[R, N]`` of each group's rows and weight: fp32 sums, rounded once to `dtype`.

    Operands have one dtype, bf16 or fp32, or only the weight is bf16 and is cast where it is read; the result has that
    of the rows, or it is fp32. Rows of no group are zeros on CPUs and hold anything elsewhere.
    """
    if _has_borders(left_RK):
        if _in_one_call(left_RK, weight_GNK, len(ends_G), dtype):
            return _product_in_pieces(left_RK, weight_GNK, ends_G, dtype)
        return _product_on_host(left_RK, weight_GNK, ends_G, dtype)
    if dtype == torch.bfloat16:
        left_RK, weight_GNK = (_padded(part, -1) for part in (left_RK, weight_GNK))
        weight_GKN = _padded(weight_GNK, -2).transpose(1, 2)
        return F.grouped_mm(left_RK, weight_GKN, offs=ends_G)[:, : weight_GNK.shape[1]].contiguous()
    if _triton_is_there():
        from hf_neuron_moe.backends.triton import expert_gemm

        return expert_gemm.grouped_product(left_RK, weight_GNK, ends_G, dtype=dtype)
    parts = zip(_each_group(ends_G, left_RK), weight_GNK, strict=True)
    product = torch.cat([_multiplied(left, weight.to(left.dtype).t(), dtype) for (left,), weight in parts])
    return F.pad(product, (0, 0, 0, len(left_RK) - len(product)))


@grouped_product.register_fake
def _(left_RK: Tensor, weight_GNK: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    return left_RK.new_empty((len(left_RK), weight_GNK.shape[1]), dtype=dtype)


@torch.library.custom_op("hf_neuron_moe::grouped_over_rows", mutates_args=())
def grouped_over_rows(
    left_RM: Tensor,
    right_RN: Tensor,
    ends_G: Tensor,
    dtype: torch.dtype,
    left_token_R: Tensor | None = None,
    right_token_R: Tensor | None = None,
) -> Tensor:
    """Return ``left^T @ right`` of each group's rows ``[G, M, N]``, zeros for a group without any; as above.

    A result of fp32 operands may be rounded to bf16, too. fp32 rows may be those of tokens: ``left[left_token]``.
    """
    tokens = left_token_R, right_token_R
    if _has_borders(left_RM):
        if _in_one_call(left_RM, right_RN, len(ends_G), dtype, tokens):
            return _over_rows_in_pieces(left_RM, right_RN, ends_G, dtype, tokens)
        return _over_rows_on_host(left_RM, right_RN, _host_runs(ends_G), len(ends_G), dtype, tokens)
    if left_RM.dtype == dtype == torch.bfloat16:
        left, right = _padded(left_RM, -1), _padded(right_RN, -1)
        product = F.grouped_mm(left.t(), right, offs=ends_G)
        return product[:, : left_RM.shape[1], : right_RN.shape[1]].contiguous()
    if _triton_is_there():
        from hf_neuron_moe.backends.triton import expert_gemm

        out_GMN = left_RM.new_empty((len(ends_G), left_RM.shape[1], right_RN.shape[1]), dtype=dtype)
        return expert_gemm.weight_gradient(left_RM, right_RN, ends_G, out_GMN, tokens=tokens)
    ends = ends_G.tolist()
    bounds = zip([0, *ends], ends, strict=False)
    parts = (_rows((left_RM, right_RN), tokens, slice(*bound)) for bound in bounds)
    return torch.stack([_multiplied(left.t(), right, dtype) for left, right in parts])


@grouped_over_rows.register_fake
def _(
    left_RM: Tensor,
    right_RN: Tensor,
    ends_G: Tensor,
    dtype: torch.dtype,
    left_token_R: Tensor | None = None,
    right_token_R: Tensor | None = None,
) -> Tensor:
    return left_RM.new_empty((len(ends_G), left_RM.shape[1], right_RN.shape[1]), dtype=dtype)


def project_on_device(
    left_RK: Tensor,
    weight_GNK: Operand,
    runs: DeviceRuns,
    loader: Loader,
    added_GN: Tensor | None = None,
    *,
    sums: bool = False,
) -> Tensor:
    """Return the products of ``project``, or with `sums` of ``project_sums``, of all groups at once."""
    assert isinstance(weight_GNK, Tensor), "packed weights are for few rows on a CPU"
    with_ones = added_GN is not None and not sums
    multiplied = weight_GNK.dtype in (left_RK.dtype, torch.bfloat16)  # bf16 with fp32 rows, too
    straight = not with_ones and multiplied and weight_GNK.shape[2] == left_RK.shape[1]
    operand_GNK = weight_GNK
    if loader.compute.mx or not straight or 1 not in weight_GNK.stride()[1:]:
        by_column = weight_GNK.stride(2) > weight_GNK.stride(1)
        operand_GNK = weight_operand(weight_GNK, loader, left_RK.shape[1], by_column)
    if with_ones and added_GN is not None:
        for place, values_GN in enumerate(three_parts(added_GN), weight_GNK.shape[2]):
            operand_GNK[..., place].copy_(values_GN)
    dtype = torch.float32 if sums else loader.compute.operand
    product_RN = grouped_product(left_RK, operand_GNK, runs.ends_G, dtype)
    return product_RN.add_(runs.of_rows(added_GN)) if sums and added_GN is not None else product_RN


def _has_borders(operand: Tensor) -> bool:
    """Whether the host has what lies on the device of `operand`."""
    return operand.is_cpu


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _multiplied(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if left.dtype == torch.bfloat16 and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _in_one_call(left: Tensor, right: Tensor, groups: int, dtype: torch.dtype, tokens: _Tokens = (None, None)) -> bool:
    """Whether torch's grouped product is the fastest on the host: of few rows per group it loops faster than Python.

    Small operands are cast for it. It is torch's default product, which large ones in fp32 are not given to.
    """
    most = most_pairs("fp32") if left.dtype == torch.float32 else FEW_PAIRS
    rows = len(left if tokens[0] is None else tokens[0])
    if dtype not in (left.dtype, torch.float32) or rows > most * groups:
        return False
    largest = right[0].numel() if right.dim() == 3 else left.shape[1] * right.shape[1]
    fast = bf16_matmul_is_fast(left.device) if dtype == torch.bfloat16 else largest <= SMALL_EXPERT
    gathered = (part for part, token_R in zip((left, right), tokens, strict=True) if token_R is not None)
    return fast and all(map(_is_straight, (left, right))) and all(part.shape[1] % _ALIGNED == 0 for part in gathered)


def _product_in_pieces(left_RK: Tensor, weight_GNK: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    """Return torch's grouped product; operands of another dtype than it are cast piece by piece."""
    if left_RK.dtype == weight_GNK.dtype == dtype:
        product_RN = F.grouped_mm(left_RK, weight_GNK.transpose(1, 2), offs=ends_G)
        if (end := int(ends_G[-1])) < len(product_RN):
            product_RN[end:].zero_()
        return product_RN
    product_RN = left_RK.new_empty((len(left_RK), weight_GNK.shape[1]), dtype=dtype)
    for groups, rows, offsets in _pieces_of_groups(ends_G, weight_GNK[0].numel()):
        weight_GKN = weight_GNK[groups].to(dtype).transpose(1, 2)
        product_RN[rows].copy_(F.grouped_mm(left_RK[rows].to(dtype), weight_GKN, offs=offsets))
    product_RN[int(ends_G[-1]) :].zero_()
    return product_RN


def _over_rows_in_pieces(
    left_RM: Tensor, right_RN: Tensor, ends_G: Tensor, dtype: torch.dtype, tokens: _Tokens
) -> Tensor:
    """Return sums over few rows per group, multiplied in turn into memory of gradients.

    Rows are gathered and cast for as many groups as stay in the caches.
    """
    widths, runs = (left_RM.shape[1], right_RN.shape[1]), _host_runs(ends_G)
    out_GMN = gradient_memory().empty((len(ends_G), *widths), dtype, left_RM.device)
    out, busy = out_GMN.unbind(0), {group for group, _, _ in runs}
    if len(busy) < len(out):
        torch._foreach_zero_([part for group, part in enumerate(out) if group not in busy])
    copied = [
        part.shape[1]
        for part, rows in zip((left_RM, right_RN), tokens, strict=True)
        if rows is not None or part.dtype != dtype
    ]
    for piece in _pieces_of_runs(runs, GATHERED // max(sum(copied), 1)):
        left, right = _rows((left_RM, right_RN), tokens, slice(piece[0][1], piece[-1][2]))
        sizes = [end - start for _, start, end in piece]
        rows = zip(left.to(dtype).t().split(sizes, 1), right.to(dtype).split(sizes), strict=True)
        for (group, _, _), operands in zip(piece, rows, strict=True):
            torch.mm(*operands, out=out[group])
    return out_GMN


def _pieces_of_runs(runs: Runs, rows: int) -> Iterator[Runs]:
    """Cut runs into pieces of at most so many rows, or one run."""
    first = 0
    for number, (_, _, end) in enumerate(runs):
        if number > first and end - runs[first][1] > rows:
            yield runs[first:number]
            first = number
    if runs:
        yield runs[first:]


def _pieces_of_groups(ends_G: Tensor, elements: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut groups of so many elements each into pieces that stay in the caches: their groups, rows, and ends in these.

    Pieces without rows are left out.
    """
    ends, together = [0, *ends_G.tolist()], max(CAST // elements, 1)
    for first in range(0, len(ends_G), together):
        last = min(first + together, len(ends_G))
        if ends[first] < ends[last]:
            yield slice(first, last), slice(ends[first], ends[last]), ends_G[first:last] - ends[first]


def _product_on_host(left_RK: Tensor, weight_GNK: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product group by group; where it is one of fp32 copies, these are made piece by piece."""
    loader = _ready_loader(left_RK)
    out_RN = left_RK.new_empty((len(left_RK), weight_GNK.shape[1]), dtype=dtype)
    if dtype == torch.bfloat16 and bf16_matmul_is_fast(left_RK.device):
        project(left_RK, weight_GNK, _host_runs(ends_G), loader, out_RN)
    else:
        for groups, rows, offsets in _pieces_of_groups(ends_G, weight_GNK[0].numel()):
            out = out_RN[rows]
            sums = out if dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
            project_sums(left_RK[rows], weight_GNK[groups], _host_runs(offsets), loader, sums)
            if sums is not out:
                out.copy_(sums)
    out_RN[int(ends_G[-1]) :].zero_()
    return out_RN


def _over_rows_on_host(
    left_RM: Tensor,
    right_RN: Tensor,
    runs: Runs,
    groups: int,
    dtype: torch.dtype,
    tokens: _Tokens,
) -> Tensor:
    out_GMN = gradient_memory().empty((groups, left_RM.shape[1], right_RN.shape[1]), dtype, left_RM.device)
    if len(runs) < groups:
        out_GMN.zero_()
    if not runs:
        return out_GMN
    native = dtype == torch.bfloat16 and bf16_matmul_is_fast(left_RM.device)
    sums_MN = out_GMN.new_empty(out_GMN.shape[1:], dtype=torch.float32) if dtype != torch.float32 else None
    for group, start, end in runs:
        left, right = _rows((left_RM, right_RN), tokens, slice(start, end))
        if native:
            project_over_rows(left, right, out_GMN[group])
            continue
        sums = out_GMN[group] if sums_MN is None else sums_MN
        matmul_over_rows_into(sums, left.float(), right.float(), len(left), accumulate=False)
        if sums_MN is not None:
            out_GMN[group].copy_(sums_MN)
    return out_GMN


def _rows(values: tuple[Tensor, Tensor], tokens: _Tokens, rows: slice) -> tuple[Tensor, Tensor]:
    """Return these rows of both operands, gathered where they are those of tokens."""
    left, right = (
        part[rows] if token_R is None else part.index_select(0, token_R[rows])
        for part, token_R in zip(values, tokens, strict=True)
    )
    return left, right


def _ready_loader(operand: Tensor) -> Loader:
    precision = "fp32" if operand.dtype == torch.float32 else "bf16"
    return Loader(grouped_operands(precision), call_scratch(operand.device), ready_weights=True)


def _host_runs(ends_G: Tensor) -> Runs:
    ends = ends_G.tolist()
    bounds = zip([0, *ends], ends, strict=False)
    return [(group, start, end) for group, (start, end) in enumerate(bounds) if end > start]


def _each_group(ends_G: Tensor, *tensors_R: Tensor) -> Iterator[tuple[Tensor, ...]]:
    ends = ends_G.tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        yield tuple(tensor[start:end] for tensor in tensors_R)


def _padded(operand: Tensor, axis: int) -> Tensor:
    """Return `operand` with one of its last two axes zero padded, and its strides, as torch's product wants them."""
    more = -operand.shape[axis] % _ALIGNED
    if more:
        return F.pad(operand, (0, more) if axis == -1 else (0, 0, 0, more))
    return operand if _is_straight(operand) else operand.contiguous()


def _is_straight(operand: Tensor) -> bool:
    strides = operand.stride()
    return strides[-2:].count(1) == 1 and all(stride % _ALIGNED == 0 for stride in strides if stride != 1)
