"""Weights written through ``.data`` between two training calls: seen at once where that can be, else on request."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hf_neuron_moe
from hf_neuron_moe import patch_model, refresh_weights, unpatch_model
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.errors import UnsupportedModelError
from tests.neuron.small_runs import DENSE, EXPERTS_MX, Case
from tests.refusals import refused
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]


def block_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "mlp" in name and "gate.weight" not in name]


def patched(case: Case, backend: str, weights: str = "stock") -> nn.Module:
    model = case.model()
    patch_model(model, {**case.options, "backend": backend, "weights": weights})
    return model


def training_logits(model: nn.Module) -> Tensor:
    """A forward that is recorded, and its backward."""
    logits: Tensor = model(input_ids=tokens(1, 12)).logits
    model.zero_grad()
    logits.square().mean().backward()
    return logits.detach()


def kept() -> int:
    return int(get_backend("neuron").prepared_bytes)  # type: ignore[attr-defined]


def through_data(model: nn.Module) -> None:
    for param in block_parameters(model):
        param.data.mul_(-0.5)


def average_swapped_in(model: nn.Module) -> None:
    """Exchange weights with a running average, as evaluation of one does."""
    for param in block_parameters(model):
        average = param.data * 0.25
        kept_aside = param.data.clone()
        param.data.copy_(average)
        average.copy_(kept_aside)


def clipped(model: nn.Module) -> None:
    for param in block_parameters(model):
        param.data.clamp_(-0.002, 0.002)


def from_a_vector(model: nn.Module) -> None:
    vector = parameters_to_vector(block_parameters(model)).detach()
    vector_to_parameters(vector * -0.5, block_parameters(model))


WRITES = {write.__name__: write for write in (through_data, average_swapped_in, clipped)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [DENSE, EXPERTS_MX], ids=["dense", "experts"])
@pytest.mark.parametrize("name", WRITES)
def test_refreshed_weights_are_seen_by_the_next_training_call(name: str, case: Case, machine: Start) -> None:
    reference = patched(case, "torch")
    WRITES[name](reference)
    expected = training_logits(reference)
    machine()
    model = patched(case, "neuron")
    before = training_logits(model)
    dropped = kept()
    WRITES[name](model)
    assert refresh_weights(model) == dropped > 0 and kept() == 0
    found = training_logits(model)
    assert torch.equal(found, expected) and not torch.equal(found, before)


def test_weights_from_a_vector_are_seen_at_once(machine: Start) -> None:
    """``vector_to_parameters`` gives parameters new storages."""
    reference = patched(EXPERTS_MX, "torch")
    from_a_vector(reference)
    expected = training_logits(reference)
    machine()
    model = patched(EXPERTS_MX, "neuron")
    training_logits(model)
    from_a_vector(model)
    assert torch.equal(training_logits(model), expected)


def test_only_the_copies_of_the_named_model_are_dropped(machine: Start) -> None:
    machine()
    one, other = patched(EXPERTS_MX, "neuron"), patched(EXPERTS_MX, "neuron")
    training_logits(one)
    of_one = kept()
    training_logits(other)
    assert kept() == 2 * of_one
    assert refresh_weights(nn.ModuleDict({"wrapped": one})) == of_one and kept() == of_one
    assert refresh_weights(one) == 0, "they are gone"
    assert refresh_weights(other) == of_one and kept() == 0


def test_nothing_happens_where_no_copies_are_kept() -> None:
    model = patched(EXPERTS_MX, "torch")
    training_logits(model)
    assert refresh_weights(model) == 0 and refresh_weights(nn.Linear(2, 2)) == 0
    assert "refresh_weights" in hf_neuron_moe.__all__
    wrong: Any = model.state_dict()
    with refused(UnsupportedModelError, "model", got="OrderedDict", where="refresh_weights"):
        refresh_weights(wrong)


@pytest.mark.parametrize("weights", ["stock", "kernel"])
@pytest.mark.parametrize("case", [DENSE, EXPERTS_MX], ids=["dense", "experts"])
def test_a_change_of_mode_drops_copies(case: Case, weights: str, machine: Start) -> None:
    """Averages are exchanged around an evaluation."""
    reference = patched(case, "torch", weights)
    through_data(reference)
    expected = training_logits(reference.train())
    machine()
    model = patched(case, "neuron", weights).train()
    training_logits(model)
    copies = kept()
    model.train()
    assert kept() == copies > 0, "the Trainer says train() before every step: that is no change"
    model.eval()
    assert kept() == 0
    through_data(model)
    assert torch.equal(training_logits(model.train()), expected)


def test_unpatching_frees_copies(machine: Start) -> None:
    machine()
    model = patched(EXPERTS_MX, "neuron")
    before = training_logits(model)
    assert kept() > 0
    unpatch_model(model)
    assert kept() == 0
    through_data(model)
    patch_model(model, {**EXPERTS_MX.options, "backend": "neuron", "weights": "stock"})
    assert not torch.equal(training_logits(model), before)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("weights", ["stock", "kernel"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", [DENSE, EXPERTS_MX], ids=["dense", "experts"])
def test_a_loaded_state_dict_is_seen_between_training_calls(
    case: Case, assign: bool, weights: str, machine: Start
) -> None:
    def loaded(backend: str) -> Tensor:
        model = patched(case, backend, weights)
        training_logits(model)
        state = {name: value * -0.5 if "mlp" in name else value for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        return training_logits(model)

    expected = loaded("torch")
    machine()
    assert torch.equal(loaded("neuron"), expected)


LORA: dict[str, tuple[Case, dict[str, Any]]] = {
    "dense": (DENSE, {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "experts": (
        EXPERTS_MX,
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("name", LORA)
def test_adapters_merged_between_training_calls_are_seen(name: str, machine: Start) -> None:
    """``merge_adapter`` writes through ``.data``; nothing but the adapters' state shows it."""
    case, targets = LORA[name]

    def outputs(backend: str) -> list[Tensor]:
        model = patched(case, backend)
        torch.manual_seed(5)
        wrapped: Any = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **targets))
        for param in wrapped.parameters():
            param.requires_grad_(True)  # so that a recorded call reads the base weights too
        found = []
        for change in (
            lambda: None,
            wrapped.base_model.disable_adapter_layers,
            wrapped.base_model.enable_adapter_layers,
            wrapped.merge_adapter,
            wrapped.unmerge_adapter,
            wrapped.merge_adapter,
        ):
            change()
            found.append(training_logits(wrapped))
        return found

    expected = outputs("torch")
    machine()
    found = outputs("neuron")
    assert [torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [True] * 6
    assert not torch.equal(found[0], found[1])


def test_copied_models_have_copies_of_their_own(machine: Start) -> None:
    machine()
    model = patched(EXPERTS_MX, "neuron")
    training_logits(model)
    twin = copy.deepcopy(model)
    through_data(twin)
    refresh_weights(twin)
    assert not torch.equal(training_logits(twin), training_logits(model))
