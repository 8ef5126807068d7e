"""Small checkpoints with a tokenizer of bytes, and models with a planted outlier channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_neuron_moe.demo.tiny_model import make_tiny_model
from hf_neuron_moe.explore.run import load_model

TEXT = Path(__file__).resolve().parents[2] / "data" / "sotu" / "eval.jsonl"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def checkpoint(folder: Path, family: str = "llama") -> Path:
    """Write a tiny model whose blocks matter for its loss."""
    make_tiny_model(family, folder, **(SIZES if family in ("llama", "mixtral") else {}))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "mlp" in name and param.dim() > 1 and "gate.weight" not in name:
                param.mul_(8)
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


def plant_in_down(model: Any, layer: int, channel: int, power: int = 12) -> None:
    """Make an input channel of a dense down projection larger, compensated exactly."""
    mlp = model.model.layers[layer].mlp
    with torch.no_grad():
        mlp.up_proj.weight[channel] *= 2.0**power
        mlp.down_proj.weight[:, channel] *= 2.0**-power


def plant_in_input(model: Any, layer: int, channel: int, power: int = 12) -> None:
    """Make an input channel of a layer's block larger by its norm; of a Mixtral the router reads it too."""
    block = model.model.layers[layer]
    with torch.no_grad():
        block.post_attention_layernorm.weight[channel] *= 2.0**power
        if hasattr(block.mlp, "experts"):
            block.mlp.gate.weight[:, channel] *= 2.0**-power
            block.mlp.experts.gate_up_proj[:, :, channel] *= 2.0**-power
        else:
            block.mlp.gate_proj.weight[:, channel] *= 2.0**-power
            block.mlp.up_proj.weight[:, channel] *= 2.0**-power


def planted(folder: Path, family: str, plant: Any, **where: int) -> Path:
    """Write a tiny model with an outlier."""
    checkpoint(folder, family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    plant(model, **where)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    """Return the model as it is explored."""
    return load_model(folder)
