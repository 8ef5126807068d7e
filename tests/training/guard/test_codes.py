"""Blocks whose weights are MX codes: healthy steps are those of float64, and faults are named within their step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe import set_activations
from hf_neuron_moe.training.guard.bands import Bands
from hf_neuron_moe.training.guard.watch import StepLooked, Watch
from tests.quantizers.conftest import SIZES, UNEVEN, WORDS, Converted, load
from tests.quantizers.conftest import converted as converted
from tests.quantizers.conftest import source as source
from tests.tiny_models import tokens


def looked_at(model: Any, watch: Watch, step: int) -> StepLooked:
    watch.begin(step)
    ids = tokens(4, 40, seed=step)
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.autograd.grad(model(inputs_embeds=inputs, labels=ids).loss, inputs)
    watch.pause()
    assert watch.looked is not None
    return watch.looked


@pytest.mark.parametrize("policy", ["full", "recompute", "up", "fp8"])
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("llama", UNEVEN, {"precision": "mxfp8", "layout": "kernel"}),
        ("qwen2_moe", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("gpt_oss", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
        ("mixtral", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
    ],
)
def test_healthy_results_are_those_of_float64(
    family: str, sizes: dict[str, int], options: dict[str, str], policy: str, converted: Converted
) -> None:
    model = load(converted(family, sizes, **options)).train()
    set_activations(model, policy)
    watch = Watch(model, Bands())
    looked = looked_at(model, watch, 1)
    assert looked.alarms == []
    assert len(looked.blocks) == len(watch.blocks) >= 2
    for products in looked.blocks.values():
        assert {"gate_up", "down", "down.dx", "gate_up.dx"} == products.keys()
        for measured in products.values():
            for figures in measured.values():
                assert figures.get("worst", 0.0) <= 8e-3 and figures["nonfinite"] == 0
