"""Build a Mixtral checkpoint with real weights by upcycling a Llama checkpoint.

Sparse upcycling (Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", 2022):
attention, norms and embeddings are copied. Every expert starts as a copy of its layer's MLP, here perturbed a little so
that experts differ from the start. The router is new, with small random weights. The result is an ordinary
``MixtralForCausalLM`` checkpoint.

With ``noise=0`` all experts of a layer are the same function and Mixtral's top-k weights sum to 1, so the model
computes what the Llama computes.

A smaller Mixtral takes part of the layers. ``--layer-choice ends`` (the default) drops layers from the middle, which a
residual network survives best; ``first`` takes the first N. The loss of either is well above the whole model's before
training, that of ``first`` far above: its last layer was never meant to feed the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

# Options that mean the same in both families; everything Mixtral needs beyond them is set in `mixtral_config`.
SHARED_OPTIONS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_parameters",
)
LAYER_CHOICES = ("ends", "first")
ROUTER_STD = 0.02  # transformers' usual initializer_range


def choose_layers(available: int, count: int | None, choice: str = "ends") -> list[int]:
    """Return the indices of the `count` layers to take out of `available`, ascending; None takes all.

    Args:
        available: layers of the source model.
        count: layers to take.
        choice: ``"ends"``: the first ceil(count / 2) and the last floor(count / 2). ``"first"``: the first `count`.

    Raises:
        ValueError: `count` is not in 1..available, or `choice` is unknown.
    """
    if choice not in LAYER_CHOICES:
        raise ValueError(f"choice must be one of {', '.join(LAYER_CHOICES)}, got {choice!r}")
    count = available if count is None else count
    if not 1 <= count <= available:
        raise ValueError(f"layers must be 1..{available}, got {count}")
    head = count if choice == "first" else -(-count // 2)
    return [*range(head), *range(available - (count - head), available)]


@dataclass(frozen=True)
class Experts:
    """What is made of a Llama's MLPs."""

    layers: Sequence[int] | None = None  # indices of the layers to take, in their new order; None for all
    experts: int = 4  # per layer (E)
    top_k: int = 2  # experts per token (K)
    noise: float = 0.02  # deviation of each expert's perturbation, relative to the RMS of the copied weight
    seed: int = 0  # of the perturbation and the router

    def taken_of(self, llama: LlamaForCausalLM) -> list[int]:
        """Indices of the layers that are taken."""
        return choose_layers(llama.config.num_hidden_layers, None) if self.layers is None else list(self.layers)


USUAL = Experts()


def mixtral_config(llama: LlamaConfig, layers: int, experts: int, top_k: int) -> MixtralConfig:
    """Return the Mixtral config that describes `layers` layers of the Llama with `experts` experts each.

    Raises:
        ValueError: the Llama has biases, which Mixtral has no place for, or a size is out of range.
    """
    if llama.attention_bias or llama.mlp_bias:
        raise ValueError("the Llama has attention_bias or mlp_bias; Mixtral has no biases to copy them to")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1..{experts} (the number of experts), got {top_k}")
    shared = {name: getattr(llama, name) for name in SHARED_OPTIONS}
    return MixtralConfig(
        **shared,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        sliding_window=None,
    )


def perturbed_copies(weight: Tensor, wanted: Experts, generator: torch.Generator) -> Tensor:
    """Stack a copy of a weight per expert, each with Gaussian noise of `noise` times the weight's RMS added."""
    copies = weight.expand(wanted.experts, *weight.shape).clone()
    scale = wanted.noise * weight.square().mean().sqrt()
    return copies.add_(torch.randn(copies.shape, generator=generator, dtype=weight.dtype) * scale)


def _expert_weights(
    llama: LlamaForCausalLM, layer: int, wanted: Experts, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return one layer's ``mlp.*`` weights of the Mixtral: experts from the Llama's MLP, and a new router."""
    mlp = llama.model.layers[layer].mlp
    gate_up_2IH = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
    down_HI = mlp.down_proj.weight.detach()
    router_EH = torch.randn(wanted.experts, down_HI.shape[0], generator=generator) * ROUTER_STD
    return {
        "mlp.gate.weight": router_EH.to(down_HI.dtype),
        "mlp.experts.gate_up_proj": perturbed_copies(gate_up_2IH, wanted, generator),
        "mlp.experts.down_proj": perturbed_copies(down_HI, wanted, generator),
    }


def with_new_layers(
    llama: LlamaForCausalLM, taken: Sequence[int], new: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return a state dict of the Llama's `taken` layers, each with its `new` weights in place of its MLP's."""
    weights = {key: value for key, value in llama.state_dict().items() if not key.startswith("model.layers.")}
    for target, (source, layer) in enumerate(zip(taken, new, strict=True)):
        kept = {key: value for key, value in llama.model.layers[source].state_dict().items() if "mlp." not in key}
        weights |= {f"model.layers.{target}.{key}": value for key, value in {**kept, **layer}.items()}
    return weights


def upcycle(llama: LlamaForCausalLM, wanted: Experts = USUAL) -> MixtralForCausalLM:
    """Return a Mixtral made from a Llama's weights; the Llama is not changed and shares no memory with it.

    Args:
        llama: the source, on the CPU.
        wanted: layers, experts, noise and seed.

    Returns:
        The Mixtral, in the Llama's dtype, in eval mode. Experts are ``gate_up_proj [E, 2I, H]`` (gate rows first) and
        ``down_proj [E, H, I]``.

    Raises:
        ValueError: see :func:`mixtral_config`.
    """
    taken = wanted.taken_of(llama)
    config = mixtral_config(llama.config, len(taken), wanted.experts, wanted.top_k)
    generator = torch.Generator().manual_seed(wanted.seed)
    mixtral = MixtralForCausalLM(config)
    nn.Module.to(mixtral, llama.dtype)
    new = (_expert_weights(llama, source, wanted, generator) for source in taken)
    mixtral.load_state_dict(with_new_layers(llama, taken, new))
    if llama.generation_config is not None:
        mixtral.generation_config = llama.generation_config
    return mixtral.eval()
