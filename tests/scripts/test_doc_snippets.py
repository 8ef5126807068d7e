"""The documents' Python examples are Python, and those of docs/training.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hf_neuron_moe import patch_model
from tests.tiny_models import tiny_model, tokens

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


class Rows(Dataset):
    ids = tokens(2, 8)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_without_left_out_arguments(page: Path) -> None:
    for number, snippet in enumerate(snippets(page), start=1):
        compile(snippet, f"{page.name}, example {number}", "exec")
        assert not re.search(r"[(,=] *\.\.\.[,)]", snippet), f"{page.name}, example {number}: ... for an argument"


@pytest.mark.parametrize("number", range(len(snippets(ROOT / "docs" / "training.md"))))
def test_the_examples_about_training_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model, and rows of it, where the page says `model` and `data`; and a layer and its input."""
    snippet = snippets(ROOT / "docs" / "training.md")[number]
    monkeypatch.chdir(tmp_path)
    model = tiny_model("qwen2_moe" if "shared_expert" in snippet else "mixtral")
    if "routing_replay_stats" in snippet:
        patch_model(model)
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    given = {"model": model, "data": Rows(), "layer": torch.nn.Linear(4, 4), "hidden": hidden, "__name__": "example"}
    exec(compile(snippet, f"training.md, example {number + 1}", "exec"), given)
