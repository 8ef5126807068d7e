"""``hf_neuron_moe.kernels``: every name of the documented systems."""

from __future__ import annotations

import pytest

import hf_neuron_moe.kernels as kernels

ALIASES = {"get_config_for_shape": "get_forward_config_for_shape"}  # errors name what is called by both names


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_name_is_there_and_named_so(name: str) -> None:
    assert getattr(kernels, name).__name__ == ALIASES.get(name, name)


def test_nothing_else_is_offered() -> None:
    assert sorted(kernels.__all__) == kernels.__all__
    assert not hasattr(kernels, "moe_ctx")
