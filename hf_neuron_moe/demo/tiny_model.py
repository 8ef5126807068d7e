"""A tiny untrained checkpoint with a tokenizer of one token per byte, to try commands on in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

END_OF_TEXT = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It marks the answers, so that the loss can be on them alone."""
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


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    made.chat_template = chat_template
    return made


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a tiny model of `family` with the byte tokenizer's vocabulary."""
    end = 256
    ids = {"vocab_size": 257, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    return AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **ids, **changes})


def make_tiny_model(family: str, folder: Path, seed: int = 0, chat_template: str | None = None, **changes: Any) -> None:
    """Write model and tokenizer to `folder`; `changes` go to the configuration."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
