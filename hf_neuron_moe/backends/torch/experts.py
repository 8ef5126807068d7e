"""Token-expert pairs sorted by expert, and the feed-forward network of each expert over its run of sorted rows.

A dense MLP is one expert whose rows are the tokens.

Legend: T tokens, K experts per token, R = T * K rows (pairs in expert order), H hidden, I intermediate, E experts,
G groups: the experts of a layer, or one for a dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.backends.torch.compute import Scratch, call_scratch
from hf_neuron_moe.backends.torch.device_runs import DeviceRuns, sort_on_device
from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.grouped_weights import (
    ExpertStack as ExpertStack,
    GroupedWeights,
    WeightGrads,
    split_gate_up as split_gate_up,
    stacked as stacked,
)
from hf_neuron_moe.backends.torch.tiles import Loader, Span
from hf_neuron_moe.errors import ShapeError

Runs = Sequence[tuple[int, int, int]]
"""``(group, first row, end row)``, ascending and without gaps; groups without rows are left out."""


@dataclass(frozen=True)
class SortedPairs:
    """The pairs in expert order."""

    order_R: Tensor  # position of each sorted pair in the flattened ``[T, K]``
    token_R: Tensor  # token of each sorted pair
    slot_TK: Tensor  # position of each pair in sorted order; the inverse of the sort
    offsets: list[int]  # E + 1 row offsets on the host; pairs beyond the last one belong to other ranks

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The experts that have rows."""
        bounds = zip(self.offsets, self.offsets[1:], strict=False)
        return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if end > start]


_ADDED = 1 << 18  # elements of rows that are added at a time
_IN_ORDER = 16  # so many numbers torch's sum adds one after the other on CPUs; of more it adds partial sums
_BY_HAND = 64  # up to this many pairs sorting a Python list takes less time than dispatching torch's operators


_LOWEST = "top_k_index: expert ids of 0 and above are needed"


def _check_lowest(expert: int) -> None:
    if expert < 0:
        raise ShapeError.about(
            "top_k_index",
            "made of expert ids of 0 and above",
            f"the id {expert}",
            "Mark pairs that belong to no expert of this rank with an id of at least the number of experts.",
        ).named("experts")


def check_ids_on_device(index_TK: Tensor) -> None:
    """Raise the same error where ids are on the host, elsewhere an assertion of the device."""
    try:
        torch._assert_async((index_TK >= 0).all(), _LOWEST)
    except RuntimeError as error:
        if _LOWEST not in str(error):
            raise
        _check_lowest(int(index_TK.min()))


def checked_ids(index_TK: Tensor) -> list[int]:
    """Return the expert ids ``[T * K]`` on the host."""
    flat: list[int] = index_TK.reshape(-1).tolist()
    _check_lowest(min(flat, default=0))
    return flat


def _sort_by_hand(index_TK: Tensor, experts: int) -> SortedPairs:
    flat = checked_ids(index_TK)
    order = sorted(range(len(flat)), key=flat.__getitem__)
    offsets, slot, top_k = [0] * (experts + 1), [0] * len(flat), index_TK.shape[1]
    for position, pair in enumerate(order):
        slot[pair] = position
        if flat[pair] < experts:
            offsets[flat[pair] + 1] += 1
    for expert in range(experts):
        offsets[expert + 1] += offsets[expert]
    tokens = [pair // top_k for pair in order]
    order_R, token_R, slot_R = torch.tensor((order, tokens, slot), dtype=torch.int64).unbind(0)
    return SortedPairs(order_R, token_R, slot_R.view(index_TK.shape), offsets)


def sort_pairs(index_TK: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of a top-k routing by expert; tokens stay in ascending order within an expert.

    Ids of `experts` and above are sentinels of expert parallelism and sort behind the rest; a negative one is an error.
    """
    if index_TK.numel() <= _BY_HAND and index_TK.device.type == "cpu":
        return _sort_by_hand(index_TK, experts)
    flat = index_TK.reshape(-1).clamp(max=experts)
    _check_lowest(int(flat.min()) if flat.numel() else 0)
    order = torch.argsort(flat, stable=True)
    offsets = [0]
    for count in torch.bincount(flat, minlength=experts + 1)[:experts].tolist():
        offsets.append(offsets[-1] + count)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    token = torch.div(order, index_TK.shape[1], rounding_mode="floor")
    return SortedPairs(order, token, slot.view(index_TK.shape), offsets)


def rows_per_run(runs: Runs) -> float:
    """Return the average number of rows of the experts that have any."""
    return runs[-1][2] / len(runs) if runs else 0.0


class RowSums(NamedTuple):
    """The fp32 total ``[T, H]`` to which each run's rows are added, in their tokens' places."""

    total_TH: Tensor
    token_R: Tensor | None  # None where rows are the tokens, which are then written

    def buffer(self, start: int, end: int, scratch: Scratch) -> Tensor:
        """Return where to make the rows of a run: in the total itself if they are tokens."""
        if self.token_R is None:
            return self.total_TH[start:end]
        return scratch.get("expert_out", (end - start, self.total_TH.shape[1]), torch.float32)

    def __call__(self, start: int, end: int, rows_RH: Tensor) -> None:
        """Add the rows; a token occurs once per run and runs come in order, so the sums are deterministic."""
        if self.token_R is not None:
            self.total_TH.index_add_(0, self.token_R[start:end], rows_RH)


@dataclass(frozen=True)
class Rows:
    """The rows of a call in group order."""

    runs: Runs
    count: int  # R; rows behind the last run belong to experts of other ranks
    token_R: Tensor | None = None  # which token each row is; None where rows are the tokens
    slot_TK: Tensor | None = None  # the rows of each token; None where rows are the tokens
    scale_R: Tensor | None = None  # fp32 factor on each row's intermediate, or None
    block_size: int | None = None  # rows per MoE block; None for a dense MLP
    on_device: DeviceRuns | None = None  # the runs, where the host does not know them

    @classmethod
    def of_dense(cls, tokens: int) -> Rows:
        """Return the rows of a dense MLP."""
        return cls([(0, 0, tokens)] if tokens else [], tokens)

    @classmethod
    def of_routing(cls, routing: Routing, experts: int, block_size: int | None = None) -> Rows:
        """Return the sorted pairs, with their routing weights as factors."""
        pairs = sort_pairs(routing.index_TK, experts)
        scale_R = routing.weight_TK.reshape(-1).index_select(0, pairs.order_R).float()
        return cls(pairs.runs, len(scale_R), pairs.token_R, pairs.slot_TK, scale_R, block_size)

    @classmethod
    def of_routing_on_device(cls, routing: Routing, experts: int, block_size: int | None = None) -> Rows:
        """Return the same without a look at the ids."""
        check_ids_on_device(routing.index_TK)
        pairs = sort_on_device(routing.index_TK, experts)
        scale_R = routing.weight_TK.reshape(-1).index_select(0, pairs.order_R).float()
        return cls([], len(scale_R), pairs.token_R, pairs.slot_TK, scale_R, block_size, pairs.runs)

    @property
    def end(self) -> int:
        return self.runs[-1][2] if self.runs else 0

    def source(self, values_TH: Tensor) -> RowSource:
        return RowSource(values_TH, self.token_R)

    def sums(self, like_TH: Tensor) -> RowSums:
        """Return a total of zeros."""
        return RowSums(torch.zeros(like_TH.shape, dtype=torch.float32, device=like_TH.device), self.token_R)

    def scale(self, start: int, end: int) -> Tensor | None:
        """Return the factors of some rows ``[r, 1]``."""
        return None if self.scale_R is None else self.scale_R[start:end, None]


@dataclass(frozen=True)
class ExpertGrads:
    """Where results go; None means not wanted. Other fields are those of :class:`FFNGrads`."""

    weights: GroupedWeights | None  # overwritten whole, idle experts with zeros; with `add`, those are left alone
    x: RowSums | None
    scale_R: Tensor | None  # in row order
    rounded: torch.dtype = torch.float32
    add: bool = False
    bias_E2I: Tensor | None = None  # the rows of idle experts are left alone


@dataclass(frozen=True)
class ScaledRows(RowSource):
    """Rows times a factor each, rounded to `rounded`: what enters a matmul where the affinity sits on the output."""

    scale_R: Tensor | None = None  # fp32
    rounded: torch.dtype = torch.float32

    def rows(self, start: int, end: int) -> Self:
        """Return the source of the rows ``start..end``."""
        return replace(super().rows(start, end), scale_R=None if self.scale_R is None else self.scale_R[start:end])

    def take(self, span: Span) -> Tensor:
        """Return the rows of `span`."""
        rows_RH = super().take(span)
        if self.scale_R is None:
            return rows_RH
        scale_R1 = self.scale_R[span.part, None]
        if self.rounded == rows_RH.dtype and self.index is not None:
            return rows_RH.mul_(scale_R1)  # a gather made fresh rows
        return (rows_RH * scale_R1).to(self.rounded)


def sum_over_experts(out_RH: Tensor, rows: Rows) -> Tensor:
    """Add each token's rows in fp32: ``[T, H]``; those of other ranks' experts are zeros. Rows that are tokens stay."""
    slot_TK = rows.slot_TK
    if slot_TK is None:  # a view could not be changed in place by its user
        return out_RH if len(out_RH) == rows.count else out_RH[: rows.count].clone()
    if rows.on_device is not None:
        return _sum_on_device(out_RH, rows.on_device, slot_TK)
    if rows.end < rows.count:
        out_RH[rows.end :].zero_()
    shape = (len(slot_TK), out_RH.shape[1])
    if not slot_TK.shape[1]:
        return torch.zeros(shape, dtype=torch.float32, device=out_RH.device)
    total_TH = torch.empty(shape, dtype=torch.float32, device=out_RH.device)
    scratch = call_scratch(out_RH.device)
    for first in range(0, len(slot_TK), step := max(_ADDED // out_RH.shape[1], 1)):
        part = total_TH[first : first + step]
        out_tH = scratch.get("added_rows", tuple(part.shape), out_RH.dtype)
        for number, slot_t in enumerate(slot_TK[first : first + step].unbind(1)):
            torch.index_select(out_RH, 0, slot_t, out=out_tH)
            part.copy_(out_tH) if number == 0 else part.add_(out_tH)
    return total_TH


def _sum_on_device(out_RH: Tensor, runs: DeviceRuns, slot_TK: Tensor) -> Tensor:
    """The same, a token's experts in ascending order, one after the other."""
    if not out_RH.is_cpu:  # where products leave rows of no group as they are
        out_RH = torch.where(runs.of_a_group_R[:, None], out_RH, 0)
    out_TKH = out_RH.index_select(0, slot_TK.sort(1).values.flatten()).view(*slot_TK.shape, out_RH.shape[1])
    total_TH = out_TKH[:, :_IN_ORDER].sum(1, dtype=torch.float32)
    for out_TH in out_TKH[:, _IN_ORDER:].unbind(1):
        total_TH.add_(out_TH)
    return total_TH


def run_experts_forward(
    x_TH: Tensor, rows: Rows, weights: GroupedWeights, loader: Loader, save: Checkpoints, gating: Gating = SILU
) -> Tensor:
    """Return the sum of each token's rows, fp32 ``[T, H]``, and fill `save`: :func:`ffn_forward` run by run."""
    x, sums = rows.source(x_TH), rows.sums(x_TH)
    for expert, start, end in rows.runs:
        out_RH = sums.buffer(start, end, loader.scratch)
        ffn_forward(
            x.rows(start, end),
            weights.expert(expert),
            loader,
            out_RH,
            save=save.rows(start, end),
            scale_R1=rows.scale(start, end),
            block_size=rows.block_size,
            gating=gating,
        )
        sums(start, end, out_RH)
    return sums.total_TH


def run_experts_backward(
    dout: RowSource,
    x: RowSource,
    runs: Runs,
    stack: GroupedWeights,
    loader: Loader,
    grads: ExpertGrads,
    *,
    saved: Checkpoints,
    scale_R: Tensor | None,
    block_size: int | None,
    recompute_loader: Loader | None = None,
    gating: Gating = SILU,
) -> None:
    """Fill `grads`; arguments as in :class:`FFNBackward`."""
    for expert, start, end in runs:
        dx_RH = None if grads.x is None else grads.x.buffer(start, end, loader.scratch)
        FFNBackward(
            dout.rows(start, end),
            x.rows(start, end),
            stack.expert(expert),
            loader,
            FFNGrads(
                None if grads.weights is None else grads.weights.expert(expert),
                dx_RH,
                None if grads.scale_R is None else grads.scale_R[start:end],
                rounded=grads.rounded,
                add=grads.add,
                bias_2I=None if grads.bias_E2I is None else grads.bias_E2I[expert],
            ),
            saved.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
            recompute_loader=recompute_loader,
            gating=gating,
        ).run()
        if grads.x is not None and dx_RH is not None:
            grads.x(start, end, dx_RH)
    if grads.weights is not None and not grads.add:
        grads.weights.zero_without(runs)


@dataclass(frozen=True)
class BlockBackward:
    """The backward of a block over all its rows: by tiles here, by bf16 products of whole layers in a subclass."""

    dout_TH: Tensor
    x_TH: Tensor
    rows: Rows
    weights: GroupedWeights
    loader: Loader
    saved: Checkpoints
    grads: WeightGrads | None  # overwritten; None where they are not wanted, as all results
    d_scale_R: Tensor | None  # fp32, zero before
    d_bias_G2I: Tensor | None  # fp32, of gate and up, zero before
    wants_input: bool
    recompute_loader: Loader | None = None  # forms the operands of the forward's products where that differs
    gating: Gating = SILU

    def run(self) -> Tensor | None:
        """Write the gradients that are wanted; return that of the tokens ``[T, H]``."""
        rows, sums = self.rows, self.rows.sums(self.x_TH) if self.wants_input else None
        rounded = torch.bfloat16 if self.loader.compute.mx else torch.float32
        run_experts_backward(
            rows.source(self.dout_TH),
            rows.source(self.x_TH),
            rows.runs,
            self.weights,
            self.loader,
            ExpertGrads(
                None if self.grads is None else self.grads.grouped(),
                sums,
                self.d_scale_R,
                rounded,
                bias_E2I=self.d_bias_G2I,
            ),
            saved=self.saved,
            scale_R=rows.scale_R,
            block_size=rows.block_size,
            recompute_loader=self.recompute_loader,
            gating=self.gating,
        )
        return None if sums is None else sums.total_TH.to(self.x_TH.dtype)
