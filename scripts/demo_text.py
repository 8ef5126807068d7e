"""The demo's text: speeches cut into token windows, and the loss of a model on them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

DATA = Path(__file__).resolve().parents[1] / "data" / "sotu"
PROGRESS_SECONDS = 5.0
Item = TypeVar("Item")


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Windows of a token stream as causal language modelling examples (the model shifts the labels itself)."""

    def __init__(self, windows_NL: Tensor) -> None:
        self.windows_NL = windows_NL

    def __len__(self) -> int:
        return len(self.windows_NL)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window_L = self.windows_NL[index]
        return {"input_ids": window_L, "labels": window_L}


def token_windows(tokenizer: PreTrainedTokenizerBase, split: str, length: int) -> Tensor:
    """Return all non-overlapping windows of `length` tokens of a split's speeches, ``[N, L]`` int64.

    The speeches are tokenised one by one and joined in the order of their years; the rest that fills no window is
    dropped.

    Args:
        tokenizer: the model's tokenizer.
        split: ``"train"`` (1948-2008) or ``"eval"`` (2010-2021).
        length: tokens per window (L).
    """
    tokens: list[int] = []
    for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        # Speeches are longer than the context a tokenizer warns about; they are cut right here.
        tokens += tokenizer(json.loads(line)["text"], verbose=False)["input_ids"]
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def spread(windows_NL: Tensor, count: int) -> Tensor:
    """Return `count` windows at even distances (all, if there are no more than that), so that every year is heard."""
    count = min(count, len(windows_NL))
    return windows_NL[[i * len(windows_NL) // count for i in range(count)]]


def with_progress(console: Console, items: Iterable[Item], label: str) -> Iterator[Item]:
    """Yield the items and print a line every few seconds, so that a log file shows progress too."""
    total = len(items) if isinstance(items, Sized) else None
    last = time.perf_counter()
    for index, item in enumerate(items):
        now = time.perf_counter()
        if now - last > PROGRESS_SECONDS:
            console.print(f"   {label}: {index}/{total}" if total is not None else f"   {label}: {index}")
            last = now
        yield item


def mean_loss(model: PreTrainedModel, windows_NL: Tensor, console: Console, label: str) -> float:
    """Return the mean next-token cross entropy (nats) over the windows, each on its own, without gradients.

    Every window has the same number of predicted tokens (L - 1), so the mean of the windows is the mean of the tokens.
    """
    was_training = model.training
    model.eval()
    losses = []
    with torch.no_grad():
        for window_L in with_progress(console, windows_NL, label):
            losses.append(model(window_L[None], labels=window_L[None], use_cache=False).loss.item())
    model.train(was_training)
    return sum(losses) / len(losses)


def perplexity(loss: float) -> float:
    """Return the perplexity that belongs to a mean cross entropy in nats."""
    return math.exp(loss)
