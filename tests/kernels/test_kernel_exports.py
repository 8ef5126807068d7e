"""``hf_neuron_moe.kernels``: every public name, lazily, and functions that share their submodule's name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_neuron_moe.kernels as kernels

SAME_NAME = sorted(name for name, module in kernels._HOME.items() if name == module)


def run(code: str, repo_root: Path) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repo_root)
    return result.stdout.strip()


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_name_is_there_and_named_so(name: str) -> None:
    assert getattr(kernels, name).__name__ == name


def test_the_lists_agree() -> None:
    assert sorted(kernels.__all__) == kernels.__all__ == dir(kernels) == sorted(kernels._HOME)
    source = ast.parse(Path(kernels.__file__ or "").read_text(encoding="utf-8"))
    typed = [
        (str(node.module).rpartition(".")[2], alias.name)
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(typed) == sorted((module, name) for name, module in kernels._HOME.items())
    assert not hasattr(kernels, "moe_ctx")


def test_importing_the_package_imports_no_torch(repo_root: Path) -> None:
    assert run("import sys, hf_neuron_moe.kernels; print('torch' in sys.modules)", repo_root) == "False"


@pytest.mark.parametrize("submodules_first", [True, False])
def test_functions_win_over_their_submodules(submodules_first: bool, repo_root: Path) -> None:
    imports = [f"import hf_neuron_moe.kernels.{name}" for name in SAME_NAME]
    names = [f"from hf_neuron_moe.kernels import {name}" for name in SAME_NAME]
    checks = [
        f"from hf_neuron_moe.kernels.{name} import {name} as f\nprint(f is {name} is package.{name}, isfunction(f))"
        for name in SAME_NAME
    ]
    order = imports + names if submodules_first else names + imports
    head = ["from inspect import isfunction", "import hf_neuron_moe.kernels as package"]
    assert run("\n".join(head + order + checks), repo_root).splitlines() == ["True True"] * len(SAME_NAME)
    assert SAME_NAME
