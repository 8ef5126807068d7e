"""Stock and kernel weight layouts side by side: the parameters that two patched tiny models really have."""

from __future__ import annotations

import torch
from drawing import box, picture, text
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_neuron_moe import patch_model

E, H, I = 4, 128, 256  # noqa: E741 - the letters of the layouts
SCALE = 0.25  # pixels of a row or column
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
                rows, columns = shape[-2] * SCALE, shape[-1] * SCALE
                for layer in reversed(range(shape[0] if len(shape) == 3 else 1)):
                    kind = "orange" if "down" in parameter else "blue"
                    parts.append(box(x + 4 * layer, y + 28 - 4 * layer, columns, rows, kind=kind))
                parts.append(text(x, y + rows + 44, parameter, kind="strong"))
                parts.append(text(x, y + rows + 60, letters, kind="code"))
                described.append(f"{name}, {weights}: {parameter} {letters}")
                x += max(columns, 76) + 40
        y += 216
    parts.append(
        text(
            20,
            y - 2,
            "Rectangles have the proportions of their matrices (here I = 2H). E matrices lie behind each other.",
            kind="muted",
        )
    )
    parts.append(
        text(20, y + 16, "Saved checkpoints have Hugging Face's names and shapes in both layouts.", kind="muted")
    )
    return picture((880, y + 34), "Stock and kernel weight layouts", "; ".join(described), parts)
