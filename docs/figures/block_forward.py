"""A block's forward with the four activations that it may save, and what each policy saves of them."""

from __future__ import annotations

from drawing import arrow, box, picture, text

from hf_neuron_moe.activation_policy import CHECKPOINTS, PRESETS, canonical_keep, parse_keep

LEFT, TABLE = 20, 250


def rows() -> list[tuple[str, dict[str, str]]]:
    """Return for every preset what it saves of each checkpoint: "all", "7/8", "FP8" or nothing."""
    found = []
    for preset in PRESETS:
        for precision in ("bf16", "mxfp8"):
            keep = parse_keep(canonical_keep(preset, precision))
            cells = {name: "FP8" if keep.fp8 else "all" for name in CHECKPOINTS if name in keep.names}
            if "up" in cells and not keep.whole_up:
                cells["up"] = "7/8"
            cells["x"] = "bf16" if keep.keeps_input else "FP8"
            if found and found[-1][1] == cells:
                found[-1] = (f"{preset}", cells)
            else:
                found.append((f"{preset}, {precision}" if preset == "full" else preset, cells))
    return found


def draw() -> str:
    """Return the picture."""
    parts = [
        text(LEFT, 34, "Forward of a block, and what each activation policy saves for the backward", kind="title"),
        box(LEFT, 115, 70, 40, "input", "x"),
        box(150, 70, 60, 36, "gate", "x Wgᵀ", font="small"),
        box(150, 164, 60, 36, "up", "x Wuᵀ", font="small"),
        box(260, 70, 90, 36, "gate_pre", kind="blue", font="code"),
        box(260, 164, 90, 36, "up", kind="blue", font="code"),
        box(400, 70, 60, 36, "SiLU"),
        box(510, 70, 90, 36, "gate_act", kind="blue", font="code"),
        box(535, 166, 40, 32, "×"),
        box(625, 164, 106, 36, "intermediate", kind="blue", font="code"),
        box(775, 164, 85, 36, "down", "… Wdᵀ", font="small"),
        arrow((90, 128), (120, 128), (120, 88), (150, 88)),
        arrow((90, 142), (120, 142), (120, 182), (150, 182)),
        arrow((210, 88), (260, 88)),
        arrow((210, 182), (260, 182)),
        arrow((350, 88), (400, 88)),
        arrow((460, 88), (510, 88)),
        arrow((555, 106), (555, 166)),
        arrow((350, 182), (535, 182)),
        arrow((575, 182), (625, 182)),
        arrow((731, 182), (775, 182)),
        text(817, 220, "output", kind="muted", anchor="middle"),
        arrow((817, 200), (817, 210)),
    ]
    columns = ("x", *CHECKPOINTS)
    for number, name in enumerate(columns):
        parts.append(
            text(
                270 + 120 * number,
                TABLE + 14,
                "input and routing" if name == "x" else name,
                kind="strong",
                anchor="middle",
            )
        )
    described = []
    for number, (policy, cells) in enumerate(rows()):
        y = TABLE + 26 + 30 * number
        parts.append(text(LEFT, y + 17, policy, kind="code"))
        for column, name in enumerate(columns):
            kept = cells.get(name, "")
            kind = {"": "box", "FP8": "orange", "7/8": "green"}.get(kept, "blue")
            words = {"": "made again", "bf16": "saved", "all": "saved", "7/8": "7/8 saved", "FP8": "saved in FP8"}[kept]
            parts.append(box(214 + 120 * column, y, 112, 25, words, kind=kind, font="small"))
        described.append(f"{policy}: {', '.join(f'{name} {kept}' for name, kept in cells.items())}")
    height = TABLE + 26 + 30 * len(described) + 30
    parts.append(
        text(
            LEFT,
            height - 14,
            "bf16 kernels have gate_pre and up only. Blocks with an intermediate below 512 save up whole with minimal.",
            kind="muted",
        )
    )
    return picture((880, height), "A block's forward and its activation policies", "; ".join(described), parts)
