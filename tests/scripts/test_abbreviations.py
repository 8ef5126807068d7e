"""No program takes a part of an option's name for it: `--step 3` must not silently become `--steps 3`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    path
    for folder in ("scripts", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "ArgumentParser(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_parsers_take_whole_names_only(program: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    parsers = [call for call in calls if getattr(call.func, "attr", "") == "ArgumentParser"]
    assert parsers
    for call in parsers:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("allow_abbrev") == "False"
