"""Saved bytes by policy, and the matrix products that a step repeats for it."""

from __future__ import annotations

import front
from drawing import picture, text

from hf_neuron_moe.activation_policy import canonical_keep, kept_up_columns, parse_keep

BLOCKS = {"Llama-3-8B MLP": 14336, "Qwen3-30B-A3B experts": 768, "quarter-width Mixtral experts": 3584}  # their I
PRODUCTS = 9  # of a step: gate, up and down, each once forward, and for the gradients of its input and its weight


def repeated(policy: str, inner: int) -> float:
    """Return how many of a step's nine products a policy adds, bf16."""
    keep = parse_keep(canonical_keep(policy, "bf16"))
    again = 2.0 - len(keep.names & {"gate_pre", "up"})
    return again + (0.0 if keep.whole_up else 1 - kept_up_columns(inner) / inner)


def draw() -> str:
    """Return the picture."""
    table = front.saved_bytes(front.CONCEPTS.read_text(encoding="utf-8"))
    parts = [
        text(20, 34, "What a policy saves, and what it computes again (bf16)", kind="title"),
        text(150, 62, "KiB saved per token and block", kind="muted"),
        text(560, 62, "matrix products per step, of which repeated", kind="muted"),
    ]
    largest, y, described = max(max(table[block].values()) for block in BLOCKS), 84.0, []
    for block, inner in BLOCKS.items():
        parts.append(text(20, y, block, kind="strong"))
        y += 10
        for policy, kib in table[block].items():
            extra = 0.0 if policy == "stock" else repeated(policy, inner)
            width = 320 * kib / largest
            kind = "bar stock" if policy == "stock" else "bar"
            parts.append(text(142, y + 11, "stock bf16" if policy == "stock" else policy, kind="muted", anchor="end"))
            parts.append(f'<rect class="{kind}" x="150" y="{y:g}" width="{width:.1f}" height="14" rx="2"/>')
            parts.append(text(156 + width, y + 11, f"{kib:.1f}"))
            parts.append(f'<rect class="bar stock" x="560" y="{y:g}" width="{PRODUCTS * 18}" height="14"/>')
            parts.append(
                f'<rect class="bar extra" x="{560 + PRODUCTS * 18}" y="{y:g}" width="{extra * 18:.1f}" height="14"/>'
            )
            parts.append(text(568 + (PRODUCTS + extra) * 18, y + 11, f"{PRODUCTS + extra:.4g}"))
            described.append(f"{block} {policy}: {kib:.1f} KiB, {PRODUCTS + extra:.4g} products")
            y += 19
        y += 22
    parts.append(
        text(
            20,
            y + 2,
            "Bytes are computed from shapes, as saved-tensor hooks count them. No time by policy has been recorded.",
            kind="muted",
        )
    )
    return picture((880, int(y) + 18), "Saved bytes and repeated products by policy", "; ".join(described), parts)
