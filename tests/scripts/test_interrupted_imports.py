"""Ctrl-C while a script still imports its packages, which turn what that raises into other errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("package", "script"),
    [
        ("torch", "finetune.py"),
        pytest.param("transformers", "finetune.py", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_during_the_imports_ends_in_one_line(script: str, package: str, repo_root: Path, tmp_path: Path) -> None:
    stop = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: raise ImportError"
    (tmp_path / f"{package}.py").write_text(stop, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{repo_root}"}
    command = [sys.executable, str(repo_root / "scripts" / script)]
    # A shell's background jobs, such as a test run, ignore the signal and hand that on.
    child = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (child.returncode, child.stdout, child.stderr) == (130, "", "interrupted before it began\n")
