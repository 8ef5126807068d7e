"""The script that asks pip about optimum-neuron: what it asks and tells, and that docs/neuron.md names the same."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = """#!/bin/sh
if [ "$1" = --version ]; then echo "Python 3.11.9"; exit 0; fi
echo "$@" >> "$ASKED"
case "$*" in *optimum-neuron==0.0.3) exit 0;; esac
cat >&2 <<'TOLD'
ERROR: Cannot install hf-neuron-moe and optimum-neuron because these package versions have conflicting dependencies.
    optimum-neuron 0.4.5 depends on transformers~=4.57.1
    hf-neuron-moe 0.1.0 depends on transformers<6 and >=5.17
TOLD
exit 1
"""


def asked(tmp_path: Path, *versions: str) -> tuple[list[str], list[str]]:
    """Run the script with a pip that refuses all but 0.0.3; return its output and what pip was asked."""
    python = tmp_path / "python"
    python.write_text(PIP, encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "ASKED": str(tmp_path / "asked")}
    command = ["bash", "scripts/check_optimum_neuron.sh", *versions]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return shown.splitlines(), (tmp_path / "asked").read_text(encoding="utf-8").splitlines()


def test_it_resolves_without_installing_and_tells_the_pins(tmp_path: Path) -> None:
    shown, questions = asked(tmp_path, "0.4.5", "0.0.3")
    assert shown == [
        "Python 3.11.9",
        "optimum-neuron 0.4.5: cannot be installed beside this package",
        "    hf-neuron-moe 0.1.0 depends on transformers<6 and >=5.17",
        "    optimum-neuron 0.4.5 depends on transformers~=4.57.1",
        "optimum-neuron 0.0.3: can be installed beside this package",
    ]
    assert all("-m pip install --dry-run --ignore-installed" in question for question in questions)
    assert [question.split()[-2:] for question in questions] == [
        [".", "optimum-neuron==0.4.5"],
        [".", "optimum-neuron==0.0.3"],
    ]


def test_it_asks_about_the_versions_that_the_documentation_names(tmp_path: Path) -> None:
    _, questions = asked(tmp_path)
    versions = {question.rpartition("==")[2] for question in questions}
    table = (ROOT / "docs" / "neuron.md").read_text(encoding="utf-8").partition("## Beside optimum-neuron")[2]
    first_cells = re.findall(r"^\| ([0-9][^|]*) \|", table, flags=re.MULTILINE)
    named = {version for cell in first_cells for version in re.findall(r"\d+\.\d+\.\d+", cell)}
    assert len(named) >= 6 and named <= versions
