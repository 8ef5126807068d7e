"""Stock and kernel weight layouts side by side: the parameters that two patched tiny models really have."""

from __future__ import annotations

import torch
from drawing import box, picture, text
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_neuron_moe import patch_model

E, H, I = 4, 128, 256  # noqa: E741 - the letters of the layouts
LETTERS = {E: "E", H: "H", I: "I", 2 * I: "2I"}
SIZES = {"hidden_size": H, "intermediate_size": I, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
MODELS = {
    "dense MLP": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=E)),
}


def shapes(name: str, weights: str) -> dict[str, list[int]]:
    """Return the shapes of the block's parameters."""
    with torch.device("meta"):
        model = MODELS[name]()
    patch_model(model, {"weights": weights, "backend": "torch"})
    prefix = "model.layers.0.mlp." + ("experts." if name == "experts" else "")
    found = {n.removeprefix(prefix): list(p.shape) for n, p in model.named_parameters() if n.startswith(prefix)}
    return {n.removesuffix(".weight"): shape for n, shape in found.items()}


def draw() -> str:
    """Return the picture."""
    parts = [text(20, 34, "Where the weights live: two layouts of the same parameters", kind="title")]
    described, y = [], 62
    for name in MODELS:
        parts.append(text(20, y, name, kind="strong"))
        for column, weights in enumerate(("stock", "kernel")):
            x = 110 + 385 * column
            parts.append(text(x, y, f'weights="{weights}"', kind="code"))
            for parameter, shape in shapes(name, weights).items():
                letters = "[" + ", ".join(LETTERS[size] for size in shape) + "]"
                rows, columns = shape[-2] * 0.2, shape[-1] * 0.2
                for layer in reversed(range(shape[0] if len(shape) == 3 else 1)):
                    corner = x + 4 * layer, y + 12 + 4 * (3 - layer)
                    words = (parameter.removesuffix("_proj"), letters) if not layer else ()
                    kind = "orange" if "down" in parameter else "blue"
                    parts.append(box(*corner, max(columns, 26), rows, *words, kind=kind, font="small code"))
                described.append(f"{name}, {weights}: {parameter} {letters}")
                x += max(columns, 60) + 30
        y += 150
    parts.append(text(20, y - 8, "Each rectangle has the proportions of its matrix, rows by columns (here I = 2H). Names and shapes of saved checkpoints", kind="muted"))
    parts.append(text(20, y + 8, "are Hugging Face's in both layouts. E matrices lie behind each other.", kind="muted"))
    return picture((880, y + 24), "Stock and kernel weight layouts", "; ".join(described), parts)
