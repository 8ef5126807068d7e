"""The benchmark of few tokens times every contestant."""

from __future__ import annotations

import pytest

from benchmarks import few_tokens
from benchmarks.blocks import Case


@pytest.mark.parametrize("train", [False, True])
def test_every_contestant_is_timed(train: bool) -> None:
    found = few_tokens.measure(Case("few", 32, 16, 4, 4, 2), 4, 3, train=train)
    assert found.keys() == {"grouped_mm", "eager", "patched"} | ({few_tokens.ALONE} if train else set())
    assert all(len(turns) == 3 and 0 < turns[0] <= turns[-1] < 60 for turns in found.values())
