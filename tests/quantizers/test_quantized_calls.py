"""MX blocks of experts that are called in other ways or have no gate, and of dense MLPs with other gates or biases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends.mx_weights import MXLayout
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock, QuantizedSwiGLUMLP
from hf_neuron_moe.patching.discovery import discover
from tests.backends.test_quantized_network import store
from tests.convert.test_every_family import made, opened, output

BIASED = ("llama_biased", "moonshine", "dinov2")  # its rows of up first, or both in one tensor of the files
FAMILIES = ("gemma3", "muse_spark", "llama4", "longcat_flash", "dbrx", "jetmoe", "nemotron_h", *BIASED)


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_compute_what_the_patched_original_does(family: str, tmp_path: Path) -> None:
    """Bit for bit; and the codes' values are those of the export and of a dequantized model."""
    source = made(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", pad=True))
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok and report.probes, str(report)
    stock, model = opened(family, source), opened(family, tmp_path / "dst")
    patched = {entry.name for entry in patch_model(stock, {"precision": "mxfp8"}, strict=False).patched}
    assert {name for name, module in model.named_modules() if isinstance(module, QuantizedBlock)} == patched
    assert torch.equal(output(model), output(stock))
    export_checkpoint(tmp_path / "dst", tmp_path / "values", allow_inexact=True)
    values = opened(family, tmp_path / "values").state_dict()
    found = model.dequantize().state_dict()
    assert found.keys() == values.keys()
    for name, value in values.items():
        # Of longcat_flash, rows of experts without a down projection become zeros, which nothing reads.
        rows = 4 if name.endswith("experts.gate_up_proj") and family == "longcat_flash" else len(value)
        assert torch.equal(found[name][:rows], value[:rows]), name


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(
    ("family", "glob"),
    [("dbrx", "transformer.blocks.0.*"), ("llama4", "*.experts"), ("nemotron_h", "model.layers.2.*")],
)
def test_codes_next_to_bf16_blocks(family: str, glob: str, tmp_path: Path) -> None:
    source, precision = made(family, tmp_path / "source"), {"*": "mxfp8", glob: "bf16"}
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions(precision, pad=True))
    stock, model = opened(family, source), opened(family, tmp_path / "dst")
    patch_model(stock, {"precision": precision}, strict=False)
    assert torch.equal(output(model), output(stock))


@pytest.mark.parametrize("biased", [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "down_proj")])
def test_biases_of_some_layers(biased: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    mlp = LlamaMLP(LlamaConfig(hidden_size=128, intermediate_size=256, mlp_bias=True)).bfloat16().eval()
    for name in ("gate_proj", "up_proj", "down_proj"):
        torch.nn.init.normal_(mlp.get_submodule(name).bias, std=0.5)
        mlp.get_submodule(name).bias = mlp.get_submodule(name).bias if name in biased else None
    (candidate,) = discover(torch.nn.ModuleDict({"mlp": mlp}))
    assert candidate.roles is not None and candidate.roles.biased == biased
    weights = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), mlp.down_proj.weight
    stored = [tensor for weight in weights for tensor in store(weight.detach(), "natural", "compact")]
    tensors = dict(zip(QuantizedSwiGLUMLP.tensor_names(), stored, strict=True))
    tensors |= {f"{name}.bias": mlp.get_submodule(name).bias.detach().clone() for name in biased}
    layouts = dict.fromkeys(("gate_up_proj", "down_proj"), MXLayout())
    config = NeuronMoEConfig(precision="mxfp8", backend="torch")
    block = QuantizedSwiGLUMLP(mlp, "mlp", config, layouts, tensors, candidate.roles).eval()
    block.settle()
    model, x = torch.nn.ModuleDict({"mlp": mlp}), torch.randn(9, 128).bfloat16()
    patch_model(model, {"precision": "mxfp8"})
    with torch.no_grad():
        assert torch.equal(block(x), model["mlp"](x))
        for name in biased:
            block.get_buffer(f"{name}.bias").zero_()
        assert not torch.equal(block(x), model["mlp"](x))
