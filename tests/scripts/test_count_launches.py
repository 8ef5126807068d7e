"""scripts/count_launches.py says what it takes; its counts are tested with what is counted."""

from __future__ import annotations

import count_launches
import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--experts", "0"], "sizes are numbers of 1 or more"),
        (["--top-k", "9", "--experts", "4"], "a token can have at most all 4 experts, not 9"),
        (["--inner", "33"], "--hidden and --inner are multiples of 8"),
        (["--json", "nowhere/counts.json"], "there is no folder nowhere"),
        (["--policies", "minimal", "everything"], "'everything'"),
        (["--policies", "gate_act"], "gate_act"),  # which mxfp8 alone has
    ],
)
def test_wrong_arguments_are_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        count_launches.main(words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last and said in last
