"""The source distribution holds what its tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

FOLDERS = ("hf_neuron_moe", "tests", "docs", "scripts", "configs", "benchmarks", "data", "examples", ".github", ".ci")
FILES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("CITATION.cff", "constraints.txt", "mkdocs.yml", "Dockerfile", ".dockerignore", ".pre-commit-config.yaml"),
)
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_extras_install_something() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all(project["optional-dependencies"].values())
    assert project["requires-python"] == ">=3.11"


def test_the_wheel_has_every_data_file(repo_root: Path) -> None:
    patterns = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    suffixes = {Path(pattern).suffix or pattern for pattern in patterns["package-data"]["hf_neuron_moe"]}
    files = [path for path in (repo_root / "hf_neuron_moe").rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts]
    assert {path.suffix or path.name for path in data} <= suffixes
    assert sum(path.parent.name == "specification" for path in data) >= 9


@pytest.mark.slow
def test_the_sdist_holds_every_file_and_runs_its_tests(tmp_path: Path, repo_root: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(repo_root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]"))
    for name in FILES:
        shutil.copy(repo_root / name, source / name)
    needed = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (archive,) = out.glob("hf_neuron_moe-*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    assert needed - held == set()
    assert not any("__pycache__" in name for name in held)
    (root,) = (tmp_path / "unpacked").iterdir()
    chosen = ["tests/test_config.py", "tests/formats/test_mx_golden.py", "tests/scripts/test_readme.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:]
