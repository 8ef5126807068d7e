"""The benchmark of several layers times each contestant in a process of its own."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import sys

import pytest
from rich.console import Console

from benchmarks import few_tokens, layers
from benchmarks.blocks import Case


@pytest.mark.slow
def test_contestants_take_turns_and_ours_gets_no_new_pages() -> None:
    found = layers.measure(Case("tiny", 128, 256, 8, 32, 8), "fp32", layers=3, repeats=3, threads=1)
    times, best = found["times"], found["best_stock"]
    assert list(times) == [best, "fp32"] and best in ("eager", "grouped_mm")
    assert all(0 < entry["q1_s"] <= entry["median_s"] <= entry["q3_s"] < 60 for entry in times.values())
    assert found["speedup_over_best_stock"] == {"fp32": times[best]["median_s"] / times["fp32"]["median_s"]}
    pages = 3 * 3 * 32 * 128 * 256 * 4 / mmap.PAGESIZE  # of the gradients of a step
    assert times["fp32"]["median_page_faults"] < pages / 10
    console = Console(file=io.StringIO(), width=140)
    layers.show([found], 3, console)
    rows = [line for line in console.file.getvalue().splitlines() if "T=8" in line]
    assert [f"stock {best}" in rows[0], "patched fp32" in rows[1]] == [True] * 2


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", ""])
def test_numbers_below_one_are_refused(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["layers.py", f"--layers={wrong}"])
    with pytest.raises(SystemExit, match="2"):
        layers.main()
    assert f"a number of 1 or more is needed, not {wrong!r}" in capsys.readouterr().err


def test_more_experts_of_a_token_than_there_are_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for benchmark in (layers, few_tokens):
        monkeypatch.setattr(sys, "argv", ["benchmark", "--sizes", "64", "64", "2", "8"])
        with pytest.raises(SystemExit, match="2"):
            benchmark.main()
        assert "at most all 2 experts, not 8" in capsys.readouterr().err


def test_a_process_that_ended_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(SystemExit, match="the process of 'bf16' has ended"):
        layers.answer(ours, "bf16")
