"""LoRA inside a patched dense MLP: the numbers of the merged weights, and no weight kept for the backward."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.low_rank import (
    LowRank,
    low_rank_mlp,
    low_rank_of,
    three_weights,
    unsupported_reason_low_rank,
)
from hf_neuron_moe.training import measure_saved_bytes
from tests.tiny_models import tiny_model, tokens

TARGETS = {"llama": ["gate_proj", "up_proj", "down_proj"], "phi3": ["gate_up_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def _no_falling_back() -> Any:
    """A block that called its layers one by one would say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        yield


def adapted(family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 2, **config: Any) -> Any:
    """A patched model with adapters that matter on its MLPs."""
    model = tiny_model(family, num_hidden_layers=layers).to(dtype)
    patch_model(model, config)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS[family]))
    return with_values(wrapped)


def with_values(wrapped: Any, seed: int = 5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in sorted(wrapped.named_parameters()):
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return wrapped


def first_block(wrapped: Any) -> nn.Module:
    return wrapped.get_base_model().model.layers[0].mlp


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_an_adapter_computes_what_its_merged_weights_compute(family: str, precision: str, dtype: torch.dtype) -> None:
    wrapped = adapted(family, dtype, precision=precision)
    recorded = wrapped(tokens()).logits.detach()
    with wrapped.disable_adapter():
        plain = wrapped(tokens()).logits
    assert (recorded - plain).abs().max() > 0.05 * plain.abs().max()
    # Bit for bit, in every precision, whether or not a backward may come.
    assert torch.equal(logits(wrapped), recorded)
    merged = wrapped.merge_and_unload()
    assert torch.equal(logits(merged), recorded)
    if (precision, dtype) == ("fp32", torch.float32):  # else both could take gate for up
        unpatch_model(merged)
        assert torch.allclose(logits(merged), recorded, rtol=1e-4, atol=1e-5), "the order of fp32 sums"


@pytest.mark.parametrize("activations", ["minimal", "recompute"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_gradients_are_those_through_the_materialized_weights(precision: str, activations: str) -> None:
    block = first_block(adapted(precision=precision, activations=activations))
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layers = [block.get_submodule(name) for name in TARGETS["llama"]]
    factors = [factor for layer in layers for factor in (layer.lora_A.default.weight, layer.lora_B.default.weight)]
    found = torch.autograd.grad(block(x).square().sum(), (x, *factors))
    weights = [layer.base_layer.weight + layer.get_delta_weight("default") for layer in layers]
    y = ops.swiglu_mlp(x, *weights, precision=precision, backend="torch", activations=activations)
    expected = torch.autograd.grad(y.square().sum(), (x, *factors))
    for actual, wanted in zip(found, expected, strict=True):
        # The scaling is applied before or after the product: fp32 rounding.
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("activations", ["minimal", "fp8", "recompute"])
def test_no_weight_is_kept_for_the_backward(activations: str) -> None:
    wrapped = adapted(precision="bf16", activations=activations)
    plain = tiny_model("llama")
    patch_model(plain, {"precision": "bf16", "activations": activations})
    kept = []
    for model, block in ((wrapped, first_block(wrapped)), (plain, plain.model.layers[0].mlp)):
        with measure_saved_bytes({"mlp": block}) as saved:
            model(tokens())
        kept.append(saved.bytes_per_token)
    assert kept[0] == kept[1] > 0


def test_adapters_are_stacked_switched_off_and_merged() -> None:
    wrapped = adapted(precision="fp32")
    one = logits(wrapped)
    wrapped.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=TARGETS["llama"]))
    with_values(wrapped, seed=6)
    stock = copy.deepcopy(wrapped)  # peft's own layers, called one by one
    for layer in stock.get_base_model().model.layers:
        layer.mlp._unsupported_reason_fused = lambda: "asked for"
        layer.mlp.neuron_warned = True
    for active in ("default", "other", ["default", "other"]):
        for model in (wrapped, stock):
            model.base_model.set_adapter(active)
        expected = logits(stock)
        torch.testing.assert_close(logits(wrapped), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not torch.equal(logits(wrapped), one)
    wrapped.merge_adapter()
    merged = logits(wrapped)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    wrapped.unmerge_adapter()


def test_dropout_is_honoured_in_training_and_ignored_in_evaluation() -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32"})
    wrapped = with_values(get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["up_proj"])))
    wrapped.eval()
    expected = logits(wrapped)
    wrapped.train()
    with pytest.warns(NeuronMoEWarning, match="up_proj is a LoRA layer with dropout"):
        assert not torch.equal(logits(wrapped), logits(wrapped))
    assert torch.equal(logits(wrapped.eval()), expected)


def gradients(model: nn.Module, call: Any = None) -> dict[str, Tensor]:
    model.zero_grad()
    call = model if call is None else call
    call(tokens(), labels=tokens()).loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad}


def test_checkpointing_changes_no_gradient() -> None:
    wrapped = adapted(precision="mxfp8").train()
    expected = gradients(wrapped)
    assert expected and all(value.any() for value in expected.values())
    wrapped.enable_input_require_grads()
    for reentrant in (False, True):
        wrapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients(wrapped)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_an_adapted_model_is_one_graph() -> None:
    wrapped = adapted(layers=1, precision="mxfp8").train()
    expected = gradients(wrapped)
    torch._dynamo.reset()
    try:
        found = gradients(wrapped, torch.compile(wrapped, backend="aot_eager", fullgraph=True))
    finally:
        torch._dynamo.reset()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_bf16_autocast_leaves_the_factors_product_alone() -> None:
    wrapped = adapted(precision="fp32").eval()
    block, x = first_block(wrapped), torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = block(x), block(x.clone().requires_grad_())
    assert torch.equal(inside[0], inside[1].detach())
    assert torch.equal(inside[0], block(x).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_with_adapters_of_half_precision_have_the_bits_of_a_merge(dtype: torch.dtype) -> None:
    """peft multiplies the factors in fp32 on CPUs, scales, and then rounds once."""
    config = LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS["llama"])
    model = with_values(get_peft_model(tiny_model("llama").to(dtype), config, autocast_adapter_dtype=False))
    layer: Any = first_block(model).gate_proj
    effective = low_rank_of(layer).effective
    assert effective.dtype == layer.lora_A["default"].weight.dtype == dtype
    assert torch.equal(effective, layer.base_layer.weight + layer.get_delta_weight("default"))


GATES = [
    Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0),
    Gate("gelu_tanh"),
    Gate(gate_softcap=1.0, up_softcap=2.0),
]


@pytest.mark.parametrize("gate", GATES, ids=["swish", "gelu_tanh", "softcapped"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
@pytest.mark.parametrize("fused", [False, True])
def test_gates_and_biases_are_those_of_the_materialized_weights(gate: Gate, precision: str, fused: bool) -> None:
    g = torch.Generator().manual_seed(2)
    shapes = [(40, 32), (40, 32), (32, 40)] if not fused else [(80, 32), (32, 40)]

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).requires_grad_()

    x = draw(20, 32)
    layers = [
        LowRank(draw(*shape, scale=0.2), draw(4, shape[1], scale=0.2), draw(shape[0], 4), 0.5) for shape in shapes
    ]
    biases = (draw(40), draw(40), draw(32))
    options: dict[str, Any] = {"precision": precision, "backend": "torch", "gate": gate, "activations": "gate_pre+up"}
    given = [tensor for layer in layers for tensor in layer[:3] if tensor is not None]
    y = low_rank_mlp(x, layers, training=True, biases=biases, cache_weights=True, **options)
    expected = ops.swiglu_mlp(
        x, *three_weights([layer.effective for layer in layers]), training=True, biases=biases, **options
    )
    assert torch.equal(y, expected)
    dout = torch.randn(y.shape, generator=g)
    wanted = [x, *biases, *given]
    found, exact = (torch.autograd.grad(result, wanted, dout, retain_graph=True) for result in (y, expected))
    assert all(map(torch.equal, found[:4], exact[:4]))
    for actual, reference in zip(found[4:], exact[4:], strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)  # sums in another order
    only = torch.autograd.grad(y, [biases[1]], dout)[0]
    assert torch.equal(only, exact[2])


def test_adapters_know_fused_weights_with_gate_first_only() -> None:
    orders = ({}, {"up_first": True}, {"interleaved": True}, {"up_first": True, "interleaved": True})
    roles = [DenseRoles(("gate_up_proj",), "down_proj", "act_fn", **order) for order in orders]
    assert [each.gate_first for each in roles] == [True, False, False, False]


def test_a_bias_alone_may_be_trained() -> None:
    x, (gate, up), down = torch.randn(3, 8), torch.randn(2, 16, 8), torch.randn(8, 16)
    bias = torch.zeros(16, requires_grad=True)
    layers = [LowRank(weight) for weight in (gate, up, down)]
    options: dict[str, Any] = {"precision": "fp32", "backend": "torch", "gate": Gate(), "activations": "minimal"}
    low_rank_mlp(x, layers, training=True, biases=(bias, None, None), **options).sum().backward()
    expected = torch.autograd.functional.jacobian(
        lambda b: ((nn.functional.silu(x @ gate.T + b) * (x @ up.T)) @ down.T).sum(), torch.zeros(16)
    )
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["hook", "transposed"])
def test_factors_that_do_more_than_multiply_are_named(change: str) -> None:
    layer: Any = first_block(adapted()).gate_proj
    assert unsupported_reason_low_rank(layer) is None
    if change == "hook":
        layer.lora_A["default"].register_forward_hook(lambda module, args, out: out * 2)
    else:
        layer.fan_in_fan_out = True
    assert unsupported_reason_low_rank(layer) == "a LoRA layer whose factors are not plain linear layers"
