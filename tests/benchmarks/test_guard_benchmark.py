"""The guard's benchmark: a healthy run is silent and goes on where it stopped; its cost is measured."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_healthy_run_is_silent_and_goes_on(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("guard_benchmark", repo_root / "benchmarks" / "guard.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    study = benchmark.Study(benchmark.SUBJECTS, tmp_path)
    for steps in (10, 12):  # a checkpoint is written after the last step
        asked = argparse.Namespace(out=tmp_path, precision="mxfp8", steps=steps)
        found = benchmark.healthy("scratch-mixtral", 0, asked, study)
        assert found == {"steps": steps, "looked": steps // 4 + 7, "alarms": []}
    records = (tmp_path / "scratch-mixtral.mxfp8.0" / "neuron_moe" / "guard.jsonl").read_text().splitlines()
    assert len(records) == 10  # 1 to 8, 10 and 12
