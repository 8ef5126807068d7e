"""Sizes the kernels accept, and what reaching them costs."""

from __future__ import annotations

import pytest

from hf_neuron_moe.formats.padding import overhead_percent, padded_size


@pytest.mark.parametrize(("size", "padded"), [(1, 128), (128, 128), (129, 256), (576, 640), (1536, 1536)])
def test_padded_size(size: int, padded: int) -> None:
    assert padded_size(size) == padded


def test_overhead_of_smollm2() -> None:
    assert overhead_percent(576, 1536) == pytest.approx(100 * (640 / 576 - 1))
    assert overhead_percent(512, 1792) == 0.0
