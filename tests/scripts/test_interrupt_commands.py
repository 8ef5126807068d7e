"""A few of the commands at a random moment each; scripts/interrupt_commands.py has all of them and more moments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from interrupt_commands import COMMANDS, failure_of

from hf_neuron_moe.cli import main


def test_every_command_has_a_line() -> None:
    assert set(COMMANDS) == set(main.COMMANDS)


def test_failures_are_seen() -> None:
    assert failure_of(130, "interrupted\n") == failure_of(0, "") == failure_of(-2, "") == ""
    assert failure_of(130, "Traceback (most recent call last):\ninterrupted\n").startswith("a traceback")
    assert failure_of(130, "Exception ignored in: x\ninterrupted\n").startswith("a traceback")
    assert failure_of(70, "").startswith("exit code") and failure_of(130, "").startswith("no word")


@pytest.mark.slow
def test_commands_end_in_one_line(repo_root: Path) -> None:
    script = str(repo_root / "scripts" / "interrupt_commands.py")
    command = [sys.executable, script, "--moments", "1", "--only", "convert", "demo", "explore", "inspect"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0 and "0 failures" in done.stdout, done.stdout + done.stderr[-2000:]
