"""A model with a frozen MX base: exact gradients, its state, casts and copies, generation, and what it refuses."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.convert import export_checkpoint
from hf_neuron_moe.errors import ConversionError, UnsupportedModelError
from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock, QuantizedExperts
from tests.quantized_oracle import oracle
from tests.quantizers.conftest import SIZES, UNEVEN, WORDS, Converted, Source, load, patched
from tests.refusals import refused
from tests.tiny_models import tokens

FAMILIES = ("llama", "mixtral", "qwen2_moe")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def blocks(model: nn.Module) -> dict[str, QuantizedBlock]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedBlock)}


class ReadableMLP(nn.Module):
    """A dense MLP on its weights' MXFP8 values."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        weights = (torch.cat([stock.gate_proj.weight, stock.up_proj.weight]), stock.down_proj.weight)
        self.weights = [fake_quantize_mx(weight.detach()) for weight in weights]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = oracle(x.flatten(0, -2), *self.weights, ("wrapX", "wrapX"), self.weights[1].shape[1])
        return rows.view(x.shape)


class ReadableExperts(nn.Module):
    """Experts on their weights' MXFP8 values, one token and expert at a time."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        pairs = zip(stock.gate_up_proj.detach(), stock.down_proj.detach(), strict=True)
        self.weights = [tuple(map(fake_quantize_mx, pair)) for pair in pairs]

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, (chosen, scales) in enumerate(zip(index.tolist(), weights, strict=True)):
            row = x[token : token + 1]
            parts = [
                oracle(row, *self.weights[expert], ("wrapX", "wrapX"), self.weights[expert][1].shape[1], scale[None])
                for expert, scale in zip(chosen, scales, strict=True)
            ]
            rows.append(torch.stack(parts).sum(0))
        return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_exact_for_the_codes_values(source: Source, converted: Converted, family: str) -> None:
    model = load(converted(family, precision="mxfp8"), dtype=torch.float32)
    readable = load(source(family), dtype=torch.float32)
    for name, block in blocks(model).items():
        kind = ReadableExperts if isinstance(block, QuantizedExperts) else ReadableMLP
        readable.set_submodule(name, kind(readable.get_submodule(name)))
    grads = []
    for one in (model, readable):
        one.train()
        one(tokens(), labels=tokens()).loss.backward()
        grads.append({name: param.grad for name, param in one.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        # What differs: the blocks round their input, pre-activations, results and gradients to bf16 (2^-9 each), and
        # where that crosses a border of the MXFP8 grid, single activations by 2^-4.
        assert (grad - grads[1][name]).norm() < 2**-5 * grads[1][name].norm(), name


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["fused", "kernel"])
def test_state_dict_copies_and_casts_keep_every_bit(converted: Converted, family: str, layout: str) -> None:
    folder = converted(family, precision="mxfp8", layout=layout)
    model, other = load(folder), load(folder)
    expected, state = logits(model), model.state_dict()
    for block in blocks(other).values():
        for buffer in block.buffers():
            buffer.zero_()
    assert not torch.equal(logits(other), expected)
    assert not any(other.load_state_dict(state))
    assert torch.equal(logits(other), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)
    for dtype in (torch.float32, torch.float16):
        model.to(dtype)
        for name, block in blocks(model).items():
            for key, buffer in block.named_buffers():
                assert torch.equal(buffer, state[f"{name}.{key}"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("phi3", UNEVEN, {"precision": "mxfp8", "pad": True}),
        ("mixtral", SIZES, {"precision": "mxfp8"}),
        ("mixtral", UNEVEN, {"precision": "mxfp8", "pad": True, "purpose": "inference"}),
        ("qwen2_moe", WORDS, {"precision": "mxfp4"}),
        ("mixtral", WORDS, {"precision": {"*": "mxfp4", "*.0.mlp.experts.gate_up_proj": "mxfp8"}}),
    ],
    ids=str,
)
def test_dequantizing_gives_what_export_gives(
    converted: Converted, tmp_path: Path, family: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    folder = converted(family, sizes, **options)
    export_checkpoint(folder, tmp_path / "exported", allow_inexact=True)
    model, expected = load(folder), load(tmp_path / "exported")
    model.dequantize()
    assert not getattr(model, "is_quantized", False)
    assert not any(module.training for module in model.modules()), "as the blocks were"
    assert not blocks(model)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in expected.named_parameters()]
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "saved")
    saved, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "exported"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    model.base_model.save_pretrained(tmp_path / "part")
    patch_model(model)


def test_it_generates_what_the_patched_original_generates(source: Source, converted: Converted) -> None:
    made = [
        model.generate(tokens(1, 5), max_new_tokens=6, do_sample=False)
        for model in (load(converted("mixtral", precision="mxfp8")), patched(source("mixtral"), "mxfp8"))
    ]
    assert torch.equal(*made)
    assert made[0].shape[1] > 5


def test_gradient_checkpointing_changes_no_gradient(converted: Converted) -> None:
    grads = []
    for checkpointed in (False, True):
        model = load(converted("mixtral", precision="mxfp8")).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(tokens(), labels=tokens()).loss.backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_saving_patching_and_unknown_activations_are_refused(converted: Converted, tmp_path: Path) -> None:
    model = load(converted("mixtral", precision="mxfp8"))
    for part in (model, model.model, copy.deepcopy(model).model):
        with refused(UnsupportedModelError, "model", "hf-neuron-moe export", where="save_pretrained"):
            part.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
    with refused(UnsupportedModelError, "model", got="a quantized model (neuron_moe)"):
        patch_model(model)
    with refused(UnsupportedModelError, "model", r"model\.dequantize\(\)"):
        unpatch_model(model)
    model.model.layers[0].mlp.experts.act_fn = nn.GELU()
    with refused(UnsupportedModelError, "act_fn", got="GELU"):
        logits(model)


def test_what_a_block_says_of_itself(converted: Converted) -> None:
    text = repr(load(converted("llama", precision="mxfp8", layout="kernel")))
    assert "frozen e4m3fn, swizzled, H=128, I=256" in text


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
@pytest.mark.slow
def test_a_frozen_model_is_one_graph(converted: Converted, family: str) -> None:
    model = load(converted(family, precision="mxfp8"))
    expected = logits(model)
    torch._dynamo.reset()
    try:
        assert torch.equal(logits(torch.compile(model, backend="eager", fullgraph=True)), expected)
    finally:
        torch._dynamo.reset()


def test_dequantizing_keeps_the_dtype_that_the_model_was_moved_to(converted: Converted) -> None:
    """transformers passes config.dtype, which ``model.to`` leaves as it was at loading."""
    folder = converted("mixtral", SIZES, precision="mxfp8")
    model = load(folder, dtype=torch.bfloat16).to(torch.float32)
    model.dequantize()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model = load(folder, dtype=torch.float32)
    model.dequantize(torch.bfloat16)
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16


def test_another_class_than_the_converted_one_is_refused(converted: Converted) -> None:
    """Such as the text model of a composite one."""
    folder = converted("mixtral", SIZES, precision="mxfp8")
    with refused(
        ConversionError,
        "tensor model.layers.0.mlp.experts.down_proj",
        "the class that config.json names under architectures",
    ):
        LlamaForCausalLM.from_pretrained(folder)
