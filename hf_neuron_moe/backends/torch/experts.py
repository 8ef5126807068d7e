"""The feed-forward network of each expert over its run of sorted rows.

Legend: R rows in expert order, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.tiling import Loader

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

    def expert(self, number: int) -> FFNWeights:
        """Return one expert's projections as ``[I, H]``, ``[I, H]`` and ``[H, I]`` views."""
        gate_up_2IH = self.gate_up[number].t() if self.transposed else self.gate_up[number]
        down_HI = self.down[number].t() if self.transposed else self.down[number]
        intermediate = gate_up_2IH.shape[0] // 2
        return FFNWeights(gate_up_2IH[:intermediate], gate_up_2IH[intermediate:], down_HI)


@dataclass(frozen=True)
class ExpertGrads:
    """Where results go; None means not wanted. ``weights`` is overwritten whole, idle experts with zeros.

    ``x`` receives each run's rows of dX; ``scale_R`` is fp32 in row order; ``rounded`` as in :class:`FFNGrads`.
    """

    weights: ExpertStack | None
    x: Emit | None
    scale_R: Tensor | None
    rounded: torch.dtype = torch.float32


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
            ),
            saved=saved.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
        ).run()
        if grads.x is not None and dx_RH is not None:
            grads.x(start, end, dx_RH)
    if grads.weights is not None:
        busy = {expert for expert, _, _ in runs}
        for expert in set(range(grads.weights.gate_up.shape[0])) - busy:
            grads.weights.gate_up[expert].zero_()
            grads.weights.down[expert].zero_()
