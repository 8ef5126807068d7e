"""Layers that look alike and save something else are counted apart; each model differs in one thing alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_neuron_moe.training.fake_forward import fake_saved_activations
from hf_neuron_moe.training.repeated_layers import RepeatedLayers

H, LAYERS = 16, 6
Run = Callable[["Layer", Tensor, Tensor | None], Any]


class Layer(GradientCheckpointingLayer):
    def __init__(self, config: PretrainedConfig, layer_idx: int, run: Run) -> None:
        super().__init__()
        self.config, self.layer_idx, self.run = config, layer_idx, run
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self.run(self, x, other)


class Model(nn.Module):
    """Runs its layers; `given` says what each gets beside the hidden states."""

    def __init__(self, run: Run, given: Callable[[Any, int, Tensor], Tensor | None], kinds: str) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config.made = None
        self.config.kinds = list(kinds)  # of each layer
        self.embed, self.weight = nn.Embedding(64, H), nn.Parameter(torch.ones(H))
        self.layers = nn.ModuleList(Layer(self.config, place, run) for place in range(LAYERS))
        self.given = given

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        self.config.made = None
        x = self.embed(input_ids)
        for place, layer in enumerate(self.layers):
            x = layer(x, self.given(self, place, x))
            x = x[0] if isinstance(x, tuple) else x
        return SimpleNamespace(loss=x.sum())


def plain(layer: Layer, x: Tensor, other: Tensor | None) -> Tensor:
    return layer.linear(x).exp()  # which saves what the next layer saves too


def by_place(layer: Layer, x: Tensor, other: Tensor | None) -> Tensor:
    y = layer.linear(x)
    return y.exp().sin() if layer.config.kinds[layer.layer_idx] == "w" else y


def of_two(layer: Layer, x: Tensor, other: Tensor | None) -> Tensor:
    assert other is not None
    return x * other


def of_what_the_first_made(layer: Layer, x: Tensor, other: Tensor | None) -> Tensor:
    if layer.config.made is None:
        layer.config.made = torch.ones(4, 8, H)
    return layer.linear(x) * layer.config.made


def in_a_tuple(layer: Layer, x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
    return layer.linear(x), x.exp()


@pytest.mark.parametrize(
    ("run", "given", "not_run"),
    [
        pytest.param(plain, lambda model, place, x: None, 4, id="equal"),
        pytest.param(by_place, lambda model, place, x: None, 2, id="configured-by-layer"),
        pytest.param(of_two, lambda model, place, x: x if place < 3 else x.exp(), 2, id="one-argument-twice"),
        pytest.param(
            of_two, lambda model, place, x: model.weight if place < 3 else x.mean((0, 1)), 2, id="given-a-parameter"
        ),
        pytest.param(of_what_the_first_made, lambda model, place, x: None, 4, id="made-by-the-first"),
        pytest.param(in_a_tuple, lambda model, place, x: None, 0, id="more-than-a-tensor"),
    ],
)
def test_of_layers_that_are_not_run_it_is_known_what_they_save(
    run: Run, given: Any, not_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(layer: Layer, x: Tensor, other: Tensor | None) -> Any:
        calls.append(layer.layer_idx)
        return run(layer, x, other)

    with torch.device("meta"):
        model = Model(counted, given, "ttwtww" if run is by_place else "tttttt")
    found = fake_saved_activations(model, (), batch=4, length=8)
    assert len(calls) == LAYERS - not_run
    monkeypatch.setattr(RepeatedLayers, "standing_in", lambda self: nullcontext())
    assert fake_saved_activations(model, (), batch=4, length=8) == found
    assert len(calls) == 2 * LAYERS - not_run
