"""A tokenizer with one token per byte, which needs no training and no download."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BYTES = 256
"""Its vocabulary."""


def save_byte_tokenizer(folder: Path) -> None:
    """Write it into a model's folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BYTES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
