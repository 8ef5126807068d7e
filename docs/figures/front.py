"""Draw docs/figures/front.svg, the README's picture.

    python docs/figures/front.py                                   # draws from docs/figures/front.json
    python docs/figures/front.py --record demo_output/demo.json    # takes the losses of a demo first

Left: losses on held-out text in the demo. Right: the table of saved KiB per token in docs/concepts.md.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from drawing import picture, text

FIGURES = Path(__file__).resolve().parent
RECORD, PICTURE, CONCEPTS = FIGURES / "front.json", FIGURES / "front.svg", FIGURES.parent / "concepts.md"
BLOCKS = ("Llama-3-8B MLP", "Qwen3-30B-A3B experts")
RUNS = {"stock fp32": "stock", "bf16": "bf16", "mxfp8": "mxfp8"}  # name in the report: class in the picture

WIDTH, HEIGHT = 880, 350
LEFT, TOP, BOTTOM, PLOT = 56, 84, 284, 350  # the curves' frame: left, top and bottom edge, width
BARS, BAR_WIDTH, ROW = 600, 200, 15.5  # the bars: left edge, width of the largest, height of a row

STYLE = """
  .line { fill: none; stroke-linejoin: round } .line.stock { stroke: #afb8c1; stroke-width: 6 }
  .line.bf16 { stroke: #0969da; stroke-width: 2.2 }
  .line.mxfp8 { stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    .line.stock { stroke: #656c76 } .line.bf16 { stroke: #58a6ff } .line.mxfp8 { stroke: #ffa657 }
  }
"""


def record(report: Path) -> dict[str, Any]:
    """Return what the picture needs of a demo's record: when and where, the setting, and the curves."""
    data = json.loads(report.read_text(encoding="utf-8"))
    where = {name: data["environment"][name] for name in ("date", "python", "threads", "accelerator")}
    packages = {name: data["environment"]["packages"][name] for name in ("torch", "transformers")}
    curves = {run["name"]: [[step, round(loss, 4)] for step, loss in run["curve"]] for run in data["runs"]}
    return {"title": data["title"], "setting": data["setting"], "environment": where | packages, "curves": curves}


def saved_bytes(page: str) -> dict[str, dict[str, float]]:
    """Return KiB per token by block and policy, from the table in docs/concepts.md."""
    lines = page.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("| | stock | `full`"))
    policies = [cell.strip(" `") for cell in lines[head].split("|")[2:-1]]
    rows = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        rows[name] = dict(zip(policies, map(float, cells), strict=True))
    return rows


def curves(found: dict[str, list[list[float]]]) -> list[str]:
    """Return the left half: axes, a legend, and one line per run."""
    points = [point for curve in found.values() for point in curve]
    steps = int(max(step for step, _ in points))
    low = int(min(loss for _, loss in points) * 2) / 2
    high = int(max(loss for _, loss in points) * 2 + 1) / 2

    def place(step: float, loss: float) -> tuple[float, float]:
        return LEFT + step * PLOT / steps, BOTTOM - (loss - low) * (BOTTOM - TOP) / (high - low)

    parts = []
    for number in range(round((high - low) * 2) + 1):
        mark = low + number / 2
        _, y = place(0, mark)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{LEFT + PLOT}" y2="{y:g}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{mark:g}", kind="muted", anchor="end"))
    for step in range(0, steps + 1, max(1, steps // 5)):
        parts.append(text(place(step, low)[0], BOTTOM + 18, str(step), kind="muted", anchor="middle"))
    parts.append(text(LEFT + PLOT / 2, BOTTOM + 36, "training step", kind="muted", anchor="middle"))
    for number, (name, kind) in enumerate(RUNS.items()):
        line = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in found[name])
        parts.append(f'<polyline class="line {kind}" points="{line}"/>')
        x = LEFT + 60 + 112 * number
        parts.append(f'<line class="line {kind}" x1="{x}" y1="{TOP - 14}" x2="{x + 26}" y2="{TOP - 14}"/>')
        parts.append(text(x + 32, TOP - 10, name))
    return parts


def bars(rows: dict[str, dict[str, float]]) -> list[str]:
    """Return the right half: one bar per policy for each block."""
    parts, y = [], 74.0
    largest = max(max(rows[block].values()) for block in BLOCKS)
    for block in BLOCKS:
        parts.append(text(BARS - 100, y, block))
        y += 9
        for policy, kib in rows[block].items():
            width = BAR_WIDTH * kib / largest
            kind = "bar stock" if policy == "stock" else "bar"
            size = f'width="{width:.1f}" height="{ROW - 3.5:g}"'
            parts.append(f'<rect class="{kind}" x="{BARS}" y="{y:g}" {size} rx="2"/>')
            name = "stock bf16" if policy == "stock" else policy
            parts.append(text(BARS - 8, y + 10, name, kind="muted", anchor="end"))
            parts.append(text(BARS + width + 6, y + 10, f"{kib:.1f}"))
            y += ROW
        y += 26
    return parts


def draw(recorded: dict[str, Any], rows: dict[str, dict[str, float]]) -> str:
    """Return the picture."""
    losses = {name: [loss for _, loss in curve] for name, curve in recorded["curves"].items()}
    ends = ", ".join(f"{name} {values[0]:.2f} to {values[-1]:.2f}" for name, values in losses.items())
    saved = "; ".join(f"{block} " + ", ".join(f"{p} {k:.1f}" for p, k in rows[block].items()) for block in BLOCKS)
    parts = [
        text(20, 34, "The demo's loss on held-out text (nats)", kind="title"),
        *curves(recorded["curves"]),
        text(BARS - 100, 34, "Saved for backward, KiB per token and block", kind="title"),
        *bars(rows),
        text(BARS - 100, HEIGHT - 16, "bf16 blocks; policies of NeuronMoEConfig(activations=...)", kind="muted"),
    ]
    title = "Losses of the demo, and saved bytes per token by activation policy"
    what = f"Loss on held-out text, before and after: {ends}. KiB saved per token: {saved}."
    return picture((WIDTH, HEIGHT), title, what, parts, STYLE)


def main() -> None:
    """Record if asked to, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--record", type=Path, help="a demo's demo.json")
    arguments = parser.parse_args()
    if arguments.record is not None:
        text_of = json.dumps(record(arguments.record), indent=1)
        RECORD.write_text(re.sub(r"\n +(?=[-\d\]\[])", " ", text_of) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    PICTURE.write_text(draw(recorded, saved_bytes(CONCEPTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
