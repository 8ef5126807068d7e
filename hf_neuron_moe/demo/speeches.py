"""The demo's text: State of the Union speeches, cut into windows of tokens.

Legend: N windows, L tokens per window.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

DATA = Path(__file__).with_name("sotu")
Encode = Callable[[str], list[int]]
"""From a text to token ids."""


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Return the function that gives a text's token ids."""
    # Speeches are longer than the context that a tokenizer warns about.
    return lambda text: list(tokenizer(text, verbose=False)["input_ids"])


def speeches(split: str) -> Iterator[tuple[int, str]]:
    """Yield year and text of the speeches in ``"train"`` (1948-2008) or ``"eval"`` (2010-2021), by year."""
    for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        speech = json.loads(line)
        yield speech["year"], speech["text"]


def token_windows(encode: Encode, split: str, length: int) -> Tensor:
    """Return all non-overlapping windows of `length` tokens of a split's speeches, ``[N, L]`` int64.

    The speeches are encoded one by one and joined; the rest that fills no window is left out.
    """
    tokens = [token for _, text in speeches(split) for token in encode(text)]
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def held_out_windows(encode: Encode, length: int) -> dict[int, Tensor]:
    """Return one window ``[L]`` of every speech that nothing is trained on, by its year: the first after a third."""
    encoded = {year: encode(text) for year, text in speeches("eval")}
    starts = {year: min(len(tokens) // 3, len(tokens) - length) for year, tokens in encoded.items()}
    return {year: torch.tensor(tokens[starts[year] : starts[year] + length]) for year, tokens in encoded.items()}
