"""The benchmark says what it is timing, and shows the tables of the halves it ran."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "blocks.py"
    spec = importlib.util.spec_from_file_location("benchmark_blocks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_contestant_is_announced_before_its_first_run(blocks: ModuleType) -> None:
    console = Console(file=io.StringIO(), width=150)
    said: list[str] = []

    def contestant(name: str):
        return lambda: said.append(f"{name} after {console.file.getvalue().count(name)}")

    steps = {name: contestant(name) for name in ("gemm", "stock")}
    times = blocks.time_in_turns(steps, 2, 9.0, "training", blocks.Progress(console))
    assert [entry["runs"] for entry in times.values()] == [2.0, 2.0]
    assert console.file.getvalue().splitlines() == [f"   training: {name}, warm-up" for name in steps]
    assert said[:2] == ["gemm after 1", "stock after 1"]


def test_a_table_is_shown_for_each_half_that_was_run(blocks: ModuleType) -> None:
    case = blocks.Case("a", 32, 48, 16, 4, 2)
    progress = blocks.Progress(Console(quiet=True))
    train = {"a": blocks.bench_training(case, 1, 9.0, progress)}
    decode = {"a": blocks.bench_decode(case, 1, progress)}
    for halves in ({"train": train}, {"decode": decode}, {"train": train, "decode": decode}):
        console = Console(file=io.StringIO(), width=150)
        blocks.show({"machine": {}, "train": {}, "decode": {}, **halves}, console)
        shown = console.file.getvalue()
        assert ("saved KiB/token" in shown, "decode: ours/stock" in shown) == ("train" in halves, "decode" in halves)
