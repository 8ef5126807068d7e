"""Conversions that are killed, lose power or meet a failing disk, at every single call that reads or changes the disk.

The sweeps run in a child process (tests/convert/fault_driver.py), a fork of it for every run that is killed. Each
outcome there already compares: the source unchanged; the destination absent, the earlier one, or the complete new one;
after running again the bytes of an undisturbed run, nothing else left, and at most one shard made twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = ("fresh", "replace", "resumed", "parts", "finalize", "export")
KILLED = ("kill", "powercut", "powercut-names")
REFUSED = ("ENOSPC", "EIO", "EACCES", "full")
EVERY = int(os.environ.get("FAULT_SWEEP_EVERY", "5"))
"""Every n-th call is struck, except by SIGKILL, which strikes all; with 1 this takes ten minutes on two cores."""


def sweep(repo_root: Path, work: Path, *wanted: str, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Outcomes of sweeps ``SCENARIO:ACTION:EVERY``, which strike every n-th call."""
    command = [sys.executable, "-m", "tests.convert.fault_driver", *options, str(work), *wanted]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=False)
    assert result.returncode == 0, result.stderr
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert [outcome for outcome in outcomes if outcome["problem"]] == []
    for name in wanted:
        scenario, action, every = name.split(":")
        mine = [entry for entry in outcomes if (entry["scenario"], entry["action"]) == (scenario, action)]
        assert len(mine) == mine[0]["of"] // int(every)
        assert {entry["killed"] for entry in mine} == {action in KILLED}
    return outcomes


def test_sample_of_struck_calls(repo_root, tmp_path):
    wanted = ("fresh:kill:23", "replace:powercut-names:59", "replace:ENOSPC:83")
    assert len(sweep(repo_root, tmp_path, *wanted, options=("--sync",))) >= 9


@pytest.mark.slow
def test_killed_at_every_call(repo_root, tmp_path):
    outcomes = sweep(repo_root, tmp_path, *(f"{name}:kill:1" for name in SCENARIOS))
    assert len(outcomes) >= 400
    assert {outcome["state"] for outcome in outcomes} == {"not yet", "complete"}


@pytest.mark.slow
@pytest.mark.parametrize("action", KILLED[1:])
def test_power_cut(action, repo_root, tmp_path):
    assert len(sweep(repo_root, tmp_path, *(f"{name}:{action}:{EVERY}" for name in SCENARIOS))) >= 400 // EVERY - 6


@pytest.mark.slow
@pytest.mark.parametrize("action", REFUSED)
def test_calls_refused(action, repo_root, tmp_path):
    assert len(sweep(repo_root, tmp_path, *(f"{name}:{action}:{EVERY}" for name in SCENARIOS))) >= 400 // EVERY - 6
