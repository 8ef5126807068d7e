"""The packages and which of them may import which, from the table that tests/test_architecture.py enforces."""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import picture, text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from code_figures import ALLOWED, GROUND

WORDS = {
    "checks": "checks of arguments",
    "formats": "MX quantization, swizzle, layouts",
    "backends": "torch, triton, neuron",
    "modules": "operators and patched blocks",
    "reference": "nki-library's operators",
    "kernels": "their public names",
    "patching": "patch_model and its report",
    "training": "Trainer, metrics, checkpoints",
    "convert": "checkpoint conversion",
    "quantizers": "from_pretrained of conversions",
    "device": "doctor, estimate, verify-device",
    "report": "pages and figures",
    "explore": "what MXFP8 does to a model",
    "demo": "hf-neuron-moe demo",
    "configs": "YAML files of hf-neuron-moe train",
    "parity": "several processes against one",
    "recipes": "precisions compared by training",
    "finetune": "hf-neuron-moe train",
    "cli": "hf-neuron-moe",
}
LEFT, TOP, CELL = 350, 130, 26


def ordered() -> list[str]:
    """Return the packages above the ground, those that import most first."""
    above = [name for name in ALLOWED if name not in GROUND and not name.startswith("__")]
    return above[::-1]


def draw() -> str:
    """Return the picture."""
    names = ordered()
    parts = [text(20, 34, "A package may import those with a dot in its row", kind="title")]
    described = []
    for row, name in enumerate(names):
        y = TOP + CELL * row
        parts.append(text(20, y + 17, name, kind="strong"))
        parts.append(text(110, y + 17, WORDS.get(name, ""), kind="muted"))
        parts.append(f'<line class="grid" x1="20" y1="{y + CELL}" x2="{LEFT + CELL * len(names)}" y2="{y + CELL}"/>')
        for column, other in enumerate(names):
            x = LEFT + CELL * column + CELL / 2
            if name == other:
                parts.append(f'<rect class="box" x="{x - 9}" y="{y + 4}" width="18" height="18" rx="3"/>')
            elif other in ALLOWED[name]:
                assert column > row, f"{name} imports {other}, which the table has above it"
                parts.append(f'<circle class="bar" cx="{x}" cy="{y + 13}" r="6"/>')
        if below := sorted(ALLOWED[name] - GROUND):
            described.append(f"{name} imports {', '.join(below)}")
    for column, name in enumerate(names):
        x = LEFT + CELL * column + CELL / 2 + 4
        parts.append(f'<text x="{x}" y="{TOP - 8}" transform="rotate(-45 {x} {TOP - 8})">{name}</text>')
    y = TOP + CELL * len(names) + 26
    parts.append(text(20, y, "All dots lie right of the diagonal: imports point down, in no circle.", kind="strong"))
    parts.append(text(20, y + 20, f"All may import {', '.join(sorted(GROUND))}.", kind="muted"))
    return picture((880, y + 38), "Packages and imports", "; ".join(described), parts)
