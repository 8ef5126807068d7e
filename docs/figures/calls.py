"""Patch, convert, train: who calls what."""

from __future__ import annotations

from drawing import arrow, box, picture, text

LANES = {
    "convert": ("convert SRC DST", "plan every tensor", "codes and scales", "new checkpoint", "from_pretrained"),
    "patch": ("from_pretrained", "patch_model", "discover and plan", "replace blocks", "patched model"),
    "train": ("Trainer.train", "model's forward", "patched block", "mlp_fwd, moe_fwd", "backend"),
}
OWNERS = {
    "convert": ("cli", "convert", "formats", "convert", "quantizers"),
    "patch": ("transformers", "patching", "patching", "modules", ""),
    "train": ("transformers", "transformers", "modules", "operators of modules", "torch, triton or neuron"),
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
        arrow((788, 116), (788, 176)),
        text(796, 143, "makes patched", kind="muted small"),
        text(796, 156, "blocks itself", kind="muted small"),
        arrow((788, 226), (788, 256), (160, 256), (160, 286)),
        text(474, 250, "the Trainer trains it", kind="muted small", anchor="middle"),
        arrow((788, 336), (788, 356), (474, 356), (474, 336)),
        text(631, 372, "backward, with the saved activations", kind="muted small", anchor="middle"),
        text(
            20,
            400,
            "Gray boxes are transformers' own code. The package replaces MLPs and experts, nothing else.",
            kind="muted",
        ),
    ]
    what = "; ".join(f"{name}: {', '.join(steps)}" for name, steps in LANES.items())
    return picture((880, 416), "Patch, convert, train: who calls what", what, parts)
