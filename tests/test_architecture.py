"""The rooms' imports point down only, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "hf_neuron_moe"
PACKAGE_DIR = Path(__file__).resolve().parent.parent / PACKAGE

# A room may import the rooms of its row, itself, and nothing else of the package.
BASE = {"errors", "activation_policy", "config", "_version"}
ALLOWED = {
    "errors": set[str](),
    "_version": set[str](),
    "activation_policy": {"errors"},
    "config": {"errors", "activation_policy"},
    "formats": {"errors"},
    "backends": BASE | {"formats"},
    "kernels": BASE | {"formats", "backends"},
    # Above the kernels' room, whose plans and limits it uses; backends/__init__.py imports it when it is asked for.
    "backends.neuron": BASE | {"formats", "backends", "kernels"},
    "modules": BASE | {"formats", "backends", "kernels"},
    "patching": BASE | {"formats", "backends", "kernels", "modules"},
    "training": BASE | {"formats", "backends", "kernels", "modules", "patching"},
    "convert": BASE | {"formats", "patching"},
    "quantizers": BASE | {"formats", "backends", "modules", "patching", "convert"},
    "device": BASE | {"formats", "backends", "kernels", "modules", "patching", "convert", "quantizers"},
    "report": {"errors", "_version"},
    "cli": BASE | {"backends", "patching", "training", "convert", "device", "report"},
    "__init__": BASE | {"patching", "quantizers", "training"},
}
FILES = sorted(PACKAGE_DIR.rglob("*.py"))


def room_of(path: Path) -> str:
    """Name of the room a source file belongs to: the top-level one, or one of those listed that lie in it."""
    parts = path.relative_to(PACKAGE_DIR).with_suffix("").parts
    inner = ".".join(parts[:2])
    return inner if inner in ALLOWED else parts[0]


def imported_rooms(source: str, path: Path) -> set[str]:
    """Rooms of the package that a file imports anywhere, inside functions too."""
    package_parts = (PACKAGE, *path.relative_to(PACKAGE_DIR).parts[:-1])
    rooms = set()
    for node in ast.walk(ast.parse(source, str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if module != PACKAGE else [f"{PACKAGE}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == PACKAGE:
                rooms.add(name.split(".")[1] if "." in name else "__init__")
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE_DIR)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is not a room of docs/architecture.md"
    upward = imported_rooms(path.read_text(encoding="utf-8"), path) - ALLOWED[room] - {room}
    assert not upward, f"{path.name} in {room} imports {sorted(upward)}"


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("from hf_neuron_moe.modules.ops import x", {"modules"}),
        ("import hf_neuron_moe.cli.main", {"cli"}),
        ("def f():\n    from hf_neuron_moe import patching", {"patching"}),
        ("from . import swizzle", {"formats"}),
        ("from ..kernels import x", {"kernels"}),
        ("from ..kernels.routing import x", {"kernels"}),
        ("import torch", set()),
    ],
)
def test_import_reader_sees_every_form(source: str, rooms: set[str]) -> None:
    assert imported_rooms(source, PACKAGE_DIR / "formats" / "mx.py") == rooms


def test_no_room_is_allowed_to_import_in_a_circle() -> None:
    remaining = {room: set(below) for room, below in ALLOWED.items()}
    while remaining:
        leaves = {room for room, below in remaining.items() if not below & remaining.keys()}
        assert leaves, f"circular permissions among {sorted(remaining)}"
        remaining = {room: below for room, below in remaining.items() if room not in leaves}


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
