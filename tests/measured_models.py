"""Checkpoints whose weights are large enough to be seen in a process's memory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig


def save_mixtral(folder: Path, layers: int) -> None:
    """Write a Mixtral in bf16; each layer's eight experts have 22 million weights, 44 MB."""
    config = MixtralConfig(
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        num_local_experts=8,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
