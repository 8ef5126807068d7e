"""Tiny checkpoints on disk, made by transformers itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.tiny_models import tiny_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def family_config(family: str) -> PretrainedConfig:
    """A tiny configuration of a family."""
    match family:
        case "llama":
            return LlamaConfig(**SIZES)
        case "llama_tied":
            return LlamaConfig(**SIZES, tie_word_embeddings=True)
        case "phi3":
            return Phi3Config(**SIZES)
        case "mixtral":
            # Twelve experts, so that sorting names as text (10 before 2) would be noticed.
            return MixtralConfig(**SIZES, num_local_experts=12)
        case "qwen2_moe":
            return Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=64)
        case "qwen2_moe_96":
            # Every intermediate size in three parts of 32.
            return Qwen2MoeConfig(**SIZES, **{**MOE, "moe_intermediate_size": 96}, shared_expert_intermediate_size=96)
        case "qwen3_moe":
            return Qwen3MoeConfig(**SIZES, **MOE)
        case "olmoe":
            return OlmoeConfig(**SIZES, num_experts=4)
        case "granitemoe":
            return GraniteMoeConfig(**SIZES, num_local_experts=4)
        case "nemotron_h":  # experts without a gate
            return tiny_config("nemotron_h", hidden_size=64, moe_intermediate_size=32, vocab_size=128)
    raise KeyError(family)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints made so far in this session; use :func:`checkpoint`."""
    return {"": tmp_path_factory.mktemp("originals")}


@pytest.fixture
def checkpoint(originals: dict[str, Path], tmp_path: Path):
    """Return a function that gives a fresh copy of a family's tiny checkpoint."""

    def make(
        family: str, dtype: torch.dtype = torch.bfloat16, shard: str = "1GB", original_format: bool = True
    ) -> Path:
        key = f"{family}-{dtype}-{shard}-{original_format}".replace("torch.", "")
        if key not in originals:
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(family_config(family)).to(dtype)
            originals[key] = originals[""] / key
            model.save_pretrained(originals[key], max_shard_size=shard, save_original_format=original_format)
            (originals[key] / "tokenizer.json").write_text('{"kept": true}')
        copy = tmp_path / f"src-{key}"
        shutil.copytree(originals[key], copy)
        return copy

    return make


@pytest.fixture
def snapshot():
    """Return a function that reads a folder's files as bytes by name."""
    return lambda folder: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
