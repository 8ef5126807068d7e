"""``benchmarks/accumulation.py`` finds the errors that docs/kernels.md prints."""

from __future__ import annotations

import pytest

from benchmarks.accumulation import errors


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "number", "convention", "device"),
    [((512, 8, 2), 0, 0.35, 0.41), ((512, 8, 8), 0, 0.35, 0.50), ((2048, 1, 1), 1, 0.39, 0.60)],
    ids=["two experts", "eight experts", "sixteen blocks"],
)
def test_the_documented_errors(call: tuple[int, int, int], number: int, convention: float, device: float) -> None:
    """In percent, to the two digits that are printed: one unit for another order of the sums."""
    found = errors(*call)
    assert 100 * found["convention"][number] == pytest.approx(convention, abs=0.01)
    assert 100 * found["device"][number] == pytest.approx(device, abs=0.01)
