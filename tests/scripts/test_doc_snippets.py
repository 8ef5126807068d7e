"""The documents' Python examples are Python and run as printed, and their links lead somewhere."""

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
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SELF_CONTAINED = (
    "README.md",
    "docs/get-started.md",
    "docs/train.md",
    "docs/how-to.md",
    "docs/concepts.md",
    "docs/reference.md",
)
"""Pages whose examples need nothing but what they import. docs/kernels.md has a test of its own."""


def text_of(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def snippets(page: Path | str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.*?) *$", prose, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


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


@pytest.mark.parametrize("number", range(len(snippets("docs/training.md"))))
def test_the_examples_about_training_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model, and rows of it, where the page says `model` and `data`; and a layer and its input."""
    snippet = snippets("docs/training.md")[number]
    monkeypatch.chdir(tmp_path)
    model = tiny_model("qwen2_moe" if "shared_expert" in snippet else "mixtral")
    if "routing_replay_stats" in snippet:
        patch_model(model)
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    given = {"model": model, "data": Rows(), "layer": torch.nn.Linear(4, 4), "hidden": hidden, "__name__": "example"}
    exec(compile(snippet, f"training.md, example {number + 1}", "exec"), given)


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in SELF_CONTAINED for number in range(len(snippets(page)))]
)
def test_self_contained_examples_run_as_printed(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by itself, as a reader would paste it; what a page shows as its output is what it prints."""
    snippet = snippets(page)[number]
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, f"{page}, example {number + 1}", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    shown = re.search(re.escape(snippet) + r"```\n\n```text\n(.*?)```", text_of(page), flags=re.DOTALL)
    if shown and page != "README.md":  # test_readme.py compares that one
        assert shown[1] == printed


def test_the_self_contained_pages_have_examples() -> None:
    assert all(snippets(page) for page in SELF_CONTAINED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith(("http:", "https:"))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_index_leads_to_every_page() -> None:
    index = text_of("docs/index.md")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)[^)]*\)", index))
