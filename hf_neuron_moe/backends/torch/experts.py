"""The feed-forward network of each expert over its run of sorted rows.

Legend: R rows in expert order, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.tiling import Loader

Runs = Sequence[tuple[int, int, int]]
"""``(expert, first row, end row)``, ascending and without gaps."""


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

    ``x_RH`` and ``scale_R`` are fp32 in row order; ``rounded`` as in :class:`FFNGrads`.
    """

    weights: ExpertStack | None
    x_RH: Tensor | None
    scale_R: Tensor | None
    rounded: torch.dtype = torch.float32


def rows_per_run(runs: Runs) -> float:
    """Average number of rows of the experts that have any."""
    return runs[-1][2] / len(runs) if runs else 0.0


def run_experts_forward(
    x: RowSource,
    runs: Runs,
    stack: ExpertStack,
    loader: Loader,
    out_RH: Tensor,
    *,
    save: Checkpoints,
    scale_R: Tensor | None,
    block_size: int,
) -> None:
    """Fill the rows of `out_RH` (fp32) and `save` that belong to `runs`; arguments as in :func:`ffn_forward`."""
    for expert, start, end in runs:
        ffn_forward(
            x.rows(start, end),
            stack.expert(expert),
            loader,
            out_RH[start:end],
            save=save.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
        )


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
                x_RH=None if grads.x_RH is None else grads.x_RH[start:end],
                scale_R=None if grads.scale_R is None else grads.scale_R[start:end],
                rounded=grads.rounded,
            ),
            saved=saved.rows(start, end),
            scale_R1=None if scale_R is None else scale_R[start:end, None],
            block_size=block_size,
        ).run()
    if grads.weights is not None:
        busy = {expert for expert, _, _ in runs}
        for expert in set(range(grads.weights.gate_up.shape[0])) - busy:
            grads.weights.gate_up[expert].zero_()
            grads.weights.down[expert].zero_()
