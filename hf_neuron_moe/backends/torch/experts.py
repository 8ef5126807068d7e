"""Token-expert pairs sorted by expert, and the feed-forward network of each expert over its run of sorted rows.

Legend: T tokens, K experts per token, R = T * K rows (pairs in expert order), H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.tiles import Loader, Span
from hf_neuron_moe.errors import ShapeError


@dataclass(frozen=True)
class SortedPairs:
    """The pairs in expert order."""

    order_R: Tensor
    """Position of each sorted pair in the flattened ``[T, K]``."""
    token_R: Tensor
    """Token of each sorted pair."""
    slot_TK: Tensor
    """Position of each pair in sorted order; the inverse of the sort."""
    offsets: list[int]
    """E + 1 row offsets on the host; pairs beyond the last one belong to other ranks."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """``(expert, first row, end row)`` of every expert that has rows."""
        bounds = zip(self.offsets, self.offsets[1:], strict=False)
        return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if end > start]


_BY_HAND = 64
"""Up to this many pairs sorting a Python list takes less time than dispatching torch's operators."""


def _negative_id(value: int) -> ShapeError:
    return ShapeError.about(
        "top_k_index",
        "made of expert ids of 0 and above",
        f"the id {value}",
        "Mark pairs that belong to no expert of this rank with an id of at least the number of experts.",
    ).named("experts")


def checked_ids(index_TK: Tensor) -> list[int]:
    """Return the expert ids ``[T * K]`` on the host."""
    flat: list[int] = index_TK.reshape(-1).tolist()
    if flat and min(flat) < 0:
        raise _negative_id(min(flat))
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
    lowest = int(flat.min()) if flat.numel() else 0
    if lowest < 0:
        raise _negative_id(lowest)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    token = torch.div(order, index_TK.shape[1], rounding_mode="floor")
    return SortedPairs(order, token, slot.view(index_TK.shape), offsets)


Runs = Sequence[tuple[int, int, int]]
"""``(expert, first row, end row)``, ascending and without gaps."""

Emit = Callable[[int, int, Tensor], None]
"""Takes ``(first row, end row, values)``: fp32 ``[end - first, H]``, valid only during the call."""


@dataclass(frozen=True)
class ExpertStack:
    """Stacked projections: ``[E, 2I, H]`` and ``[E, H, I]``, or ``[E, H, 2I]`` and ``[E, I, H]`` if `transposed`."""

    gate_up: Tensor
    down: Tensor
    transposed: bool

    @property
    def inner(self) -> int:
        """I."""
        return self.down.shape[1 if self.transposed else 2]

    def expert(self, number: int) -> FFNWeights:
        """Return one expert's projections as ``[I, H]``, ``[I, H]`` and ``[H, I]`` views."""
        gate_up_2IH = self.gate_up[number].t() if self.transposed else self.gate_up[number]
        down_HI = self.down[number].t() if self.transposed else self.down[number]
        intermediate = gate_up_2IH.shape[0] // 2
        return FFNWeights(gate_up_2IH[:intermediate], gate_up_2IH[intermediate:], down_HI)

    def zero_without(self, runs: Runs) -> None:
        """Write zeros to the experts that have no rows."""
        busy = {expert for expert, _, _ in runs}
        for expert in set(range(self.gate_up.shape[0])) - busy:
            self.gate_up[expert].zero_()
            self.down[expert].zero_()


@dataclass(frozen=True)
class ExpertGrads:
    """Where results go; None means not wanted. ``weights`` is overwritten whole, idle experts with zeros.

    ``x`` receives each run's rows of dX; ``scale_R`` is fp32 in row order; ``rounded`` as in :class:`FFNGrads`. With
    ``add`` the weight gradients are added and idle experts left alone. ``bias_E2I`` is fp32, its idle rows are kept.
    """

    weights: ExpertStack | None
    x: Emit | None
    scale_R: Tensor | None
    rounded: torch.dtype = torch.float32
    add: bool = False
    bias_E2I: Tensor | None = None


@dataclass(frozen=True)
class ScaledRows(RowSource):
    """Rows times a factor each, rounded to `rounded`: what enters a matmul where the affinity sits on the output.

    ``scale_R`` is fp32, one factor per row.
    """

    scale_R: Tensor | None = None
    rounded: torch.dtype = torch.float32

    def rows(self, start: int, end: int) -> ScaledRows:
        """Return the source of the rows ``start..end``."""
        part = super().rows(start, end)
        scale_R = None if self.scale_R is None else self.scale_R[start:end]
        return ScaledRows(part.values, part.index, scale_R, self.rounded)

    def take(self, span: Span) -> Tensor:
        """Return the rows of `span`."""
        rows_RH = super().take(span)
        if self.scale_R is None:
            return rows_RH
        scale_R1 = self.scale_R[span.start : span.stop, None]
        if self.rounded == rows_RH.dtype and self.index is not None:
            return rows_RH.mul_(scale_R1)  # a gather made fresh rows
        return (rows_RH * scale_R1).to(self.rounded)


def add_rows(total_TH: Tensor, token_R: Tensor) -> Emit:
    """Return an :data:`Emit` that adds each run's rows to their tokens' rows of `total_TH`.

    A token occurs at most once per run and runs come in order, so the sums are deterministic on every device.
    """

    def emit(start: int, end: int, rows_RH: Tensor) -> None:
        total_TH.index_add_(0, token_R[start:end], rows_RH)

    return emit


def rows_per_run(runs: Runs) -> float:
    """Average number of rows of the experts that have any."""
    return runs[-1][2] / len(runs) if runs else 0.0


def run_experts_forward(
    x: RowSource,
    runs: Runs,
    stack: ExpertStack,
    loader: Loader,
    emit: Emit,
    *,
    save: Checkpoints,
    scale_R: Tensor | None,
    block_size: int,
    up_cut: int | None = None,
) -> None:
    """Compute every run and hand its output rows to `emit`; other arguments as in :func:`ffn_forward`."""
    for expert, start, end in runs:
        out_RH = loader.scratch.get("expert_out", (end - start, x.values.shape[1]), torch.float32)
        ffn_forward(
            x.rows(start, end),
            stack.expert(expert),
            loader,
            out_RH,
            save=save.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
            up_cut=up_cut,
        )
        emit(start, end, out_RH)


def run_experts_backward(
    dout: RowSource,
    x: RowSource,
    runs: Runs,
    stack: ExpertStack,
    loader: Loader,
    grads: ExpertGrads,
    *,
    saved: Checkpoints,
    scale_R: Tensor | None,
    block_size: int,
    gating: Gating | None = None,
    up_cut: int | None = None,
) -> None:
    """Fill `grads`; arguments as in :class:`FFNBackward`."""
    for expert, start, end in runs:
        dx_RH = None
        if grads.x is not None:
            dx_RH = loader.scratch.get("expert_out", (end - start, x.values.shape[1]), torch.float32)
        weights = None if grads.weights is None else grads.weights.expert(expert)
        FFNBackward(
            dout.rows(start, end),
            x.rows(start, end),
            stack.expert(expert),
            loader,
            FFNGrads(
                gate_IH=None if weights is None else weights.gate_IH,
                up_IH=None if weights is None else weights.up_IH,
                down_HI=None if weights is None else weights.down_HI,
                x_RH=dx_RH,
                scale_R=None if grads.scale_R is None else grads.scale_R[start:end],
                rounded=grads.rounded,
                add=grads.add,
                bias_2I=None if grads.bias_E2I is None else grads.bias_E2I[expert],
            ),
            saved=saved.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
            gating=gating,
            up_cut=up_cut,
        ).run()
        if grads.x is not None and dx_RH is not None:
            grads.x(start, end, dx_RH)
    if grads.weights is not None and not grads.add:
        grads.weights.zero_without(runs)
