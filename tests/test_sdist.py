"""The source distribution holds what its tests need, and the wheel what its commands need."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("hf_neuron_moe", "tests", "docs", "scripts", "benchmarks", "data", "examples", ".github", ".ci")
FILES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("CITATION.cff", "constraints.txt", "mkdocs.yml", "Dockerfile", ".dockerignore", ".pre-commit-config.yaml"),
)


def test_extras_install_something() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all(project["optional-dependencies"].values())
    assert project["requires-python"] == ">=3.11"


def test_the_extra_train_has_what_every_command_imports(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[<>=; \[]", line)[0] for line in (*project["dependencies"], *extras["train"])}
    assert {re.split(r"[<>=;]", line)[0] for line in (*extras["demo"], *extras["report"])} <= known
    names: set[str] = set()
    for file in (repo_root / "hf_neuron_moe").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).partition(".")[0])
    names -= {*sys.stdlib_module_names, "hf_neuron_moe", "nki", "nkilib", "torch_neuronx", "triton"}
    assert {
        {"yaml": "pyyaml", "tokenizers": "transformers"}.get(name, name).replace("_", "-") for name in names
    } <= known


def test_the_wheel_has_every_data_file(repo_root: Path) -> None:
    patterns = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    suffixes = {Path(pattern).suffix or pattern for pattern in patterns["package-data"]["hf_neuron_moe"]}
    files = [path for path in (repo_root / "hf_neuron_moe").rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts]
    assert {path.suffix or path.name for path in data} <= suffixes
    assert sum(path.parent.name == "specification" for path in data) >= 9


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> tuple[Path, set[str], set[str]]:
    """The unpacked source distribution, what it holds, and what the repository has."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("packed")
    source, out = folder / "source", folder / "out"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(repo_root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]"))
    for name in FILES:
        shutil.copy(repo_root / name, source / name)
    needed = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    built(source, out, "sdist")
    (archive,) = out.glob("hf_neuron_moe-*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    shutil.unpack_archive(archive, folder / "unpacked")
    (root,) = (folder / "unpacked").iterdir()
    return root, held, needed


def built(source: Path, out: Path, kind: str) -> None:
    """Build a distribution with the setuptools that is here; nothing is downloaded."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_sdist_holds_every_file_and_runs_its_tests(packed: tuple[Path, set[str], set[str]]) -> None:
    root, held, needed = packed
    assert needed - held == set()
    assert not any("__pycache__" in name for name in held)
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


COMMANDS = (
    "tiny-model mixtral model",
    "demo --tiny --steps 2 -o demo_output",
    "train --list-configs",
    "train tiny-mixtral --model model --train_files text.txt --eval_files text.txt --max_steps 2 --output_dir trained",
    "report trained",
    "convert model converted --precision mxfp8",
    "explore model text.txt --tokens 256 --length 64 --verify 0",
)
DRIVER = """
import json, pathlib, sys
import hf_neuron_moe
from hf_neuron_moe.cli.main import main

assert pathlib.Path(hf_neuron_moe.__file__).is_relative_to(sys.prefix), hf_neuron_moe.__file__
for line in json.loads(sys.argv[1]):
    sys.argv = ["hf-neuron-moe", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(packed: tuple[Path, set[str], set[str]], tmp_path: Path) -> None:
    """Installed into an environment of its own, which sees this one's packages without the package under test."""
    built(packed[0], tmp_path / "out", "wheel")
    (wheel,) = (tmp_path / "out").glob("hf_neuron_moe-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert "hf_neuron_moe/demo/sotu/train.jsonl" in names and not any(name.startswith("tests/") for name in names)
    home, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True, timeout=300)
    (site,) = (home / "lib").glob("python*/site-packages")
    # A folder that a .pth file names is searched last, and .pth files in it (of editable installs) are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    facts = {"cwd": empty, "env": environment, "capture_output": True, "text": True, "timeout": 900, "check": False}
    shown = subprocess.run([home / "bin" / "hf-neuron-moe", "--version"], **facts)
    assert (shown.returncode, shown.stderr) == (0, "") and shown.stdout.startswith("hf-neuron-moe ")
    (empty / "text.txt").write_text("The state of the Union is tested.\n\n" * 60, encoding="utf-8")
    done = subprocess.run([python, "-c", DRIVER, json.dumps(COMMANDS)], **facts)
    assert done.returncode == 0, done.stderr[-3000:]
    made = ("demo_output/demo.html", "trained/report.html", "converted/config.json")
    assert all((empty / name).is_file() for name in made) and "mixtral-8x7b" in done.stdout, done.stdout
