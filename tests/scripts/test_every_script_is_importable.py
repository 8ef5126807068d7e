"""Every file of scripts/ and benchmarks/ can be imported: no name that a change of the package left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("scripts", "benchmarks", "benchmarks/parity_study")
# One folder after the other: with benchmarks/ in the path, its kernels.py would stand for a package of that name.
CODE = """
import importlib, sys
from pathlib import Path
for folder in sys.argv[1:]:
    for path in sorted(Path(folder).glob("*.py")):
        if folder not in sys.path:  # benchmarks take themselves out
            sys.path.append(folder)
        print(importlib.import_module(path.stem).__file__)
"""


def imported(*folders: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{CODE}"
    command = [sys.executable, "-c", code, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_all_files_are_imported_in_one_process(repo_root: Path) -> None:
    found = imported(*(repo_root / name for name in FOLDERS))
    assert found.returncode == 0, found.stderr[-2000:]
    files = {str(path) for name in FOLDERS for path in (repo_root / name).glob("*.py")}
    assert set(found.stdout.split()) == files and len(files) > 25


def test_a_name_that_is_gone_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "broken_script.py").write_text("from hf_neuron_moe import no_such_name\n", encoding="utf-8")
    found = imported(tmp_path)
    assert found.returncode == 1 and "no_such_name" in found.stderr
