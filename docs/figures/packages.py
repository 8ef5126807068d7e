"""The packages and which of them import which, from the table that tests/test_architecture.py enforces."""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import arrow, box, picture, text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from code_figures import ALLOWED, GROUND

WORDS = {
    "checks": "arguments",
    "formats": "MX, swizzle",
    "backends": "torch, triton, neuron",
    "modules": "operators, blocks",
    "reference": "nki-lib's operators",
    "patching": "patch_model",
    "training": "Trainer, metrics",
    "convert": "checkpoints",
    "quantizers": "from_pretrained",
    "report": "pages, figures",
    "cli": "hf-neuron-moe",
}
"""A word or two below a package's name."""


def reduced() -> dict[str, set[str]]:
    """Return the direct imports that no longer way implies, without the ground, which all may import."""
    left_out = GROUND | {"__init__"}
    below = {name: set(others) - left_out for name, others in ALLOWED.items() if name not in left_out}
    return {
        name: {other for other in others if not any(other in below[between] for between in others)}
        for name, others in below.items()
    }


def levels(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the packages by the length of their longest way down, lowest first."""
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((depth_of(other) for other in edges[name]), default=-1)
        return depth[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(depth_of, edges)))]
    for name in edges:
        rows[depth[name]].append(name)
    return rows


def draw() -> str:
    """Return the picture."""
    edges = reduced()
    rows = levels(edges)
    width, step = 880, 78
    bottom = 62 + step * (len(rows) - 1)
    place = {}
    for number, row in enumerate(rows):
        for column, name in enumerate(row):
            place[name] = (width * (column + 1) / (len(row) + 1), bottom - step * number)
    parts = [text(20, 34, "Packages of hf_neuron_moe, and what each imports", kind="title")]
    for name, others in edges.items():
        for other in sorted(others):
            (x, y), (u, v) = place[name], place[other]
            shift = 0.12 * (u - x)
            parts.append(arrow((x + max(-50, min(50, shift)), y + 40), (u - max(-50, min(50, shift)), v)))
    for name, (x, y) in place.items():
        lines = (name, WORDS[name]) if name in WORDS else (name,)
        parts.append(box(x - 64, y, 128, 40, *lines, kind="blue", font="small"))
    ground = ", ".join(sorted(GROUND))
    parts.append(box(20, bottom + 66, width - 40, 30, f"the ground, which all may import: {ground}", font="small"))
    parts.append(text(20, bottom + 118, "An arrow is an import that no longer way implies. tests/test_architecture.py fails when a file imports upwards.", kind="muted"))
    what = "; ".join(f"{name} imports {', '.join(sorted(others))}" for name, others in edges.items() if others)
    return picture((width, bottom + 134), "Packages and imports", what, parts)
