"""The benchmark of the metrics' cost runs and reports what its docstring says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_reports_the_cost_of_every_part(repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/training_overhead.py", "--clock", "cpu", "--steps", "14"]
    command += ["--cases", "dense", "few experts", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=True, env=environment).stdout
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["name"] for case in cases] == ["dense", "few experts"]
    for case in cases:
        assert case["name"] in shown
        assert case["hooks_s"] > 0 and case["collect_s"] > 0 and case["health_s"] > 0
        # The goal, with logging in every tenth step, where the steps are short. What the processor does beside this
        # test stretches a step and its hooks alike.
        assert case["overhead_logging_every_10"] < 0.02
