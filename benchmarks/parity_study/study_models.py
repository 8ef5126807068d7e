"""Models and text of the parity study: two small real ones and one from scratch, and the batches they train on.

Legend: B sequences per batch, L tokens per sequence, N windows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import get_smollm2
import torch
from demo_text import DATA, token_windows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from upcycle_mixtral import choose_layers, upcycle

BYTES = 256
"""Vocabulary of the model from scratch: it reads UTF-8 bytes and needs no tokenizer."""


@dataclass(frozen=True)
class Subject:
    """One model of the study and how it is trained.

    Attributes:
        title: what tables and figures call it.
        steps: optimizer steps of a run.
        batch: sequences per step (B).
        length: tokens per sequence (L).
        rate: peak learning rate of AdamW.
        layers: layers of the model.
    """

    title: str
    steps: int
    batch: int
    length: int
    rate: float
    layers: int


SUBJECTS = {
    "smollm2": Subject("SmolLM2-135M, 4 of its 30 layers", 200, 2, 64, 3e-4, 4),
    "smollm2-mixtral": Subject("Mixtral upcycled from SmolLM2 (4 experts, top-2), 2 layers", 200, 2, 64, 3e-4, 2),
    "scratch-mixtral": Subject("Mixtral from scratch on bytes (8 experts, top-2), 3 layers", 1000, 4, 96, 2e-3, 3),
}


class Study:
    """Builds every model and its windows once; a run takes copies.

    Args:
        subjects: the models by name.
        model_dir: SmolLM2's folder; None obtains it as the demo does.
    """

    def __init__(self, subjects: dict[str, Subject], model_dir: Path | None = None) -> None:
        self.subjects = subjects
        self._model_dir = model_dir
        self._llama: LlamaForCausalLM | None = None
        self._ids: Tensor | None = None

    def model(self, name: str, seed: int) -> PreTrainedModel:
        """Return the model in fp32 as every run of this seed starts with it.

        The weights of ``smollm2`` are the same for every seed; in the others the seed makes the router and the
        perturbation of the experts, or all of the weights.
        """
        torch.manual_seed(seed)
        subject = self.subjects[name]
        if name == "scratch-mixtral":
            return MixtralForCausalLM(scratch_config(subject))
        llama, _ = self._trimmed()
        layers = choose_layers(llama.config.num_hidden_layers, subject.layers)
        if name == "smollm2":
            return with_layers(llama, layers)
        return upcycle(llama, layers=layers, experts=4, seed=seed).train()

    def windows(self, name: str) -> Tensor:
        """Return the training text as ``[N, L]`` token ids of this model."""
        length = self.subjects[name].length
        ids = text_bytes() if name == "scratch-mixtral" else self._trimmed()[1]
        count = len(ids) // length
        return ids[: count * length].view(count, length)

    def _trimmed(self) -> tuple[LlamaForCausalLM, Tensor]:
        """SmolLM2 without the tokens that the text does not use, and the text in the ids that remain.

        Most of a small model's time goes into the head over 49,152 tokens, which is the same for every variant.
        """
        if self._llama is None or self._ids is None:
            folder = self._model_dir or get_smollm2.obtain()
            llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            stream = token_windows(AutoTokenizer.from_pretrained(folder), "train", 1).flatten()
            used_V, self._ids = stream.unique(return_inverse=True)
            self._llama = with_vocabulary(llama, used_V)
        return self._llama, self._ids


def text_bytes() -> Tensor:
    """Return the training speeches as one stream of UTF-8 bytes, ``[T]`` int64."""
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["text"] for line in lines)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def scratch_config(subject: Subject) -> MixtralConfig:
    """Return the configuration of the mixture of experts that is trained from scratch."""
    return MixtralConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=subject.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=subject.length,
        tie_word_embeddings=True,
        output_router_logits=True,  # the load-balancing loss: without it some experts would never learn
        router_aux_loss_coef=0.02,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def with_vocabulary(llama: LlamaForCausalLM, used_V: Tensor) -> LlamaForCausalLM:
    """Return a copy whose embedding (and head, which is tied to it) has only the rows `used_V`."""
    options = llama.config.to_dict() | {"vocab_size": len(used_V)}
    options |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    weights = llama.state_dict()
    weights |= {key: weights[key][used_V] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    trimmed = LlamaForCausalLM(LlamaConfig.from_dict(options))
    trimmed.load_state_dict(weights)
    return trimmed


def with_layers(llama: LlamaForCausalLM, layers: list[int]) -> LlamaForCausalLM:
    """Return a copy with the given layers only, in training mode."""
    options = llama.config.to_dict() | {"num_hidden_layers": len(layers)}
    weights = {key: value for key, value in llama.state_dict().items() if not key.startswith("model.layers.")}
    for target, source in enumerate(layers):
        for key, value in llama.model.layers[source].state_dict().items():
            weights[f"model.layers.{target}.{key}"] = value
    smaller = LlamaForCausalLM(LlamaConfig.from_dict(options))
    smaller.load_state_dict(weights)
    return smaller.train()


def batches(windows_NL: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield ``[B, L]`` batches forever, in an order that only the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows_NL), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            yield windows_NL[order[start : start + batch]]
