"""The model that the demo trains: a Mixtral made from a Llama checkpoint, or a tiny one of random weights on bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
)

from hf_neuron_moe.demo.smollm2 import load
from hf_neuron_moe.demo.speeches import Encode, encoder
from hf_neuron_moe.demo.upcycle import Experts, choose_layers, upcycle
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.recipes.variant_runs import Setting

EXPERTS = 4
HELD_OUT_LENGTH = 64
"""Tokens of each of the windows that the loss is measured on."""
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Subject:
    """A model as every run starts with it, its text, and how it is trained."""

    title: str
    model: MixtralForCausalLM
    encode: Encode
    decode: Callable[[list[int]], str]
    setting: Setting
    every: int
    """Steps between two measurements of the held-out loss."""


def tiny(steps: int | None, seed: int) -> Subject:
    """Return a Mixtral of random weights whose tokens are bytes: it needs no weights and no tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MixtralForCausalLM(MixtralConfig(**TINY))
    setting = Setting(steps or 40, batch=8, length=64, learning_rate=4e-3)

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    title = f"a Mixtral of {model.num_parameters():,} random parameters on bytes"
    return Subject(title, model, lambda text: list(text.encode()), decode, setting, _every(setting))


@public("demo")
def upcycled(source: str | None, layers: int | None, steps: int | None, seed: int) -> Subject:
    """Return a Mixtral made from `layers` layers of a Llama, `source` or SmolLM2 from its package; by default 12."""
    llama, tokenizer = load() if source is None else _llama(source)
    name, available = source or "SmolLM2-135M-Instruct", llama.config.num_hidden_layers
    if layers is not None and layers > available:
        expected = f"at most {available}, the layers of {name}"
        raise ConfigError.about("--layers", expected, layers, "Take fewer, or leave it out.")
    taken = choose_layers(available, layers or min(12, available))
    model = upcycle(llama, Experts(taken, EXPERTS, seed=seed))
    count = model.num_parameters()
    size = f"{count / 1e6:,.0f} M" if count >= 10**6 else f"{count:,}"
    setting = Setting(steps or 12, batch=2, length=96, learning_rate=2e-4)
    title = f"a Mixtral of {size} parameters, made from {len(taken)} of the {available} layers of {name}"

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    return Subject(title, model, encoder(tokenizer), decode, setting, _every(setting))


def _every(setting: Setting) -> int:
    return max(1, setting.steps // 4)


def _llama(source: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    fix = "Give a folder with config.json, weights and tokenizer, or the Hub id of such a model."
    expected = "a Llama checkpoint, a folder or a Hub id"
    if "/" not in source and not Path(source).is_dir():
        raise ConfigError.about("--model", expected, f"{source}, a folder that does not exist", fix)
    try:
        config = AutoConfig.from_pretrained(source)
        if config.model_type != "llama":
            raise ConfigError.about("--model", expected, f"model type {config.model_type} in {source}", fix)
        if (positions := config.max_position_embeddings) < HELD_OUT_LENGTH * 2:
            expected = f"a Llama with at least {HELD_OUT_LENGTH * 2} positions"
            raise ConfigError.about("--model", expected, f"{positions} in {source}", fix)
        model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
        return model, tokenizer
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        got = f"{source}, of which transformers says: {' '.join(str(error).split()).rstrip('.')}"
        raise ConfigError.about("--model", expected, got, fix) from error
