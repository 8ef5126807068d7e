"""A patched model in fp32 is the stock model: outputs, input gradients, every parameter's gradient, both homes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast
from tests.tiny_models import FAMILIES, LATER_GATES, OTHER_GATES, WEIGHT_LAYOUTS, tiny_model, tokens


def assert_close(actual: Tensor, expected: Tensor, what: str, exact: Callable[[], Tensor] | None = None) -> None:
    """Equal up to fp32 rounding.

    rtol 1e-5 is the promise for single elements. The products are summed in another order than in the stock modules,
    and an element near zero is the difference of large terms, so its error scales with the tensor's largest value:
    a few units of 2**-24 each, 2e-6 together over the two layers and up to 48 terms of these models. Where a whole
    tensor is such a difference (k_proj.bias), 1e-11 is what terms of 1e-4 leave. Models with more norms, and other
    processors, round more: then twice what stock itself differs from the `exact` values in float64 comes on top.
    """
    atol = max(2e-6 * expected.abs().max().item(), 1e-11)
    if exact is not None and not torch.allclose(actual, expected, rtol=1e-5, atol=atol):
        atol += 2 * (expected.double() - exact()).abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, msg=lambda m: f"{what}: {m}")


def run(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, the gradient at the embeddings, and gradients under state_dict names."""
    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    logits.square().mean().backward()
    # state_dict(keep_vars=True) would give views; gradients in stock layout come from a state dict of gradients.
    with torch.no_grad():
        saved = {name: param.detach().clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        gradients = {name: value.clone() for name, value in model.state_dict().items()}
        for name, param in model.named_parameters():
            param.copy_(saved[name])
    return logits.detach(), embedded.grad, gradients


def run_exactly(stock: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same of the stock modules in float64, which grouped products do not take."""
    model: Any = copy.deepcopy(stock).double()
    model.set_experts_implementation("eager")
    return run(model)


SLOW_GATES = [pytest.param(family, marks=pytest.mark.slow) for family in LATER_GATES]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_GATES, *SLOW_GATES])
def test_forward_and_all_gradients_equal_stock(family: str, home: str) -> None:
    stock = tiny_model(family)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, {"precision": "fp32", "weights": home}, strict=family in FAMILIES)
    assert {entry.weights for entry in report.patched} == {home}
    assert {entry.kind for entry in report.refused} <= {"mlp"}
    exact = functools.cache(lambda: run_exactly(stock))
    logits, input_gradient, gradients = run(patched)
    stock_logits, stock_input_gradient, stock_gradients = run(stock)
    assert_close(logits, stock_logits, "logits", lambda: exact()[0])
    assert_close(input_gradient, stock_input_gradient, "input gradient", lambda: exact()[1])
    assert gradients.keys() == stock_gradients.keys()
    for name, gradient in stock_gradients.items():
        reached = "experts." in name or (family in FAMILIES and "embed_tokens" not in name)
        assert not reached or gradient.abs().max() > 0, name
        if "hc_" in name or "_hc." in name:
            continue  # weights of residual streams: their gradient, 1e-10 here, is what equal streams leave of 1e-4
        assert_close(gradients[name], gradient, name, functools.partial(lambda key: exact()[2][key], name))


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_both_homes_give_the_same_numbers(family: str, home: str) -> None:
    stock = tiny_model(family)
    results = []
    for weights in ("stock", home):
        model = copy.deepcopy(stock)
        patch_model(model, {"precision": "bf16", "weights": weights})
        results.append(run(model))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][2].items():
        if bf16_matmul_is_fast(torch.device("cpu")):
            assert torch.equal(results[1][2][name], gradient), name
        else:
            # Up to fp32 rounding: MKL's code for few rows sums a transposed matrix in another order.
            assert_close(results[1][2][name], gradient, name)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_frozen_weights_get_no_gradient_and_pass_it_on(family: str, home: str) -> None:
    model = tiny_model(family)
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" not in name)
    patch_model(model, {"precision": "fp32", "weights": home})
    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    blocks = [param for name, param in model.named_parameters() if "mlp" in name]
    assert blocks
    assert all(not param.requires_grad and param.grad is None for param in blocks)
    assert embedded.grad.abs().max() > 0


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_ids_of_other_ranks_add_nothing(home: str) -> None:
    model = tiny_model("mixtral")
    stock = copy.deepcopy(model.model.layers[0].mlp.experts)
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    patch_model(model, {"precision": "fp32", "weights": home})
    experts = model.model.layers[0].mlp.experts
    hidden_TH = torch.randn(6, 32)
    index_TK = torch.tensor([[0, 1], [4, 2], [4, 4], [3, 4], [1, 0], [2, 3]])
    weights_TK = torch.rand(6, 2)
    expected = stock(hidden_TH, index_TK.clamp(max=3), weights_TK * (index_TK < 4))
    assert_close(experts(hidden_TH, index_TK, weights_TK), expected, "experts")
    assert torch.equal(experts(hidden_TH, index_TK, weights_TK)[2], torch.zeros(32))


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_transposed_experts_keep_their_parameters(home: str) -> None:
    from transformers import AriaTextConfig
    from transformers.models.aria.modeling_aria import AriaExperts

    config = AriaTextConfig(
        hidden_size=16, intermediate_size=24, moe_num_experts=3, num_attention_heads=2, num_key_value_heads=2
    )
    config._experts_implementation = "eager"
    block = nn.ModuleDict({"experts": AriaExperts(config)})
    for param in block.parameters():
        nn.init.normal_(param, std=0.2)
    experts = block["experts"]
    if not hasattr(experts, "is_transposed"):
        pytest.skip("this transformers does not mark Aria's experts with use_experts_implementation")
    assert experts.is_transposed
    before = [id(param) for param in block.parameters()]
    hidden_TH, weights_TK = torch.randn(5, 16), torch.rand(5, 2)
    index_TK = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 2]])
    expected = experts(hidden_TH, index_TK, weights_TK)
    patch_model(block, {"precision": "fp32", "weights": home})
    assert [id(param) for param in block.parameters()] == before
    assert_close(block["experts"](hidden_TH, index_TK, weights_TK), expected, "experts")


@pytest.mark.parametrize("family", ["llama", "phi3", "llama_biased"])
def test_later_calls_of_a_dense_block_compute_what_the_first_does(family: str) -> None:
    """The short way of generation is not for fused layers and biases, and autocast changes nothing."""
    model = tiny_model(family).eval()
    patch_model(model, {"precision": "fp32"})
    block, x = model.model.layers[0].mlp, torch.randn(1, 1, 32)
    with torch.no_grad():
        first = block(x)
        torch.testing.assert_close(block(x), first)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(block(x), first)
