"""Imports of the package point down, in no circle, and importing it is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch import compute
from tests.tiny_models import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import code_figures

PACKAGE_DIR = code_figures.ROOT / code_figures.PACKAGE


@pytest.fixture(scope="module")
def figures() -> code_figures.Figures:
    return code_figures.measure()


@pytest.mark.slow
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


def test_a_value_goes_through_the_files_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that a training forward with fp32 products enters; others lie behind one call each."""
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: False)
    model = tiny_model("mixtral").to(torch.bfloat16).train()
    patch_model(model, {"precision": "bf16"})
    block = model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(64, block.down_proj.shape[1]).bfloat16().requires_grad_(), torch.full((64, 2), 0.5)
    index = torch.stack([torch.arange(64) % 2, 2 + torch.arange(64) % 2], 1)
    entered: dict[str, None] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE_DIR):
            entered.setdefault(path.relative_to(PACKAGE_DIR).as_posix())

    sys.setprofile(profile)
    try:
        block(hidden, index, weights)
    finally:
        sys.setprofile(None)
    walk = code_figures.walk_of(code_figures.ROOT)
    assert [name for name in entered if name in walk][:4] == walk[:4]
    assert set(walk) <= entered.keys()
    page = (code_figures.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## A value's way")[2].partition("On Trainium")[0]
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", section)}
    assert [name for name in entered if Path(name).name not in named] == []
