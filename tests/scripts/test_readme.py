"""The README is short, its example prints what it shows, and the reference's kernel example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
EXAMPLES = [block for block in PYTHON.findall(REFERENCE) if "import torch\n" in block]


def test_there_is_an_example() -> None:
    assert EXAMPLES and "import torch\n" in README


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(example, "docs/reference.md", "exec"), {"__name__": "readme"})
    assert "torch.Size" in capsys.readouterr().out


def test_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """All but the line that depends on the processor."""
    ((example, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})

    def steady(text: str) -> list[str]:
        return [line.rstrip() for line in text.splitlines() if not line.startswith("PyTorch multiplies")]

    assert steady(shown) == steady(capsys.readouterr().out)
    assert len(steady(shown)) >= 4


def test_the_readme_is_short_and_shows_a_picture_with_words_for_it() -> None:
    assert len(README.splitlines()) <= 120
    ((words, path),) = re.findall(r"^!\[([^\]]*)\]\((docs/[^)]*)\)", README, flags=re.MULTILINE)
    assert len(words.split()) >= 10 and (ROOT / path).is_file()


def test_the_commands_of_the_set_up_exist() -> None:
    for command in ("bash scripts/demo.sh", "bash scripts/test.sh"):
        assert command in README and (ROOT / command.split()[1]).is_file()
