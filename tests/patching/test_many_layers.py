"""Patching looks at every module a fixed number of times, however many blocks there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_neuron_moe import patch_model, unpatch_model
from tests.tiny_models import WEIGHT_LAYOUTS


class Block(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def walks(layers: int, home: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often patching and unpatching walk through all modules of a model of `layers` blocks."""
    model = nn.ModuleList(Block() for _ in range(layers))
    count, modules = 0, nn.Module.modules

    def counted(self: nn.Module) -> Iterator[Any]:
        nonlocal count
        count += self is model
        return modules(self)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "modules", counted)
        patch_model(model, {"weights": home})
        unpatch_model(model)
    assert all(type(block) is Block for block in model)
    return count


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_patching_takes_time_linear_in_the_layers(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert walks(2, home, monkeypatch) == walks(12, home, monkeypatch)
