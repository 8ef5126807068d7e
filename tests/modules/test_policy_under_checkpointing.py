"""Policies together with torch's and transformers' ways to save memory: the same gradients; no second derivative."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import GradientError
from hf_neuron_moe.modules import ops
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model, tokens

POLICIES = ("full", "minimal", "fp8", "recompute", "up")


def patched(family: str, policy: str, home: str = "stock", precision: str = "mxfp8") -> nn.Module:
    model = tiny_model(family, hidden_size=64, intermediate_size=544)
    patch_model(model, {"activations": policy, "weights": home, "precision": precision})
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    ids = tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.sampled(3)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3"])
def test_models_learn_the_same_whatever_is_kept(family: str, precision: str, home: str) -> None:
    expected = gradients(patched(family, "full", home, precision))
    for policy in ("minimal", "recompute", "gate_pre"):
        assert_same(gradients(patched(family, policy, home, precision)), expected)
    rough = gradients(patched(family, "fp8", home, precision))
    assert torch.equal(rough["loss"], expected["loss"])
    assert any(not torch.equal(rough[name], value) for name, value in expected.items())


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_gradient_checkpointing_of_transformers(family: str, policy: str, reentrant: bool) -> None:
    """So few rows that inference would take its short way: a reentrant first pass must not."""
    model = patched(family, policy, precision="fp32" if policy == "full" else "mxfp8")
    expected = gradients(copy.deepcopy(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(gradients(model), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_selective_checkpointing_saves_our_operators(family: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks' operators on the list of what must be saved, the blocks are not computed twice."""
    model = patched(family, policy)
    expected = gradients(copy.deepcopy(model))
    must_save = [torch.ops.hf_neuron_moe.mlp_fwd.default, torch.ops.hf_neuron_moe.moe_fwd.default]
    backend = ops.get_backend("torch")
    name = "mlp_forward" if family == "llama" else "experts_forward"
    calls, original = [], getattr(backend, name)
    monkeypatch.setattr(backend, name, lambda *args: (calls.append(1), original(*args))[1], raising=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, must_save)
    for layer in model.model.layers:
        whole = layer.forward
        layer.forward = functools.partial(checkpoint, whole, use_reentrant=False, context_fn=contexts)
    assert_same(gradients(model), expected)
    assert len(calls) == len(model.model.layers)


def test_selective_checkpointing_may_also_compute_our_operators_again() -> None:
    model = patched("mixtral", "minimal")
    expected = gradients(copy.deepcopy(model))

    def choose(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.PREFER_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

    for layer in model.model.layers:
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    assert_same(gradients(model), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saved_tensors_may_wait_elsewhere(family: str, policy: str) -> None:
    model = patched(family, policy)
    expected = gradients(copy.deepcopy(model))
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(model), expected)


def dense_loss(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(shape, generator=generator) for shape in ((48, 32), (48, 32), (32, 48)))
    return ops.swiglu_mlp(x, gate, up, down, precision="fp32", backend="torch").square().sum()


def routed_loss(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(3, 96, 32, generator=generator), torch.randn(3, 32, 48, generator=generator)
    routing = torch.tensor([[0, 1], [2, 1], [1, 0], [0, 2]]), torch.rand(4, 2, generator=generator)
    options = {"transposed": False, "block_size": 128}
    return ops.experts(x, *routing, gate_up, down, precision="fp32", backend="torch", **options).square().sum()


@pytest.mark.parametrize("loss", [dense_loss, routed_loss])
def test_double_backward_is_refused_when_it_is_asked_for(loss: object) -> None:
    assert callable(loss)
    x = torch.randn(4, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(loss(x), x)
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    assert torch.equal(first, plain)
    with refused(GradientError, "the backward itself", "create_graph"):
        first.square().sum().backward()
