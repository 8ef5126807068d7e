"""The pictures are what their scripts draw, can be read in the dark, and stand in a page with words for them."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
NAMES = ("calls", "mx_block", "swizzle_tile", "block_forward", "layouts", "policies", "packages")


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_what_its_script_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIGURES))
    drawn = importlib.import_module("draw").drawn(name)
    picture = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert picture == drawn, f"run python docs/figures/draw.py {name}"
    assert "prefers-color-scheme: dark" in picture
    root = ElementTree.fromstring(picture)
    names = {child.tag.partition("}")[2]: child.text for child in root}
    assert root.get("role") == "img" and names["title"] and names["desc"]


def test_every_picture_is_drawn_by_a_script_and_stands_in_a_page_with_words_for_it() -> None:
    assert {path.stem for path in FIGURES.glob("*.svg")} == {*NAMES, "front"}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        name: words
        for page in pages
        for words, name in re.findall(r"^!\[([^\]]*)\]\((?:docs/)?figures/(\w+)\.svg\)", page.read_text("utf-8"), re.M)
    }
    assert shown.keys() == {*NAMES, "front"}
    assert all(len(words.split()) >= 10 for words in shown.values())


def test_the_worked_block_is_right() -> None:
    """By hand: the figures of the picture against the formula, without the package."""
    picture = (FIGURES / "mx_block.svg").read_text(encoding="utf-8")
    texts = re.findall(r'<text [^>]*class="([^"]*)"[^>]*>([^<]*)</text>', picture)
    values = [float(text) for kind, text in texts if kind == "strong" and re.fullmatch(r"-?\d+\.\d{3}", text)]
    codes = [int(text, 16) for kind, text in texts if kind == "code"]
    scale = 2.0 ** (3 - 7)  # 8 <= 11.471 < 16
    assert len(values) == len(codes) == 32 and max(map(abs, values)) == 11.471
    for value, code in zip(values, codes, strict=True):
        exponent, fraction = code >> 3 & 15, code & 7
        decoded = (-1) ** (code >> 7) * (1 + fraction / 8) * 2.0 ** (exponent - 7) * scale
        assert exponent and abs(decoded - value) <= abs(value) / 16, (value, code)
