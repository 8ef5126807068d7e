"""The other way to know what a precision does to the loss: switch blocks to it and measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.explore.measure import loss_sum
from hf_neuron_moe.training.blocks import patched_blocks


@contextmanager
def at_precisions(model: nn.Module, precisions: Mapping[str, str]) -> Iterator[None]:
    """Let some patched blocks compute at other precisions."""
    blocks = patched_blocks(model)
    before = {name: (blocks[name].neuron_config, blocks[name].neuron_keep) for name in precisions}
    try:
        for name, precision in precisions.items():
            config = replace(blocks[name].neuron_config, precision=precision)
            blocks[name].neuron_config = config
            blocks[name].neuron_keep = canonical_keep(config.activations, precision)
        yield
    finally:
        for name, (config, keep) in before.items():
            blocks[name].neuron_config, blocks[name].neuron_keep = config, keep


def losses_of(model: Any, rows_NL: Tensor) -> list[float]:
    """Return each row's mean loss; the blocks compute as in training."""
    with torch.no_grad():
        return [
            loss_sum(model(input_ids=row_L, use_cache=False).logits, row_L).item() / row_L[:, 1:].numel()
            for row_L in rows_NL.split(1)
        ]


def spread_over(ranked: Sequence[str], count: int) -> list[str]:
    """Return `count` of the names at even distances, the first and the last among them."""
    count = min(count, len(ranked))
    return [ranked[round(place * (len(ranked) - 1) / max(count - 1, 1))] for place in range(count)]


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's coefficient; NaN for fewer than three pairs or where all are equal."""
    if len(predicted) < 3:
        return float("nan")
    ranks = torch.stack([_ranks(values) for values in (predicted, measured)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 0, equal values sharing the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    below = (numbers[:, None] > numbers[None, :]).sum(1).double()
    equal = (numbers[:, None] == numbers[None, :]).sum(1).double()
    return below + (equal - 1) / 2
