"""The parity study: how curves become an answer, and that it goes on where it stopped."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def summary(repo_root: Path) -> ModuleType:
    for folder in ("scripts", "benchmarks/parity_study"):
        sys.path.insert(0, str(repo_root / folder))
    try:
        import study_summary
    finally:
        del sys.path[:2]
    return study_summary


def curves(gap: float) -> dict[str, dict[str, list[float]]]:
    """Losses of three seeds that differ by a constant factor between variants; only the last 100 steps count."""
    reference = {str(seed): [9.0] * 20 + [2.0 + 0.1 * seed] * 100 for seed in range(3)}
    other = {seed: [1.0] * 20 + [loss * (1 + gap) for loss in losses[20:]] for seed, losses in reference.items()}
    exact = {"0": [4.0] * 64}
    return {"stock fp32": reference, "bf16": reference, "mxfp8": other, "fp32": exact, "fp32, full": exact}


@pytest.mark.parametrize(("gap", "met"), [(0.0024, True), (-0.0024, True), (0.0026, False)])
def test_means_differences_and_goals(gap: float, met: bool, summary: ModuleType) -> None:
    found = summary.summarize({"m": curves(gap)})
    entry = found["m"]["variants"]["mxfp8"]
    assert entry["difference_percent"] == pytest.approx(100 * gap)
    assert entry["last_mean"] == pytest.approx(2.1 * (1 + gap))
    assert entry["seed_spread_percent"] == pytest.approx(100 * 0.1 / 2.1)  # standard deviation of 2.0, 2.1, 2.2
    assert entry["met"] is met
    assert found["m"]["fp32"]["met"] and found["m"]["fp32"]["largest_difference"] == 0
    lines = summary.verdict(found)
    assert ("Every goal is met by the mean over the seeds." in lines) is met
    assert met or "+0.2600 % against bf16, the goal is 0.25 %" in lines[0]


def test_single_seeds_beyond_the_goal_are_told(summary: ModuleType) -> None:
    own = curves(0.0)
    own["mxfp8"] = own["mxfp8"] | {"2": [loss * 1.004 for loss in own["bf16"]["2"]]}
    lines = summary.verdict(summary.summarize({"m": own}))
    assert lines[0] == "Every goal is met by the mean over the seeds."
    assert "(+0.1333 %), but not in every one (+0.0000, +0.0000, +0.4000 %)" in lines[1]


def test_exact_policies_are_held_to_their_tolerance(summary: ModuleType) -> None:
    own = curves(0.0)
    own["fp32, full"] = {"0": [4.0] * 63 + [4.0 * (1 + 3e-6)]}
    found = summary.summarize({"m": own})["m"]["fp32"]
    assert found["largest_difference"] == pytest.approx(3e-6, rel=1e-3) and not found["met"]


def test_an_unfinished_study_is_summarized_as_far_as_it_went(summary: ModuleType) -> None:
    found = summary.summarize({"m": {"mxfp8": {"0": [1.0, 2.0]}}})
    entry = found["m"]["variants"]["mxfp8"]
    assert (entry["last_mean"], entry["seeds"], entry["seed_spread_percent"]) == (1.5, 1, None)
    assert "met" not in entry and found["m"]["fp32"] is None
    assert summary.rows(found)[0][6] == "-"


@pytest.fixture
def study(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = repo_root / "benchmarks" / "parity.py"
    spec = importlib.util.spec_from_file_location("benchmark_parity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_study_runs_and_goes_on_where_it_stopped(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "scratch-mixtral", "--steps", "3", "--seeds", "1", "--out", str(tmp_path)]

    def call(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["parity.py", *options, "--docs", str(tmp_path / "parity.md"), *more])
        study.main()
        return capsys.readouterr().out

    assert call().count(">> ") == 8
    report = json.loads((tmp_path / "parity.json").read_text())
    losses = report["models"]["scratch-mixtral"]
    assert {variant: len(seeds["0"]) for variant, seeds in losses.items()} == dict.fromkeys(losses, 3)
    assert losses["mxfp8, recompute"] == losses["mxfp8"] != losses["bf16"] != losses["stock fp32"]
    assert losses["fp32"] == losses["fp32, full"] == losses["fp32, recompute"]
    assert report["runs"]["planned"] == report["runs"]["complete"] == 8
    saved = report["saved_bytes_per_token"]["scratch-mixtral"]
    assert saved["mxfp8, recompute"] < saved["mxfp8, fp8 saved"] < saved["mxfp8"] < saved["stock fp32"]
    assert "| scratch-mixtral | mxfp8 |" in (tmp_path / "parity.md").read_text()
    again = tmp_path / "runs" / "scratch-mixtral.bf16.0.json"
    again.unlink()
    assert call().count(">> ") == 1  # only what is missing
    assert json.loads((tmp_path / "parity.json").read_text())["models"]["scratch-mixtral"] == losses
    again.unlink()
    assert "the budget ends before scratch-mixtral.bf16.0.json" in call("--budget-minutes", "-1")
