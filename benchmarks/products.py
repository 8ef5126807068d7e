"""Time of fp32 matrix products as the blocks make them, over that of ``torch.mm`` with the same operands.

    python benchmarks/products.py --json out.json   # half a minute
    python benchmarks/products.py --isa avx2        # held to AVX2

Where ``hf_neuron_moe/backends/torch/cpu/matmul.py`` leaves a product to torch, both do the same and the ratio
shows the measurement's noise. "first" is the first product of a shape, for which oneDNN generates code, of as many
shapes as there are repeats.

Legend: M, K, N as in ``[M, K] @ [K, N]``; right operands lie column by column (as ``nn.Linear`` weights, "weight") or
row by row ("transposed weight"); a transposed left operand is that of a weight gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.blocks import Progress, time_in_turns
from benchmarks.setting import machine, restart_with_isa
from hf_neuron_moe.backends.torch.cpu.matmul import matmul_into, matmul_over_rows_into, onednn_rule

SHAPES = (
    (512, 512, 1792),
    (512, 1792, 512),
    (256, 512, 256),
    (256, 1024, 2048),
    (256, 2048, 1024),
    (1024, 576, 1536),
    (512, 768, 2048),
    (1024, 1024, 2048),
    (512, 4096, 1024),
)
Step = Callable[[], Any]


def contestants(rows: int, inner: int, columns: int, kind: str) -> dict[str, Step]:
    """Return both ways to make one product, results in memory that was allocated before."""
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    out, ours = torch.empty(rows, columns), torch.empty(rows, columns)
    if kind == "weight":
        right = right.t().contiguous().t()
    elif kind == "transposed left":
        left = left.t().contiguous().t()

    def multiply() -> Tensor:
        if kind == "transposed left":
            matmul_over_rows_into(ours, left.t(), right, inner, accumulate=False)
        else:
            matmul_into(ours, left, right, accumulate=False)
        return ours

    return {"mm": lambda: torch.mm(left, right, out=out), "ours": multiply}


def first_times(rows: int, inner: int, columns: int, repeats: int) -> float:
    """Median seconds of the first product of a shape; shapes that nothing else here multiplies."""
    times = []
    for number in range(repeats):
        other = inner + 2 * number + 1  # K, since M is a multiple and the rule looks at N
        left, right = torch.randn(rows, other), torch.randn(columns, other).t()
        out = torch.empty(rows, columns)
        start = time.perf_counter()
        matmul_into(out, left, right, accumulate=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench(repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """One entry per shape and kind of operands."""
    entries = []
    for shape in SHAPES:
        for kind in ("weight", "transposed weight", "transposed left"):
            times = time_in_turns(contestants(*shape, kind), repeats, 1.0, f"{shape}, {kind}", progress, 0.0)
            entry: dict[str, Any] = {"shape": shape, "kind": kind, "times": times}
            entry["ours_over_mm"] = times["ours"]["median_s"] / times["mm"]["median_s"]
            if kind == "weight":
                entry["first_over_mm"] = first_times(*shape, repeats) / times["mm"]["median_s"]
            entries.append(entry)
    return entries


def show(entries: list[dict[str, Any]], console: Console) -> None:
    """Print one row per shape."""
    table = Table("M, K, N", "mm ms", "weight", "transposed weight", "transposed left", "first", title="time over mm's")
    for shape in dict.fromkeys(entry["shape"] for entry in entries):
        rows = {entry["kind"]: entry for entry in entries if entry["shape"] == shape}
        ratios = [f"{row['ours_over_mm']:.2f}" for row in rows.values()]
        weight = rows["weight"]
        milliseconds = f"{weight['times']['mm']['median_s'] * 1e3:.2f}"
        table.add_row(str(shape), milliseconds, *ratios, f"{weight['first_over_mm']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    arguments = parser.parse_args()
    if arguments.isa:
        restart_with_isa(arguments.isa)
    console = Console(width=120)
    report: dict[str, Any] = {"machine": machine(), "onednn": onednn_rule() is not None}
    console.print(report["machine"])
    console.print("oneDNN takes large products" if report["onednn"] else "all products are left to torch.mm")
    report["products"] = bench(arguments.repeats, Progress(console))
    show(report["products"], console)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"report: {arguments.json}")


if __name__ == "__main__":
    main()
