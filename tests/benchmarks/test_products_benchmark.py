"""The benchmark of matrix products times what it says, and shows every shape."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from benchmarks import products
from benchmarks.blocks import Progress


@pytest.mark.parametrize("kind", ["weight", "transposed weight", "transposed left"])
def test_both_contestants_make_the_same_product(kind: str) -> None:
    ways = products.contestants(24, 40, 56, kind)
    first, second = (ways[name]() for name in ("mm", "ours"))
    assert first.shape == (24, 56) and first.abs().max() > 1
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)  # fp32 sums of 40 terms in another order


def test_every_shape_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", ((16, 24, 32), (48, 16, 8)))
    entries = products.bench(3, Progress(Console(quiet=True)))
    assert len(entries) == 2 * 3 and all(entry["ours_over_mm"] > 0 for entry in entries)
    assert [entry["kind"] for entry in entries if "first_over_mm" in entry] == ["weight", "weight"]
    console = Console(file=io.StringIO(), width=120)
    products.show(entries, console)
    shown = console.file.getvalue()
    assert "(16, 24, 32)" in shown and "(48, 16, 8)" in shown and "transposed left" in shown
