"""Models and text of the parity study: two small real ones, and one that starts from nothing.

Legend: B sequences per batch, L tokens per sequence, N windows, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from study_train import train
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

from hf_neuron_moe.demo.smollm2 import obtain
from hf_neuron_moe.demo.speeches import encoder, speeches, token_windows
from hf_neuron_moe.demo.upcycle import Experts, choose_layers, upcycle
from hf_neuron_moe.recipes.variant_runs import batches

TEXT_TOKENS = 50_000
"""Tokens of the text that SmolLM2's descendants train on: several times what one run reads."""

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
    "smollm2": Subject("SmolLM2-135M, 4 of its 30 layers", 110, 2, 48, 2e-4, 4),
    "smollm2-mixtral": Subject("Mixtral upcycled from SmolLM2 (4 experts, top-2), 2 layers", 110, 2, 48, 2e-4, 2),
    "scratch-mixtral": Subject("Mixtral from scratch on bytes (8 experts, top-2), 3 layers", 300, 8, 64, 4e-4, 3),
}
HEALING = Subject("", 150, 2, 48, 5e-4, 0)
"""A model that lost most of its layers first learns to do without them, in stock fp32, before the study begins."""


class Study:
    """Builds every model as its runs start with it.

    Args:
        subjects: the models by name.
        starts: folder for weights that are computed once.
        model_dir: SmolLM2's folder; None obtains it as the demo does.
    """

    def __init__(self, subjects: dict[str, Subject], starts: Path, model_dir: Path | None = None) -> None:
        self.subjects = subjects
        self._starts = starts
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
        llama = self._healed(subject.layers)
        return llama if name == "smollm2" else upcycle(llama, Experts(seed=seed)).train()

    def windows(self, name: str) -> Tensor:
        """Return the training text as ``[N, L]`` token ids of this model."""
        length = self.subjects[name].length
        ids = text_bytes() if name == "scratch-mixtral" else self._trimmed()[1]
        count = len(ids) // length
        return ids[: count * length].view(count, length)

    def _healed(self, count: int) -> LlamaForCausalLM:
        """SmolLM2 with `count` layers, trained for a little in stock fp32 after the others were taken out."""
        whole, ids = self._trimmed()
        llama = with_layers(whole, choose_layers(whole.config.num_hidden_layers, count))
        path = self._starts / f"smollm2-{count}-layers-{HEALING.steps}-steps.safetensors"
        if not path.is_file():
            torch.manual_seed(0)
            windows_NL = ids[: len(ids) // HEALING.length * HEALING.length].view(-1, HEALING.length)
            data = batches(windows_NL, HEALING.batch, seed=1000)  # an order that no run has
            for _ in train(llama, data, HEALING.steps, HEALING.rate):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_model(llama, str(partial))
            partial.rename(path)
        load_model(llama, str(path))
        return llama.train()

    def _trimmed(self) -> tuple[LlamaForCausalLM, Tensor]:
        """SmolLM2 without the tokens that the text does not use, and the text in the ids that remain.

        Most of a small model's time goes into the head over 49,152 tokens, which is the same for every variant.
        """
        if self._llama is None or self._ids is None:
            folder = self._model_dir or obtain(Path(__file__).resolve().parents[2] / ".cache" / "smollm2-135m-instruct")
            llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            stream = token_windows(encoder(AutoTokenizer.from_pretrained(folder)), "train", 1).flatten()[:TEXT_TOKENS]
            used_V, self._ids = stream.unique(return_inverse=True)
            self._llama = with_vocabulary(llama, used_V)
        return self._llama, self._ids


def text_bytes() -> Tensor:
    """Return the training speeches as one stream of UTF-8 bytes, ``[T]`` int64."""
    text = "\n".join(text for _, text in speeches("train"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def scratch_config(subject: Subject) -> MixtralConfig:
    """Return the configuration of the mixture of experts that is trained from scratch."""
    return MixtralConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=128,
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


def study_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with what the benchmarks of these models have in common."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the runs and their summary")
    parser.add_argument("--model", type=Path, help="SmolLM2's folder (default: from its PyPI wheel, as in the demo)")
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    return parser
