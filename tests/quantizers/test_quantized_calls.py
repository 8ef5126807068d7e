"""MX blocks of experts that are called in other ways or have no gate, and of dense MLPs with other gates or biases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends.mx_weights import MXLayout
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.errors import ConversionError, ShapeError, UnsupportedModelError
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock, QuantizedSwiGLUMLP
from hf_neuron_moe.patching.discovery import discover
from tests.backends.test_quantized_network import store
from tests.convert.test_every_family import made, opened, output
from tests.refusals import refused

BIASED = ("llama_biased", "moonshine", "dinov2")  # its rows of up first, or both in one tensor of the files
LATER = {"muse_spark"} & set(CONFIG_MAPPING)
FAMILIES = ("gemma3", *LATER, "llama4", "longcat_flash", "dbrx", "jetmoe", "nemotron_h", *BIASED)


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize(
    ("family", "bias"),
    [("llama_biased", "model.layers.1.mlp.up_proj.bias"), ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias")],
)
def test_a_bias_that_is_not_in_the_files_is_an_error(family: str, bias: str, precision: str, tmp_path: Path) -> None:
    convert_checkpoint(made(family, tmp_path / "source"), tmp_path / "dst", ConvertOptions(precision, pad=True))
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != bias}, shard, metadata)
    (index,) = (tmp_path / "dst").glob("*.index.json")
    content = json.loads(index.read_text())
    del content["weight_map"][bias]
    index.write_text(json.dumps(content))
    with refused(ConversionError, f"tensor {bias}", got="none"):
        opened(family, tmp_path / "dst")


def quantized(mlp: nn.Module) -> QuantizedSwiGLUMLP:
    """The block of an MLP's MX codes."""
    (candidate,) = discover(nn.ModuleDict({"mlp": mlp}))
    assert candidate.roles is not None, candidate.reason
    gate, up, down = (mlp.get_submodule(name) for name in candidate.roles.linears)
    weights = torch.cat([gate.weight, up.weight]), down.weight
    stored = [tensor for weight in weights for tensor in store(weight.detach(), "natural", "compact")]
    tensors = dict(zip(QuantizedSwiGLUMLP.tensor_names(), stored, strict=True))
    tensors |= {name: mlp.get_parameter(name).detach().clone() for name in candidate.roles.biases}
    layouts = dict.fromkeys(("gate_up_proj", "down_proj"), MXLayout())
    config = NeuronMoEConfig(precision="mxfp8", backend="torch")
    block = QuantizedSwiGLUMLP(mlp, "mlp", config, layouts, tensors, candidate.roles).eval()
    block.settle()
    return block


def test_blocks_of_other_sizes_compile_one_after_another() -> None:
    """A compiler makes symbols of sizes that change."""
    torch.compiler.reset()
    for hidden in (128, 256):
        block = quantized(LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=256)).bfloat16())
        x = torch.randn(2, 3, hidden).bfloat16()
        with torch.no_grad():
            assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x), block(x))


class RemoteMLP(LlamaMLP):
    """Has more arguments, some of which decide, as does an attribute; counts dimensions; a dropout of 0."""

    limit = 7.0

    def __init__(self) -> None:
        super().__init__(LlamaConfig(hidden_size=128, intermediate_size=256))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, scale: Any = None, unused: Any = None) -> Tensor:
        batch, length, hidden = x.shape
        rows = x.view(batch * length, hidden)
        if scale is not None:
            rows = rows * scale
        gate = self.gate_proj(rows).clamp(max=self.limit)
        return self.down_proj(self.drop(self.act_fn(gate) * self.up_proj(rows))).view(batch, length, hidden)


def test_codes_check_what_a_patched_block_checks() -> None:
    torch.manual_seed(3)
    mlp = RemoteMLP().bfloat16().eval()
    block, model, x = quantized(mlp), nn.ModuleDict({"mlp": mlp}), torch.randn(2, 3, 128).bfloat16()
    patch_model(model, {"precision": "mxfp8"})
    with torch.no_grad():
        assert torch.equal(block(x, None, unused=1), model["mlp"](x, None, unused=1))
    for each in (block, model["mlp"]):
        with refused(UnsupportedModelError, "scale", got="2", where="mlp"):
            each(x, 2)
        with refused(ShapeError, "hidden_states", got="2", where="mlp"):
            each(x[0])
        each.drop.p = 0.5
        with refused(UnsupportedModelError, "drop", where="mlp"):
            each.train()(x)
        each.drop.p = 0.0
        each.limit = 1.0
        with refused(UnsupportedModelError, "limit", got="1.0", where="mlp"):
            each(x)


@pytest.mark.parametrize("biased", [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "down_proj")])
def test_biases_of_some_layers(biased: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    mlp = LlamaMLP(LlamaConfig(hidden_size=128, intermediate_size=256, mlp_bias=True)).bfloat16().eval()
    for name in ("gate_proj", "up_proj", "down_proj"):
        nn.init.normal_(mlp.get_submodule(name).bias, std=0.5)
        mlp.get_submodule(name).bias = mlp.get_submodule(name).bias if name in biased else None
    block = quantized(mlp)
    assert block.neuron_roles.biased == biased
    model, x = nn.ModuleDict({"mlp": mlp}), torch.randn(9, 128).bfloat16()
    patch_model(model, {"precision": "mxfp8"})
    with torch.no_grad():
        assert torch.equal(block(x), model["mlp"](x))
        for name in biased:
            block.get_buffer(f"{name}.bias").zero_()
        assert not torch.equal(block(x), model["mlp"](x))
