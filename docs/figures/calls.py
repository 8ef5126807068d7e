"""Patch, convert, train: who calls what."""

from __future__ import annotations

from drawing import arrow, box, picture, text

LANES = {
    "patch": ("from_pretrained", "patch_model", "discover and plan", "apply", "patched model"),
    "convert": ("hf-neuron-moe convert", "plan every tensor", "formats: codes, scales", "new checkpoint", "from_pretrained"),
    "train": ("Trainer.train", "model's forward", "patched block", "operator mlp_fwd, moe_fwd", "backend"),
}
OWNERS = {
    "patch": ("transformers", "patching", "patching", "modules", ""),
    "convert": ("cli", "convert", "formats", "convert", "quantizers"),
    "train": ("transformers", "transformers", "modules", "modules", "torch, triton or neuron"),
}


def draw() -> str:
    """Return the picture."""
    parts = [text(20, 34, "Patch, convert, train: who calls what", kind="title")]
    for lane, (name, steps) in enumerate(LANES.items()):
        y = 66 + 110 * lane
        parts.append(text(20, y + 30, name, kind="strong"))
        for number, (step, owner) in enumerate(zip(steps, OWNERS[name], strict=True)):
            x = 90 + 157 * number
            kind = "box" if owner == "transformers" else "green" if not owner else "blue"
            lines = (step, owner) if owner else (step,)
            parts.append(box(x, y, 140, 50, *lines, kind=kind, font="muted small" if owner else "strong"))
            if number:
                parts.append(arrow((x - 17, y + 25), (x, y + 25)))
    parts += [
        arrow((788, 176), (788, 116)),
        text(796, 150, "patched while", kind="muted small"),
        text(796, 163, "it is loaded", kind="muted small"),
        arrow((718, 116), (718, 142), (160, 142), (160, 286)),
        text(170, 160, "the Trainer trains it", kind="muted small"),
        arrow((788, 336), (788, 356), (474, 356), (474, 336)),
        text(484, 372, "backward: the saved activations and the gradient come back the same way", kind="muted small"),
        text(20, 400, "Gray boxes are transformers' own code. The package replaces MLPs and experts, and nothing else of a model.", kind="muted"),
    ]
    what = "; ".join(f"{name}: {', '.join(steps)}" for name, steps in LANES.items())
    return picture((880, 416), "Patch, convert, train: who calls what", what, parts)
