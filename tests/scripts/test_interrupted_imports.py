"""Ctrl-C while the command line still imports its packages, which turn what that raises into other errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["typer", "torch", pytest.param("transformers", marks=pytest.mark.slow)])
def test_ctrl_c_during_the_imports_ends_in_one_line(package: str, repo_root: Path, tmp_path: Path) -> None:
    stop = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: raise ImportError"
    (tmp_path / f"{package}.py").write_text(stop, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{repo_root}"}
    # A shell's background jobs, such as a test run, ignore the signal and hand that on.
    child = subprocess.run(
        [sys.executable, "-m", "hf_neuron_moe", "plan", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (child.returncode, child.stdout, child.stderr) == (130, "", "interrupted\n")
