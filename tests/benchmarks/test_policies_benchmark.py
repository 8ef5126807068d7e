"""The benchmarks of activation policies and of two checkouts time what they say, on small blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import before_after, policies
from benchmarks.blocks import Case

SMALL = Case("mixtral", 32, 64, 32, 4, 2)


def test_every_policy_has_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policies, "CASES", {"small experts": SMALL})
    monkeypatch.setattr(sys, "argv", ["policies.py", "--repeats", "3", "--json", str(tmp_path / "out.json")])
    policies.main()
    times = json.loads((tmp_path / "out.json").read_text())["blocks"]["small experts"]["times"]
    assert set(times) == {"stock", *policies.POLICIES}
    assert all(0 < found["q1_s"] <= found["median_s"] <= found["q3_s"] for found in times.values())
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[2] for line in shown] == list(times)
    assert shown[1][-1] == "1.00"  # full, of itself


@pytest.mark.slow
def test_two_checkouts_take_turns(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(repo_root)
    command = [sys.executable, str(repo_root / "benchmarks" / "before_after.py"), str(tmp_path / "other")]
    options = [
        "--cases",
        "g",
        "--precisions",
        "bf16",
        "--tokens",
        "16",
        "--rounds",
        "2",
        "--json",
        str(tmp_path / "out.json"),
    ]
    run = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["ratio"] > 0 and {name: len(values) for name, values in row["ms"].items()} == {"before": 2, "after": 2}


def test_a_checkout_that_ends_is_named(tmp_path: Path) -> None:
    with (
        before_after.checkouts({"before": tmp_path}, None) as both,
        pytest.raises(SystemExit, match=f"process of {tmp_path} ended"),
    ):
        both["before"].seconds("a", "bf16", None)
