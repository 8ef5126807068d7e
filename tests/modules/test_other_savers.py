"""accelerate and safetensors save a patched model whole, in either home of the weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file, save_model

from hf_neuron_moe import patch_model
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_every_tensor_is_saved_and_read_back(family: str, home: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    patched = copy.deepcopy(stock)
    patch_model(patched, {"weights": home})
    expected = stock.state_dict()

    save_file(patched.state_dict(), tmp_path / "plain.safetensors")
    save_model(patched, str(tmp_path / "model.safetensors"))
    Accelerator(cpu=True).save_model(patched, tmp_path / "accelerate")
    for file in ("plain.safetensors", "model.safetensors", "accelerate/model.safetensors"):
        saved = load_file(tmp_path / file)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value) for name, value in expected.items())


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_accelerate_state_round_trip(home: str, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    patch_model(model, {"weights": home})
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    after = accelerator.unwrap_model(prepared).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
