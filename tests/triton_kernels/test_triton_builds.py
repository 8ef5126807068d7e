"""Every kernel compiles for Hopper and Blackwell, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.triton
SHARED = 227 * 1024  # bytes of shared memory that a program can have, on both


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_blackwell(repo_root: Path, tmp_path: Path) -> None:
    """A process of its own: Triton reads when it is imported whether it interprets."""
    command = [sys.executable, "scripts/triton_builds.py"]
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(repo_root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, env=variables)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(maxsplit=4) for line in done.stdout.splitlines()[2:]]
    built = {(name, arch) for name, arch, *_ in rows}
    assert len(built) == len(rows) >= 26
    assert {name for name, arch in built if arch == "90"} == {name for name, arch in built if arch == "100"}
    for _, _, registers, spills, shared in rows:
        assert 0 < int(registers) <= 255
        assert int(spills) <= 64, "a kernel whose tiles do not fit into the registers"
        assert int(shared) <= SHARED
