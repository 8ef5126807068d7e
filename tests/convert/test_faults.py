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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = ("fresh", "replace", "resumed", "parts", "finalize", "export")
KILLED = ("kill", "powercut", "powercut-names")
REFUSED = ("ENOSPC", "EIO", "EACCES", "full")
EVERY = int(os.environ.get("FAULT_SWEEP_EVERY", "10"))
"""Every n-th call is struck, except by SIGKILL, which strikes all; with 1 this takes ten minutes on two cores."""


class Driver:
    """A process that strikes; one for all tests, since importing everything takes as long as 50 conversions."""

    def __init__(self, root: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.convert.fault_driver", str(folder / "work")]
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root
            )

    def outcomes(self, *words: str) -> Iterator[dict[str, Any]]:
        """What the driver prints about one line of `words`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line == "\n":
                return
            yield json.loads(line)
        pytest.fail(self.errors.read_text())


@pytest.fixture(scope="module")
def driver(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    started = Driver(repo_root, tmp_path_factory.mktemp("faults"))
    with started.process:
        yield started


def sweep(driver: Driver, *wanted: str, sync: bool = False) -> list[dict[str, Any]]:
    """Outcomes of sweeps ``SCENARIO:ACTION:EVERY``, which strike every n-th call."""
    outcomes = list(driver.outcomes(*wanted, *["sync"] * sync))
    assert [outcome for outcome in outcomes if outcome["problem"]] == []
    for name in wanted:
        scenario, action, every = name.split(":")
        mine = [entry for entry in outcomes if (entry["scenario"], entry["action"]) == (scenario, action)]
        assert len(mine) == mine[0]["of"] // int(every)
        assert {entry["killed"] for entry in mine} == {action in KILLED}
    return outcomes


def test_sample_of_struck_calls(driver):
    wanted = ("fresh:kill:23", "replace:powercut-names:59", "replace:ENOSPC:83")
    assert len(sweep(driver, *wanted, sync=True)) >= 9


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_call(name, driver):
    outcomes = sweep(driver, f"{name}:kill:1")
    assert len(outcomes) >= 20
    # A destination that is replaced is complete at any time; parts are completed by finalize.
    expected = {"replace": {"complete"}, "parts": {"not yet"}}.get(name, {"not yet", "complete"})
    assert {outcome["state"] for outcome in outcomes} == expected


@pytest.mark.slow
@pytest.mark.parametrize("action", KILLED[1:])
def test_power_cut(action, driver):
    assert len(sweep(driver, *(f"{name}:{action}:{EVERY}" for name in SCENARIOS))) >= 400 // EVERY - 6


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("action", REFUSED)
def test_calls_refused(action, driver):
    assert len(sweep(driver, *(f"{name}:{action}:{EVERY}" for name in SCENARIOS))) >= 400 // EVERY - 6
