"""A model that is patched on the meta device and initialised later gets the weights of a stock model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from hf_neuron_moe import patch_model, unpatch_model
from tests.tiny_models import FAMILIES, WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_config, tiny_model, tokens


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def initialized(model: Any) -> dict[str, torch.Tensor]:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)  # what is not initialised shows
    torch.manual_seed(11)
    model.init_weights()
    return dict(model.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_init_weights_gives_blocks_what_stock_ones_get(family: str, home: str) -> None:
    model = on_meta(family)
    patch_model(model, {"weights": home})
    found, expected = initialized(model), initialized(on_meta(family))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    model.model.rotary_emb = copy.deepcopy(tiny_model(family).model.rotary_emb)
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_weights_that_are_there_are_left_alone(home: str) -> None:
    model = tiny_model("mixtral")
    patch_model(model, {"weights": home})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    experts = model.model.layers[0].mlp.experts
    del experts._is_hf_initialized
    experts.gate_up_proj._is_hf_initialized = True  # as transformers marks a loaded parameter
    model.init_weights()
    name = "model.layers.0.mlp.experts."
    assert torch.equal(model.state_dict()[name + "gate_up_proj"], before[name + "gate_up_proj"])
    assert not torch.equal(model.state_dict()[name + "down_proj"], before[name + "down_proj"])


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_familys_rule_for_its_mlps_is_followed(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = LlamaModel._init_weights

    def own_rule(model: Any, module: nn.Module) -> None:
        base(model, module)
        if isinstance(module, LlamaMLP):
            init.constant_(module.gate_proj.weight, 3.0)

    monkeypatch.setattr(LlamaModel, "_init_weights", own_rule)
    model = on_meta("llama")
    patch_model(model, {"weights": home})
    values, expected = initialized(model), initialized(on_meta("llama"))
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert (values["model.layers.0.mlp.gate_proj.weight"] == 3.0).all()


def test_copies_initialise_themselves_and_unpatching_leaves_no_trace() -> None:
    model = on_meta("mixtral")
    before = snapshot(model)
    patch_model(model, {"weights": "kernel"})
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert all((value != 7.0).any() for value in initialized(twin).values())
    assert all(param.is_meta for param in model.parameters())
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)
    assert isinstance(model, PreTrainedModel) and "_init_weights" not in model.__dict__
