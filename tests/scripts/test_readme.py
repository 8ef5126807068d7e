"""The README's self-contained Python examples run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "import torch\n" in block]


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert "torch.Size" in capsys.readouterr().out
