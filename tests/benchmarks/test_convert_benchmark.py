"""The conversion benchmark runs on a small checkpoint and reports what its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_contestant_runs(repo_root, tmp_path):
    command = [sys.executable, "benchmarks/convert.py", str(tmp_path), "--gigabytes", "0.02"]
    command += ["--repeats", "1", "--workers", "2", "--json", str(tmp_path / "out.json")]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=True).stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert {"0.02"} == content["results"].keys()
    for name in ("bf16-kernel", "mxfp8-swizzled", "mxfp8-moe-words"):
        entry = content["results"]["0.02"][name]
        assert entry["speed_of_cp"] > 0 and entry["speed_of_transformers"] > 0
        assert entry["added_mb"] > 0  # its bound is tests/convert/test_convert_memory.py's business
        assert name in shown
    assert not (tmp_path / "target").exists()
