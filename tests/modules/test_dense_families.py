"""Dense MLPs of transformers with other gates than SwiGLU: a patched block in fp32 is the class's own block."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NeuronMoEWarning
from tests.modules.test_equals_stock import assert_close, run
from tests.tiny_models import SOME_SLOW_LAYOUTS, WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model, tokens

H, I = 16, 24  # noqa: E741
TEXT = {"hidden_size": H, "intermediate_size": I, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def of(family: str, kind: str, *arguments: Any, **attributes: Any) -> nn.Module:
    """An instance of a class of transformers, from a configuration of these attributes."""
    path = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(path, reason=f"this transformers has no {family}")
    config = (SimpleNamespace(**{**TEXT, **attributes}),) if attributes else ()
    return getattr(module, kind)(*config, *arguments)


LIMITS = {"gate_max": 2.0, "up_max": 2.0, "up_min": -2.0}
CLASSES: dict[str, tuple[Callable[[], nn.Module], Gate]] = {
    "gelu_tanh": (
        lambda: of("gemma3", "Gemma3MLP", hidden_activation="gelu_pytorch_tanh"),
        Gate("gelu_tanh"),
    ),
    "gelu": (lambda: of("zamba", "ZambaMLP", hidden_act="gelu", add_bias_linear=False), Gate("gelu")),
    "bias": (lambda: of("dinov2", "Dinov2SwiGLUFFN", mlp_ratio=2), Gate()),
    "fused, gelu": (lambda: of("phi3", "Phi3MLP", hidden_act="gelu"), Gate("gelu")),
    "chosen activation, bias": (
        lambda: of("dinov3_vit", "DINOv3ViTGatedMLP", mlp_bias=True, hidden_act="gelu"),
        Gate("gelu"),
    ),
    "halved size, bias": (
        lambda: of("recurrent_gemma", "RecurrentGemmaMlp", hidden_activation="gelu_pytorch_tanh"),
        Gate("gelu_tanh"),
    ),
    "down bias": (lambda: of("voxtral_realtime", "VoxtralRealtimeMLP", hidden_act="silu"), Gate()),
    "clamp": (
        lambda: of(
            "deepseek_v4", "DeepseekV4MLP", hidden_act="silu", swiglu_limit=2.0, moe_intermediate_size=I, mlp_bias=False
        ),
        Gate(**LIMITS),
    ),
    "clamp, swish, offset, fused": (
        lambda: of(
            "minimax_m3_vl", "MiniMaxM3VLDenseMLP", swiglu_alpha=1.702, swiglu_limit=2.0, dense_intermediate_size=I
        ),
        Gate("swish", 1.702, **LIMITS, up_offset=1.0),
    ),
    "clamp after": (
        lambda: of("step3p7", "Step3p7MLP", 0, hidden_act="silu", mlp_bias=False, swiglu_limits_shared=[2.0]),
        Gate(act_max=2.0, up_max=2.0, up_min=-2.0),
    ),
    "dropout after": (
        lambda: of("seed_oss", "SeedOssMLP", hidden_act="silu", mlp_bias=True, residual_dropout=0.4),
        Gate(),
    ),
    "dropout of 0": (
        lambda: of("t5gemma", "T5GemmaMLP", hidden_activation="gelu_pytorch_tanh", dropout_rate=0.0),
        Gate("gelu_tanh"),
    ),
    "own linear class": (
        lambda: of("gemma4", "Gemma4VisionMLP", hidden_activation="gelu_pytorch_tanh", use_clipped_linears=False),
        Gate("gelu_tanh"),
    ),
    "multipliers of 1": (
        lambda: of("falcon_h1", "FalconH1MLP", hidden_act="silu", mlp_bias=False, mlp_multipliers=(1.0, 1.0)),
        Gate(),
    ),
    "sparsity of 0": (
        lambda: of(
            "gemma3n",
            "Gemma3nTextMLP",
            intermediate_size=[I],
            hidden_activation="gelu_pytorch_tanh",
            activation_sparsity_pattern=[0.0],
        ),
        Gate("gelu_tanh"),
    ),
    "fp32 gate": (lambda: of("beam", "BeamMLP", hidden_act="silu", mlp_bias=False), Gate()),
    "up first": (lambda: of("moonshine", "MoonshineDecoderMLP", "silu", partial_rotary_factor=1), Gate()),
    "layers in front": (lambda: of("glm4v", "Glm4vVisionPatchMerger", H, I, "silu", True), Gate()),
}


def built(name: str) -> nn.Module:
    """The block with weights that make limits bite: pre-activations have a standard deviation of 2 to 3."""
    torch.manual_seed(0)
    block = CLASSES[name][0]().float()
    for param in block.parameters():
        nn.init.normal_(param, std=0.7)
    return nn.ModuleDict({"mlp": block})


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients in stock layout, from a fixed random state."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = model["mlp"](x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return {"y": y.detach(), "dx": x.grad, **model.state_dict()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("name", CLASSES)
def test_forward_and_all_gradients_equal_the_class(name: str, home: str) -> None:
    stock = built(name)
    patched, before = copy.deepcopy(stock), snapshot(stock)
    report = patch_model(patched, {"precision": "fp32", "weights": home})
    assert len(report.patched) == 1
    assert patched["mlp"].neuron_gate == CLASSES[name][1]
    state = patched.state_dict()
    assert state.keys() == stock.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in stock.state_dict().items())
    x = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(1))
    expected, actual = results(stock.train(), x), results(patched.train(), x)
    for key, value in expected.items():
        assert_close(actual[key], value, f"{name} {key}")
    model = built(name)
    before = snapshot(model)
    patch_model(model, {"weights": home})
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize("family", ["gemma3", "llama_biased"])
def test_a_model_equals_stock(family: str, home: str, tmp_path: Path) -> None:
    """Logits, all gradients, generated tokens, and a saved model that opens without the package."""
    stock = tiny_model(family)
    for name, param in stock.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param)
    patched = copy.deepcopy(stock)
    assert len(patch_model(patched, {"precision": "fp32", "weights": home}).patched) == 2
    (logits, dx, gradients), (logits_, dx_, gradients_) = run(patched), run(stock)
    assert_close(logits, logits_, "logits")
    assert_close(dx, dx_, "input gradient")
    assert gradients.keys() == gradients_.keys()
    for name, gradient in gradients_.items():
        assert_close(gradients[name], gradient, name)
    stock.eval(), patched.eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(patched.generate(tokens(), **options), stock.generate(tokens(), **options))
    patched.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == stock.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in stock.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", ["gelu_tanh", "bias", "clamp, swish, offset, fused", "up first"])
def test_both_layouts_give_the_same_bits(name: str, precision: str) -> None:
    x = torch.randn(2, 5, H)
    found = []
    for home in WEIGHT_LAYOUTS:
        model = built(name).train()
        patch_model(model, {"precision": precision, "weights": home})
        found.append(results(model, x))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in found[0].items())


def test_weights_of_a_patched_block_are_initialized_as_those_of_the_class() -> None:
    from hf_neuron_moe.modules.stock_init import init_as_stock

    model = built("bias")
    patch_model(model, {"weights": "kernel"})
    init_as_stock(model["mlp"], lambda module: [nn.init.ones_(param) for param in module.parameters(recurse=False)])
    assert all(torch.equal(value, torch.ones_like(value)) for value in model.state_dict().values())


def test_a_hook_on_the_class_that_holds_a_layer_is_called() -> None:
    model = built("own linear class")
    patch_model(model, {"precision": "fp32", "weights": "stock"})
    x = torch.randn(3, H)
    expected = model["mlp"](x)
    model["mlp"].up_proj.register_forward_hook(lambda module, args, result: 2 * result)
    with pytest.warns(NeuronMoEWarning, match="up_proj has hooks"):
        assert_close(model["mlp"](x), 2 * expected, "doubled")


@pytest.mark.parametrize("name", ["clamp, swish, offset, fused", "clamp after", "up first"])
def test_through_the_layers_the_gate_is_the_same(name: str) -> None:
    model = built(name)
    patch_model(model, {"precision": "fp32", "weights": "stock"})
    x = torch.randn(3, H)
    expected = model["mlp"](x)
    model["mlp"].get_submodule(model["mlp"].neuron_roles.down).register_forward_hook(
        lambda module, args, result: result
    )
    with pytest.warns(NeuronMoEWarning, match="with hooks"):
        assert_close(model["mlp"](x), expected, name)


@pytest.mark.parametrize("family", ["llama_biased", "gemma3"])
def test_adapters_on_the_layers_compute_as_in_the_stock_model(family: str) -> None:
    """By the operator: a block that called its layers one by one would warn."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["gate_proj", "up_proj", "down_proj"])
    torch.manual_seed(0)
    stock = peft.get_peft_model(tiny_model(family), config).eval()
    model = tiny_model(family)
    patch_model(model, {"precision": "fp32", "weights": "stock"})
    patched = peft.get_peft_model(model, config).eval()
    patched.load_state_dict(stock.state_dict())
    for model in (stock, patched):
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                nn.init.ones_(param.data)
                param.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        results = [model(tokens()).logits for model in (patched, stock)]
    assert_close(*results, "logits")
    for result in results:
        result.square().mean().backward()
    for (name, param), other in zip(patched.named_parameters(), stock.parameters(), strict=True):
        if other.grad is not None:
            assert_close(param.grad, other.grad, name)


def test_llama_4_text_is_patched_by_default_with_its_experts_listed_or_patched() -> None:
    config = Llama4TextConfig(
        **TEXT, intermediate_size_mlp=I, num_hidden_layers=2, moe_layers=[1], num_local_experts=2, vocab_size=64
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    report = patch_model(model, strict=False)
    names = {entry.name for entry in report.patched}
    assert {"model.layers.0.feed_forward", "model.layers.1.feed_forward.shared_expert"} <= names
