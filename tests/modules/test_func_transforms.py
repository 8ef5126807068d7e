"""torch.func's transforms of a patched block are refused by a message that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import GradientError
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda loss, params: grad(loss)(params),
    "jvp": lambda loss, params: jvp(loss, (params,), (params,)),
    "vmap": lambda loss, params: vmap(loss)({name: torch.stack([value] * 2) for name, value in params.items()}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_transforms_of_experts_are_refused(transform: str, home: str, training: bool) -> None:
    model = tiny_model("mixtral").train(training)
    patch_model(model, {"weights": home, "precision": "fp32"})
    block, x = model.model.layers[0].mlp.experts, torch.randn(4, 32)
    routing = (torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    params = {name: value.detach() for name, value in block.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(block, values, (x, *routing)).square().sum()

    with refused(GradientError, "every argument", r"Use backward\(\) or torch\.autograd\.grad", where="experts"):
        TRANSFORMS[transform](loss, params)
    assert loss(params).isfinite()


def test_a_dense_block_in_the_kernel_home_refuses_too() -> None:
    model = tiny_model("llama")
    patch_model(model, {"weights": "kernel"})
    block = model.model.layers[0].mlp
    with refused(GradientError, "every argument", where="swiglu_mlp"):
        grad(lambda x: block(x).sum())(torch.randn(3, 32))
    assert vmap(lambda x: x * block(torch.ones(2, 32)).sum())(torch.ones(3)).shape == (3,)  # the block is outside of it


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_dense_block_refuses_too(transform: str) -> None:
    model = tiny_model("llama")
    patch_model(model)
    block, x = model.model.layers[0].mlp, torch.randn(3, 32)
    params = {name: value.detach() for name, value in block.named_parameters()}
    with refused(GradientError, "every argument", where="swiglu_mlp"):
        TRANSFORMS[transform](lambda values: functional_call(block, values, (x,)).square().sum(), params)


@pytest.mark.parametrize("training", [True, False])
def test_a_dense_block_computes_with_tensors_that_stand_for_parameters(training: bool) -> None:
    model = tiny_model("llama").train(training)
    patch_model(model, {"precision": "mxfp8"})
    block, x = model.model.layers[0].mlp, torch.randn(3, 32)
    doubled = {name: 2 * value.detach() for name, value in block.named_parameters()}
    found = functional_call(block, doubled, (x,))
    with torch.no_grad():
        for name, value in block.named_parameters():
            value.copy_(doubled[name])
    assert found.equal(block(x)) and not found.equal(2 * block(x))


def test_a_dense_block_with_adapters_refuses_too() -> None:
    model = tiny_model("llama")
    patch_model(model)
    get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj"]))
    with refused(GradientError, "every argument", where="swiglu_mlp"):
        grad(lambda x: model.model.layers[0].mlp(x).sum())(torch.randn(3, 32))
