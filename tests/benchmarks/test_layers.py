"""The benchmark of several layers times each contestant in a process of its own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import layers
from benchmarks.blocks import Case


@pytest.mark.slow
def test_contestants_take_turns_and_are_compared() -> None:
    found = layers.measure(Case("tiny", 32, 64, 8, 4, 2), "bf16", 2, repeats=2, threads=1)
    times, best = found["times"], found["best_stock"]
    assert list(times) == [best, "bf16", "mxfp8"] and best in ("eager", "grouped_mm")
    assert all(0 < entry["q1_s"] <= entry["median_s"] <= entry["q3_s"] < 60 for entry in times.values())
    expected = {name: times[best]["median_s"] / times[name]["median_s"] for name in ("bf16", "mxfp8")}
    assert found["speedup_over_best_stock"] == expected
    console = Console(file=io.StringIO(), width=130)
    layers.show([found], 2, console)
    rows = [line for line in console.file.getvalue().splitlines() if "T=8" in line]
    assert [f"stock {best}" in rows[0], "patched bf16" in rows[1], "patched mxfp8" in rows[2]] == [True] * 3
