"""Where routing replay is installed: on any way of switching checkpointing on, on copies, and not after unpatching."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.training import ReplayingCheckpoint, routing_replay_stats
from tests.checkpointing import NAME, switch_on
from tests.tiny_models import tiny_model, tokens


def functions(model: nn.Module) -> list[object]:
    """The layers' checkpoint functions."""
    return [layer.__dict__.get("_gradient_checkpointing_func") for layer in model.model.layers]


def patched(family: str = "mixtral") -> nn.Module:
    model = tiny_model(family)
    patch_model(model, {"precision": "fp32"})
    return model


def backward(model: nn.Module) -> None:
    ids = tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}])
def test_switched_on_before_or_after_patching(options: dict[str, bool] | None) -> None:
    before = tiny_model("mixtral")
    switch_on(before, options)
    original = functions(before)
    untouched = [list(module.__dict__) for module in before.modules()]
    patch_model(before, {"precision": "fp32"})
    after = patched()
    switch_on(after, options)
    for model in (before, after):
        first, second = functions(model)
        assert isinstance(first, ReplayingCheckpoint) and first is second
        assert first.inner.func is checkpoint and first.inner.keywords == (options or {"use_reentrant": False})
        backward(model)
        assert routing_replay_stats(model) == (36, 0)  # 18 tokens in 2 layers
        model.zero_grad()
    unpatch_model(before)
    assert functions(before) == original
    assert [list(module.__dict__) for module in before.modules()] == untouched
    unpatch_model(after)
    assert all(isinstance(function, functools.partial) for function in functions(after))
    switch_on(after, options)
    assert all(isinstance(function, functools.partial) for function in functions(after))
    assert "_set_gradient_checkpointing" not in after.__dict__


def test_every_other_layer_and_switching_off() -> None:
    model = patched()
    switch_on(model, every_n_layers=2)
    backward(model)
    assert routing_replay_stats(model) == (18, 0)
    getattr(model, f"{NAME}_disable")()
    assert not getattr(model, f"is_{NAME}")
    backward(model)
    assert routing_replay_stats(model) == (0, 0)


def test_offloaded_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks for pinned memory, which there is none of without an accelerator.
    offload = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **options: offload())
    model = patched()
    switch_on(model, offload=True)
    backward(model)
    assert routing_replay_stats(model) == (36, 0)


def test_dense_models_and_evaluation_are_left_alone() -> None:
    dense = patched("llama")
    switch_on(dense)
    assert not any(isinstance(function, ReplayingCheckpoint) for function in functions(dense))
    model = patched()
    switch_on(model)
    model.eval()
    backward(model)
    assert routing_replay_stats(model) == (0, 0)


def test_copies_have_their_own() -> None:
    model = patched()
    switch_on(model)
    twin = copy.deepcopy(model)
    backward(twin)
    assert routing_replay_stats(twin) == (36, 0)
    assert routing_replay_stats(model) == (0, 0)
    switch_on(twin, {"use_reentrant": True})
    assert functions(twin)[0].inner.keywords == {"use_reentrant": True}
    assert functions(model)[0].inner.keywords == {"use_reentrant": False}
    unpatch_model(twin)
    assert not any(isinstance(function, ReplayingCheckpoint) for function in functions(twin))
    assert all(isinstance(function, ReplayingCheckpoint) for function in functions(model))
    fresh = patched()  # before checkpointing is on, when transformers adds a hook that cannot be saved
    file = io.BytesIO()
    torch.save(fresh, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    switch_on(loaded)
    backward(loaded)
    assert routing_replay_stats(loaded) == (36, 0)


def test_through_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = patched()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.gradient_checkpointing_enable()
    backward(wrapped)
    assert routing_replay_stats(wrapped) == (36, 0)
    unpatch_model(wrapped)
    assert not any(isinstance(function, ReplayingCheckpoint) for function in functions(model))
