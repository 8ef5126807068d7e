"""Hooks on an activation, which the operators compute themselves: refused before patching, announced after it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NeuronMoEWarning, NothingToPatchError
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.experts_form import read_experts
from hf_neuron_moe.patching.experts_probe import probe_experts
from hf_neuron_moe.patching.probe import probe_dense
from tests.refusals import refused
from tests.tiny_models import assert_same_snapshot, snapshot, tiny_model, tokens

KINDS = {
    "register_forward_pre_hook": "forward pre-hook",
    "register_forward_hook": "forward hook",
    "register_full_backward_pre_hook": "backward pre-hook",
    "register_full_backward_hook": "backward hook",
}


def block_of(model: Any, family: str, layer: int) -> Any:
    mlp = model.model.layers[layer].mlp
    return mlp.experts if family == "mixtral" else mlp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_hooks_before_patching_are_refused_and_never_called(family: str, kind: str) -> None:
    model, calls = tiny_model(family), []
    for layer in range(2):
        getattr(block_of(model, family, layer).act_fn, kind)(lambda *args: calls.append(args))
    before = snapshot(model)
    with refused(NothingToPatchError, "model", "act_fn has hooks, which the operator would not call"):
        patch_model(model)
    assert_same_snapshot(snapshot(model), before)
    assert calls == []


def test_the_probe_calls_no_hooks() -> None:
    calls: list[Any] = []
    dense, experts = tiny_model("llama").model.layers[0].mlp, tiny_model("mixtral").model.layers[0].mlp.experts
    form = read_experts(experts)
    for module in (dense, experts):
        module.act_fn.register_forward_hook(lambda *args: calls.append(args))
        module.act_fn.compile(backend=lambda graph, inputs: calls.append(graph) or graph)
    roles = DenseRoles(("gate_proj", "up_proj"), "down_proj", "act_fn")
    assert (probe_dense(dense, roles), probe_experts(experts, form)) == (None, None)
    assert calls == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "home"), [("llama", "kernel"), ("mixtral", "stock"), ("mixtral", "kernel")])
def test_hooks_after_patching_are_announced_once(family: str, home: str, kind: str) -> None:
    model, calls = tiny_model(family), []
    patch_model(model, {"weights": home})

    def watch(*args: Any) -> None:
        calls.append(args)

    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        model(tokens())
    getattr(block_of(model, family, 1).act_fn, kind)(watch)
    where = "model.layers.1.mlp.experts" if family == "mixtral" else "model.layers.1.mlp"
    with pytest.warns(NeuronMoEWarning, match=rf"{where}.act_fn has a hook .*: {KINDS[kind]} .*watch") as seen:
        model(tokens())
        model(tokens())
    assert len([warning for warning in seen if warning.category is NeuronMoEWarning]) == 1
    assert calls == []
