"""No sentence that users read has more than 30 words. Tables, code, headings, and pages of reference are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {"reference.md", "api.md", "cli.md", "kernels.md", "supported.md", "parity.md"}
"""Looked up, not read; kernels.md, supported.md and parity.md are generated."""
PAGES = sorted(
    [
        *(
            ROOT / name
            for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
        ),
        *(page for page in (ROOT / "docs").glob("*.md") if page.name not in REFERENCE),
        *(ROOT / "docs" / "notebooks").glob("*.ipynb"),
    ]
)
LONGEST = 30


def markdown_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def paragraphs(markdown: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, each on one line."""
    markdown = re.sub(r"^( *)```.*?^\1```", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    markdown = re.sub(r"^!\[[^\]]*\]\([^)]*\)$", "\n", markdown, flags=re.MULTILINE)  # words for a picture
    current: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        item = re.match(r"\s*([*-]|\d+\.) +", line)
        table_or_heading = line.startswith(("#", "|"))
        if current and (not line.strip() or item or table_or_heading):
            yield " ".join(current)
            current = []
        code = line.startswith("    ") and not current and not item
        if line.strip() and not table_or_heading and not code:
            current.append(line[item.end() :] if item else line.strip())


def sentences(markdown: str) -> Iterator[str]:
    for paragraph in paragraphs(markdown):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"</?\w+[^>]*>|\*\*", "", plain)
        plain = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", plain)
        yield from re.split(r"(?<=[.!?])[)\"']?\s+", plain)


def words(sentence: str) -> int:
    """Signs such as "=" and "->" are none."""
    return sum(bool(re.search(r"[^\W_]", word)) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_too_long(page: Path) -> None:
    long = [(words(sentence), sentence) for sentence in sentences(markdown_of(page)) if words(sentence) > LONGEST]
    assert long == [], "\n".join(f"{count}: {sentence}" for count, sentence in long)


def test_the_checker_sees_what_it_must() -> None:
    """Long sentences of every shape are found; tables, code, headings and links cost nothing."""
    long, short = "word " * 30 + "end.", "Short one. Another one."
    found = [
        f"{long}",
        f"* {long}",
        f"1. {short} {long}",
        f"A `b c` {long}",
        f"{short}\n{long}",
        f"[{long[:-1]}](x.md).",
    ]
    found += [f"* item\n  {long}", f"**{short}** {long}"]
    for markdown in found:
        assert [s for s in sentences(markdown) if words(s) > LONGEST], markdown
    unseen = [f"| {long} | {long} |", f"```text\n{long}\n```", f"# {long}", f"![{long}](figures/x.svg)", f"    {long}"]
    unseen += [
        "word " * 29 + f"[end](https://example.org/{'a-' * 40}).",
        f"`{long}` is one word.",
        "word " * 16 + ". " + "Word " * 16,
    ]
    for markdown in unseen:
        assert not [s for s in sentences(markdown) if words(s) > LONGEST], markdown
    assert len(list(sentences("One. `two` three.\n\n* Four\n* five\n"))) == 4
