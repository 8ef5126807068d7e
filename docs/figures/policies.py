"""Saved bytes by policy, and the time of a training step.

python benchmarks/policies.py --json out.json
python docs/figures/policies.py --record out.json       # takes the times into docs/figures/policies.json
python docs/figures/draw.py policies
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import front
from drawing import picture, text

RECORD = Path(__file__).with_suffix(".json")


def record(report: Path) -> dict[str, Any]:
    """Return what the picture needs of a report: where and when, and medians in milliseconds."""
    data = json.loads(report.read_text(encoding="utf-8"))
    blocks = {
        name: {"tokens": block["tokens"]}
        | {policy: round(1e3 * times["median_s"]) for policy, times in block["times"].items()}
        for name, block in data["blocks"].items()
    }
    return {"machine": data["machine"], "blocks": blocks}


def draw() -> str:
    """Return the picture."""
    saved = front.saved_bytes(front.CONCEPTS.read_text(encoding="utf-8"))
    data = json.loads(RECORD.read_text(encoding="utf-8"))
    machine = data["machine"]
    parts = [
        text(20, 34, "What a policy saves, and what a step then takes (bf16)", kind="title"),
        text(150, 62, "KiB saved per token and block", kind="muted"),
        text(560, 62, "ms per step of one block, forward and backward", kind="muted"),
    ]
    largest, y, described = max(max(row.values()) for row in saved.values()), 84.0, []
    for block, row in saved.items():
        times = data["blocks"][block]
        parts.append(text(20, y, f"{block}, {times['tokens']} tokens", kind="strong"))
        slowest, y = max(times[policy] for policy in row), y + 10
        for policy, kib in row.items():
            kind = "bar stock" if policy == "stock" else "bar"
            parts.append(text(142, y + 11, "stock bf16" if policy == "stock" else policy, kind="muted", anchor="end"))
            for x, width, shown in (
                (150, 320 * kib / largest, f"{kib:.1f}"),
                (560, 240 * times[policy] / slowest, f"{times[policy]:,}"),
            ):
                parts.append(f'<rect class="{kind}" x="{x}" y="{y:g}" width="{width:.1f}" height="14" rx="2"/>')
                parts.append(text(x + 6 + width, y + 11, shown))
            described.append(f"{block} {policy}: {kib:.1f} KiB, {times[policy]:,} ms")
            y += 19
        y += 22
    instructions = "bf16 instructions" if machine["native_bf16_matmul"] else "no bf16 instructions"
    where = f"{machine['threads']} threads, {machine['processor']}, {instructions}, {machine['date']}"
    note = f"Bytes are computed from shapes, as saved-tensor hooks count them. Times: benchmarks/policies.py, {where}."
    parts.append(text(20, y + 2, note, kind="muted"))
    return picture((880, int(y) + 18), "Saved bytes and time of a step by policy", "; ".join(described), parts)


def main() -> None:
    """Take a report of benchmarks/policies.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="report of benchmarks/policies.py")
    RECORD.write_text(json.dumps(record(parser.parse_args().record), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
