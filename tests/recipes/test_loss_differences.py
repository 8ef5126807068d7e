"""Differences between variants over seeds, and the bands around them."""

from __future__ import annotations

import math

import pytest

from hf_neuron_moe.recipes.loss_differences import band_of, compared, paired, t_factor
from hf_neuron_moe.report.curves import LAST


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (29, 2.045), (120, 1.980)],
)
def test_the_factor_is_that_of_published_tables(freedom: int, published: float) -> None:
    assert t_factor(freedom) == pytest.approx(published, abs=5e-4)  # tables round to three places


def test_the_factor_approaches_that_of_the_normal_distribution() -> None:
    assert t_factor(2000) == pytest.approx(1.959964 + 2.3723 / 2000, abs=1e-5)  # first term of its expansion


def test_a_band_is_that_of_the_mean_of_paired_differences() -> None:
    found = paired({"0": 2.002, "1": 3.006, "2": 4.012, "7": 9.0}, {"0": 2.0, "1": 3.0, "2": 4.0})
    assert found["by_seed_percent"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["difference_percent"] == pytest.approx(0.2)
    assert found["band_percent"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def test_one_seed_has_no_band_and_none_has_no_difference() -> None:
    assert paired({"0": 2.0}, {"0": 1.0}) == {
        "difference_percent": 100.0,
        "band_percent": None,
        "by_seed_percent": [100.0],
    }
    assert paired({"0": 2.0}, {"1": 1.0}) == {} and band_of([1.0]) is None
    assert band_of([1.0, 3.0]) == pytest.approx(12.706205, rel=1e-6)  # two have one, however wide


def test_only_the_last_steps_are_compared() -> None:
    stock = {"0": [9.0] * 20 + [2.0] * LAST, "1": [9.0] * 20 + [4.0] * LAST}
    other = {"0": [1.0] * 20 + [2.02] * LAST}
    found = compared({"stock": stock, "mxfp8": other}, {"mxfp8": "stock"})
    assert (found["stock"]["last_mean"], found["stock"]["seeds"]) == (3.0, 2) and "reference" not in found["stock"]
    assert found["stock"]["seed_spread_percent"] == pytest.approx(100 * math.sqrt(2) / 3)
    assert found["mxfp8"]["reference"] == "stock"
    assert found["mxfp8"]["by_seed_percent"] == pytest.approx([1.0])
