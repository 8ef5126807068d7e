"""The notebooks run, and hold the cells of their sources with what these print."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NAMES = ("fine-tune-a-small-mixtral", "what-does-mxfp8-do")


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook_runner", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_notebook_has_a_source(runner: ModuleType) -> None:
    assert {path.stem for path in runner.SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_it_shows(
    name: str, runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures may differ in their digits: sums run in another order on other processors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    again = runner.executed(FOLDER / f"{name}.py")
    assert [cell["source"] for cell in shown["cells"]] == [cell["source"] for cell in again["cells"]], "run run.py"
    for old, new in zip(shown["cells"], again["cells"], strict=True):
        assert steady(old) == steady(new), "python docs/notebooks/run.py"
    printed = "".join(map(str, again["cells"]))
    expected = {"fine-tune-a-small-mixtral": "every tensor equal: True", "what-does-mxfp8-do": "its block of 32 loses"}
    assert expected[name] in printed
    assert any(cell.get("outputs") for cell in shown["cells"])


def steady(cell: dict[str, object]) -> list[str]:
    """What a cell printed, without digits, bars and spaces, in an order of its own: a ranking may have near ties."""
    text = "".join("".join(output["text"]) for output in cell.get("outputs", ()))  # type: ignore[attr-defined]
    lines = [re.sub(r"[\d.#\s+-]+", " ", line).strip() for line in text.splitlines()]
    return sorted(re.sub(r"(predicted).*", r"\1", line) for line in lines)
