#!/usr/bin/env python3
"""Write a tiny untrained checkpoint with a tokenizer of one token per byte, to try commands on in seconds.

python scripts/make_tiny_model.py mixtral .cache/tiny-mixtral
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

END_OF_TEXT = "<|end|>"
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {**_ROUTED, "num_local_experts": 4},
    "qwen3_moe": {**_ROUTED, "num_experts": 4, "moe_intermediate_size": 48},
    "gpt_oss": {**_ROUTED, "num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]},
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a tiny model of `family` with the byte tokenizer's vocabulary."""
    end = 256
    ids = {"vocab_size": 257, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    return AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **ids, **changes})


def make_tiny_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> None:
    """Write model and tokenizer to `folder`; `changes` go to the configuration."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_model(arguments.family, arguments.folder, arguments.seed)
    print(arguments.folder)


if __name__ == "__main__":
    main()
