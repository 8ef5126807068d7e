"""The benchmark says what it is timing, and shows the tables of the halves it ran."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
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
        assert ("saved KiB/token" in shown, "below 1 is faster" in shown) == ("train" in halves, "decode" in halves)


def test_both_instruction_sets_stand_side_by_side(blocks: ModuleType) -> None:
    row = {"speedup_over_best_stock": 1.25, "time_over_gemm": 0.75, "mxfp8_over_bf16": 1.5}
    native = {"train": {"(a) T=64": {"bf16": row | {"time_over_bf16_gemm": 1.125}}}}
    console = Console(file=io.StringIO(), width=160)
    blocks.show_side_by_side({"native": native, "avx2": {"train": {"(a) T=64": {"bf16": row}}}}, console)
    line = next(line for line in console.file.getvalue().splitlines() if "(a) T=64" in line)
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "(a) T=64",
        "1.25",
        "1.12",
        "1.50",
        "1.25",
        "0.75",
        "1.50",
    ]


@pytest.mark.slow
def test_a_busy_core_costs_time(blocks: ModuleType) -> None:
    case = blocks.Case("a", 64, 128, 64, 4, 2)
    entry = blocks.bench_busy(case, 2, blocks.Progress(Console(quiet=True)))
    assert set(entry["loss"]) == set(entry["times"]["free"]) == set(entry["times"]["busy"])
    console = Console(file=io.StringIO(), width=160)
    blocks.show({"machine": {}, "train": {}, "decode": {}, "busy": {"a": entry}}, console)
    assert "%" in console.file.getvalue()


@pytest.mark.slow
def test_varied_steps_have_other_tokens_and_are_compared(blocks: ModuleType) -> None:
    case = blocks.Case("a", 64, 128, 64, 4, 2)
    entry = blocks.bench_varied(case, 3, 1.0, blocks.Progress(Console(quiet=True)))
    assert set(entry["times"]) == set(entry["speedup_over_best_stock"]) == {"same", "varied"}
    for kind, times in entry["times"].items():
        assert set(times) == {"bf16", "mxfp8", "stock_eager", "stock_grouped_mm"}
        best = times[entry["best_stock"][kind]]["median_s"]
        assert best == min(times[name]["median_s"] for name in times if name.startswith("stock"))
        assert entry["speedup_over_best_stock"][kind]["bf16"] == best / times["bf16"]["median_s"]
    console = Console(file=io.StringIO(), width=160)
    blocks.show({"machine": {}, "train": {}, "decode": {}, "varied": {"a": entry}}, console)
    assert "varied" in console.file.getvalue()


def test_a_step_takes_the_next_batch(blocks: ModuleType) -> None:
    case = blocks.Case("a", 64, 128, 64, 4, 2)
    seen: list[int] = []
    block = blocks.Block(case, torch.float32, "eager")
    block.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    batches = [blocks.as_batch(blocks.make_inputs(case, count, torch.float32)) for count in (3, 5)]
    step = blocks.train_steps(block, batches)
    step()
    first = block.mlp.down_proj.grad.clone()
    step()
    assert seen == [3, 5] and not torch.equal(first, block.mlp.down_proj.grad)
    assert batches[1][0].grad is not None and batches[1][0].grad.shape == (5, case.H)


def test_the_decode_table_names_the_tokens_in_its_columns_only(blocks: ModuleType) -> None:
    row = {
        f"{precision}_T{tokens}": {"time_over_best_stock": 0.5} for precision in ("bf16", "fp32") for tokens in (1, 8)
    }
    console = Console(file=io.StringIO(), width=150)
    console.print(blocks.decode_table({"a": row}))
    shown = console.file.getvalue()
    assert "H=512 I=1792 E=8 k=2" in shown and "bf16 T=32" in shown and "T=2048" not in shown


def test_progress_says_whose_run_it_is_and_how_long_it_takes(
    blocks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "PROGRESS_S", -1.0)  # every run is announced
    console = Console(file=io.StringIO(), width=150)
    contestants = {"bf16": lambda: None, "stock_grouped_mm": lambda: None}
    times = blocks.time_in_turns(contestants, 1, 9.0, "training, bf16", blocks.Progress(console))
    assert list(times) == ["bf16", "stock_grouped_mm"]  # the report's keys
    said = console.file.getvalue()
    assert "training, bf16: patched bf16, warm-up" in said and "training, bf16: stock grouped_mm, run 1 of 1" in said
    assert " ms\n" in said and "0.0 s" not in said
    assert [blocks.duration(seconds) for seconds in (0.0123, 0.4567, 2.34)] == ["12.3 ms", "457 ms", "2.3 s"]


def test_the_processor_has_a_name(blocks: ModuleType) -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not names:
        pytest.skip("this system does not tell the processor's name")
    assert blocks.machine()["processor"] == names[0]
