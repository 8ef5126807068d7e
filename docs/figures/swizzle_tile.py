"""The swizzle of one tile: where 32 values of a row of a weight go, and which of them share a scale."""

from __future__ import annotations

from drawing import arrow, box, picture, text

from hf_neuron_moe.formats.swizzle import k_map

K, LEFT, CELL = 64, 20, 26
COLORS = ("blue", "orange", "green", "purple")


def draw() -> str:
    """Return the picture, from the package's own map of a tile of 64."""
    place = k_map(K).tolist()  # [K/4][4]: the K index at each swizzled row and lane
    parts = [
        text(LEFT, 34, f"The swizzle of one tile of {K} values along K, for one output f", kind="title"),
        text(LEFT, 62, f"One row of the weight, W[f, 0] to W[f, {K - 1}], in four lanes of {K // 4}:"),
    ]
    for k in range(K):
        x, y = LEFT + CELL * (k % 32), 76 + 30 * (k // 32)
        parts.append(box(x, y, CELL - 2, 26, str(k), kind=COLORS[k * 4 // K], font="small"))
    parts.append(arrow((430, 140), (430, 164)))
    parts.append(text(445, 157, "Z[p, 4f + j] = W[f, 16 j + p]", kind="code"))
    top = 200
    parts.append(text(LEFT, top - 14, "The swizzled operand: rows p, and four neighbors j per output f."))
    for row, lanes in enumerate(place):
        side, line = divmod(row, 8)
        x, y = LEFT + 70 + 360 * side, top + 24 * line
        parts.append(text(x - 12, y + 16, f"p = {row}", kind="muted small", anchor="end"))
        for lane, k in enumerate(lanes):
            parts.append(box(x + 46 * lane, y, 43, 21, str(k), kind=COLORS[lane], font="small"))
    for side in range(2):
        x = LEFT + 62 + 360 * side
        parts.append(f'<rect class="frame" x="{x}" y="{top - 6}" width="197" height="202" rx="6"/>')
        parts.append(text(x + 206, top + 88, f"block {side}:", kind="strong"))
        parts.append(text(x + 206, top + 105, "one scale byte"))
    parts.append(
        text(
            LEFT,
            top + 220,
            "The four codes of a row are one 32-bit word for the hardware. Eight rows of it share a scale.",
        )
    )
    parts.append(
        text(
            LEFT,
            top + 240,
            "So a block is not 32 neighbors along K. Tiles of 512 are cut the same way, with lanes of 128.",
            kind="muted",
        )
    )
    style = "\n  .frame { fill: none; stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 5 3 }"
    first = sorted(k for lanes in place[:8] for k in lanes)
    what = f"Value k goes to row k mod 16 and lane k div 16. Block 0 holds k = {first}."
    return picture((880, top + 258), "The swizzle of one tile", what, parts, style)
