"""A new backend is a folder and a row in ``config.BACKENDS``: everything above it asks the backend."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_neuron_moe import NeuronMoEConfig, config, patch_model
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import tiny_model
from tests.toy_backend import backend as toy


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(config.BACKENDS, "toy", "tests.toy_backend.backend:ToyBackend")
    toy.calls.clear()
    yield


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    ids = torch.arange(3, 19).view(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def test_a_row_is_enough_to_patch_and_train_with_it() -> None:
    model = tiny_model("mixtral").bfloat16().train()
    by_torch = copy.deepcopy(model)
    patch_model(by_torch, NeuronMoEConfig(backend="torch"))
    report = patch_model(model, NeuronMoEConfig(backend="toy"))
    assert {entry.backend for entry in report.patched} == {"toy"}
    assert all("a toy" in entry.notes and entry.saved_bytes_per_token for entry in report.patched)
    both = zip(loss_and_gradients(model), loss_and_gradients(by_torch), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in both)
    assert toy.calls == {"experts_forward": len(report.patched), "experts_backward": len(report.patched)}
    with torch.inference_mode():
        model.eval()(input_ids=torch.arange(3, 11).view(1, 8))
    assert toy.calls["experts_forward"] == 2 * len(report.patched)


def test_what_it_does_not_support_is_an_error_or_left_to_pytorch() -> None:
    model = tiny_model("qwen2_moe", shared_expert_intermediate_size=96).bfloat16()
    with refused(UnsupportedModelError, "model", "intermediate size of at most 64"):
        patch_model(model, NeuronMoEConfig(backend="toy"))
    report = patch_model(model, NeuronMoEConfig(backend="toy", fallback="torch"))
    backends = {(entry.kind, entry.backend) for entry in report.patched}
    assert {("experts", "toy"), ("mlp", "torch")} <= backends
    loss_and_gradients(model)
    assert toy.calls["experts_backward"] and not toy.calls["mlp_backward"]


def test_fixed_rows_are_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 gives each of 4 experts every token, and the other backends look up the 8 bytes of a chosen row."""
    saved = []
    for fixed in (False, True):
        monkeypatch.setattr(toy.ToyBackend, "fixed_rows", fixed)
        model = tiny_model("llama4", num_experts_per_tok=2).bfloat16()
        report = patch_model(model, NeuronMoEConfig(backend="toy", fallback="torch"))
        saved.append(next(entry.saved_bytes_per_token for entry in report.patched if entry.kind == "experts"))
    chosen, every = saved
    assert chosen is not None and every == 4 * (chosen / 2 - 8)


def test_without_the_row_the_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(config.BACKENDS, "toy")
    with refused(ConfigError, "backend", "Choose one of these"):
        NeuronMoEConfig(backend="toy")
