"""The training loop of the parity study; nothing in it knows whether a model is patched.

Legend: B sequences per batch, L tokens per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_neuron_moe.recipes.variant_runs import cross_entropy

WARMUP = 0.05
CLIP_NORM = 1.0


def train(model: PreTrainedModel, data: Iterator[Tensor], steps: int, rate: float) -> Iterator[float]:
    """Yield the cross entropy (nats) of every step's batch before its update; AdamW, warm-up, cosine, clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    model.train()
    for ids_BL in islice(data, steps):
        output = model(ids_BL, labels=ids_BL, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield cross_entropy(model, output)


def share_of_rate(step: int, steps: int) -> float:
    """Warm up linearly over the first steps, then fall to a tenth along a cosine."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
