"""Sums and exchanges between the processes that share a block, differentiable.

Tensors are never changed in place: another function may still hold what it returned. All processes of a group call the
same function at the same place of forward and backward, also those without rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Exchange(torch.autograd.Function):
    """Rows to other processes in the forward, their gradients back in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, place_R: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(place_R)  # index_add would keep the rows too
        ctx.dtype = rows.dtype
        total = torch.zeros(count, *rows.shape[1:], dtype=torch.float32, device=rows.device)
        return total.index_add_(0, place_R, rows.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return grads[0][place_R].to(ctx.dtype), None, None


def sum_rows(rows: Tensor, place_R: Tensor, count: int) -> Tensor:
    """Return fp32 ``[count, ...]``: in each place the sum of the rows that have it in `place_R`, in their order."""
    result: Tensor = _SumRows.apply(rows, place_R, count)
    return result


def sum_gradients(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return `tensor`, equal on all processes of `group`; its gradient is the sum of theirs."""
    result: Tensor = _SumGradients.apply(tensor, group)
    return result


def sum_results(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the group's tensors; each one's gradient is that of the sum."""
    result: Tensor = _SumResults.apply(tensor, group)
    return result


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send ``sent[d]`` of `rows` to process d of `group`, in order; return the rows received, in their senders' order.

    ``received[d]`` rows come from process d.
    """
    result: Tensor = _Exchange.apply(rows, sent, received, group)
    return result


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Do what :func:`exchange` does, without gradients."""
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
