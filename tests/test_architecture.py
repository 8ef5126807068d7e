"""Imports of the package point down, in no circle, and importing it is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import code_figures

PACKAGE_DIR = code_figures.ROOT / code_figures.PACKAGE


@pytest.fixture(scope="module")
def figures() -> code_figures.Figures:
    return code_figures.measure()


def test_imports_point_down(figures: code_figures.Figures) -> None:
    assert figures.up == []


def test_no_circles_between_packages_and_files(figures: code_figures.Figures) -> None:
    assert (figures.package_circles, figures.file_circles) == ([], [])


def test_every_package_has_a_row(figures: code_figures.Figures) -> None:
    assert figures.by_package.keys() <= code_figures.ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from hf_neuron_moe.modules.ops import x", {("modules", "ops")}),
        ("import hf_neuron_moe.cli.main", {("cli", "main")}),
        ("def f():\n    from hf_neuron_moe import patching", {("patching", "__init__")}),
        ("from . import swizzle", {("formats", "swizzle")}),
        ("from ..modules import ops", {("modules", "ops")}),
        ("from ..modules.ops import x", {("modules", "ops")}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_neuron_moe.cli.main import app", set()),
        ("import torch", set()),
    ],
)
def test_import_reader_sees_every_form(source: str, modules: set[tuple[str, ...]]) -> None:
    files = {code_figures.module_of(path, code_figures.ROOT) for path in PACKAGE_DIR.rglob("*.py")}
    assert set(code_figures.imports_of(ast.parse(source), ("formats", "mx"), files)) == modules


def test_circles_are_found() -> None:
    assert code_figures.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b <-> c"]


def test_permissions_allow_no_circle() -> None:
    assert code_figures.circles({name: set(below) for name, below in code_figures.ALLOWED.items()}) == []


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, hf_neuron_moe; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE_DIR.parent
    )
    assert result.stdout.strip() == "[]"


def test_config_is_reachable_without_torch_and_unknown_names_are_attribute_errors() -> None:
    code = (
        "import sys, hf_neuron_moe as package\n"
        "assert package.NeuronMoEConfig(precision='mxfp8').precision == 'mxfp8'\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(package, 'patch_modell')\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE_DIR.parent)
