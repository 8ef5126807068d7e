"""A forward that is put on a patched block either leads to the block's own, or is refused; never unnoticed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_neuron_moe import patch_model, set_activations, unpatch_model
from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model, tokens

STOCK = {"llama": LlamaMLP, "mixtral": MixtralExperts}


def blocks(model: nn.Module) -> list[Any]:
    return [getattr(layer.mlp, "experts", layer.mlp) for layer in model.model.layers]


def patched(family: str, home: str = "stock") -> nn.Module:
    model = tiny_model(family).eval()
    patch_model(model, {"weights": home})
    return model


def as_liger_does(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Liger's ``_bind_method_to_module``, which goes past ``__setattr__``."""
    block.__dict__["forward"] = forward.__get__(block, type(block))


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize(
    "put", [as_liger_does, lambda block, forward: setattr(block, "forward", MethodType(forward, block))]
)
def test_a_block_that_was_taken_over_is_refused(family: str, home: str, put: Callable[..., None]) -> None:
    model = patched(family, home)
    expected = model(tokens()).logits
    for block in blocks(model):
        put(block, STOCK[family].forward)
    with refused(
        UnsupportedModelError,
        "forward",
        r"^model\.layers\.0\.mlp.*use_liger_kernel.* exclude=\['model\.layers\.0\.mlp(\.experts)?'\]\.$",
    ):
        model(tokens())
    with refused(UnsupportedModelError, "model", r"model\.layers\.0\.mlp.*, model\.layers\.1.*unpatch_model"):
        patch_model(model, {"weights": home})
    with refused(UnsupportedModelError, "model", r"model\.layers\.0\.mlp.*, model\.layers\.1", where="set_activations"):
        set_activations(model, "recompute")
    for block in blocks(model):
        del block.forward
    assert torch.equal(model(tokens()).logits, expected)


def test_unpatching_gives_back_the_stock_blocks_all_the_same() -> None:
    model, stock = patched("llama"), tiny_model("llama").eval()
    for block in blocks(model):
        as_liger_does(block, LlamaMLP.forward)
    with pytest.warns(NeuronMoEWarning, match=r"unpatch_model: .*LlamaMLP\.forward.*model\.layers\.0-1\.mlp"):
        unpatch_model(model)
    assert torch.equal(model(tokens()).logits, stock(tokens()).logits)


def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return called


class Timer:
    """A callable object that keeps what it calls."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.inner = forward

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)


def with_default(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, inner=forward: inner(x)


WRAPPERS: dict[str, Callable[[Any], None]] = {
    "closure": lambda block: setattr(block, "forward", timed(block.forward)),
    "closure in a closure": lambda block: setattr(block, "forward", timed(timed(block.forward))),
    "partial": lambda block: setattr(block, "forward", functools.partial(timed(block.forward))),
    "default": lambda block: setattr(block, "forward", with_default(block.forward)),
    "object": lambda block: setattr(block, "forward", Timer(block.forward)),
    "accelerate": lambda block: add_hook_to_module(block, ModelHook()),
    "compile": lambda block: setattr(block, "forward", torch.compile(block.forward, backend="eager")),
    "itself": lambda block: setattr(block, "forward", block.forward),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_around_the_blocks_own_forward_is_called(wrapper: str) -> None:
    model = patched("llama")
    report, expected = patch_model(model, {"weights": "stock"}), model(tokens()).logits
    for block in blocks(model):
        WRAPPERS[wrapper](block)
    assert torch.equal(model(tokens()).logits, expected)
    assert patch_model(model, {"weights": "stock"}) is report


def test_what_accelerate_leaves_behind_is_the_blocks_own() -> None:
    model = patched("llama")
    expected = model(tokens()).logits
    for block in blocks(model):
        add_hook_to_module(block, ModelHook())
        remove_hook_from_module(block)
        assert "forward" in block.__dict__
    assert torch.equal(model(tokens()).logits, expected)


def test_a_compiled_model_notices_too() -> None:
    torch._dynamo.reset()
    model = patched("llama")
    for block in blocks(model):
        as_liger_does(block, LlamaMLP.forward)
    with pytest.raises(RuntimeError, match="use_liger_kernel"):  # the compiler wraps the error
        torch.compile(model, backend="eager")(tokens())
    torch._dynamo.reset()


def test_weights_that_accelerate_offloads_are_refused_in_the_kernel_home_only() -> None:
    for family in STOCK:
        model = patched(family)
        expected = model(tokens()).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeuronMoEWarning)  # dense layers with hooks are called one by one
            assert cpu_offload(model, torch.device("cpu"))(tokens()).logits.shape == expected.shape
        model = cpu_offload(patched(family, "kernel"), torch.device("cpu"))
        with refused(UnsupportedModelError, "weights", "weights='stock'"):
            model(tokens())


def test_a_timer_of_a_notebook_calls_a_global_variable() -> None:
    model = patched("llama")
    expected, block = model(tokens()).logits, blocks(model)[0]
    cell: dict[str, Any] = {"old": block.forward}
    exec("def timed(*args, **kwargs):\n    return old(*args, **kwargs)", cell)
    block.forward = cell["timed"]
    assert torch.equal(model(tokens()).logits, expected)
    cell["old"] = None
    with refused(UnsupportedModelError, "forward"):
        model(tokens())


def calls_experts(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A forward of the user's own that has use for the experts."""
    scores = self.gate(hidden.reshape(-1, hidden.shape[-1]))
    return self.experts(hidden.reshape(-1, hidden.shape[-1]), scores[2], scores[1]).reshape(hidden.shape)


def by_a_helper(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Likewise, through another function."""
    return calls_experts(self, hidden)


AROUND_EXPERTS = WRAPPERS | {
    "calls the experts": lambda block: setattr(block, "forward", MethodType(calls_experts, block)),
    "by a helper": lambda block: setattr(block, "forward", MethodType(by_a_helper, block)),
    "holds the experts": lambda block: setattr(block, "forward", lambda x, run=block.experts: run(x)),
}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_moe_block_whose_new_forward_leaves_its_experts_out_is_refused(when: str) -> None:
    model = tiny_model("mixtral")
    if when == "before":
        model.model.layers[0].mlp.forward = lambda x: x
        with refused(UnsupportedModelError, "model", r"model\.layers\.0\.mlp\.experts .*does not call it"):
            patch_model(model)
        return
    report = patch_model(model)
    model.model.layers[0].mlp.forward = lambda x: x
    for call in (patch_model, lambda model: set_activations(model, "recompute")):
        with refused(
            UnsupportedModelError, "model", got="a model whose patched experts do not run: model.layers.0.mlp."
        ):
            call(model)
    del model.model.layers[0].mlp.forward
    assert patch_model(model) is report


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrapper", AROUND_EXPERTS)
def test_a_moe_block_whose_new_forward_has_use_for_its_experts_is_patched(wrapper: str, when: str) -> None:
    model = tiny_model("mixtral")
    if when == "after":
        patch_model(model)
    for layer in model.model.layers:
        AROUND_EXPERTS[wrapper](layer.mlp)
    assert len(patch_model(model).patched) == 2


def test_a_wrapper_that_goes_with_the_patched_block_is_warned_of() -> None:
    model = patched("llama")
    model.model.layers[1].mlp.forward = timed(model.model.layers[1].mlp.forward)
    with pytest.warns(NeuronMoEWarning, match=r"timed.*model\.layers\.1\.mlp is dropped"):
        unpatch_model(model)
