"""What cannot be loaded is refused with the reason and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_neuron_moe.convert.manifest import INDEX_OUT
from hf_neuron_moe.errors import ConfigError, ConversionError, SourceDamageError, UnsupportedModelError
from hf_neuron_moe.quantizers import NeuronMoEQuantizationConfig, NeuronMoEQuantizer
from tests.quantizers.conftest import Converted, Source, load
from tests.refusals import refused


@pytest.fixture
def copied(converted: Converted, tmp_path: Path) -> Any:
    """Return a function that gives a conversion that may be damaged."""

    def make(family: str = "mixtral", **options: Any) -> Path:
        shutil.copytree(converted(family, **options), tmp_path / "copy")
        return tmp_path / "copy"

    return make


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors and metadata of the only shard."""
    (shard,) = folder.glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(shard)
    change(tensors, metadata)
    save_file(tensors, shard, metadata)


def config_change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for name, value in changes.items():
        target = content if name in content else content["quantization_config"]
        target[name] = value
    path.write_text(json.dumps(content))


def test_parts_of_ranks(converted: Converted, copied: Any) -> None:
    folder = copied(precision="mxfp8", tp_degree=2)
    for degree in (2, 1):  # what the shards say counts
        config_change(folder, tp_degree=degree)
        with refused(UnsupportedModelError, "tp_degree", "without --tp-degree", got="2"):
            load(folder)


def test_shards_that_do_not_say_how_they_are_stored(copied: Any) -> None:
    folder = copied(precision="mxfp8")
    rewrite(folder, lambda tensors, metadata: metadata.clear())
    with refused(ConversionError, folder / "neuron-00001-of-00001.safetensors", "convert the original again"):
        load(folder)


def test_a_layout_of_the_future(copied: Any) -> None:
    folder = copied(precision="mxfp8")

    def change(tensors: Any, metadata: dict[str, str]) -> None:
        for key in ("hf_neuron_moe.tensors", "hf_neuron_moe.layouts"):
            metadata[key] = metadata[key].replace("mxfp8_swizzled_codes", "mxfp9_codes")

    rewrite(folder, change)
    with refused(
        ConversionError, "layout of model.layers.0.mlp.experts.gate_up_proj", "a later version", got="'mxfp9_codes'"
    ):
        load(folder)


def test_scales_that_are_missing(copied: Any) -> None:
    folder = copied(precision="mxfp8")
    name = "model.layers.1.mlp.experts.down_proj_scale"
    rewrite(folder, lambda tensors, metadata: tensors.pop(name))
    with refused(SourceDamageError, f"tensor {name}", r"neuron\.safetensors\.index\.json"):
        load(folder)
    index = folder / "neuron.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with refused(ConversionError, "converted weights of model.layers.1.mlp.experts"):
        load(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("layout", ["fused", "kernel"])
@pytest.mark.parametrize(
    ("family", "changes", "argument", "got"),
    [
        (
            "mixtral",
            {"intermediate_size": 512},
            "tensor model.layers.0.mlp.experts.gate_up_proj",
            "4 experts of hidden size 128 and intermediate size 256",
        ),
        (
            "mixtral",
            {"num_local_experts": 8},
            "tensor model.layers.0.mlp.experts.gate_up_proj",
            "4 experts of hidden size 128 and intermediate size 256",
        ),
        (
            "llama",
            {"intermediate_size": 128},
            "tensor model.layers.0.mlp.gate_up_proj.weight",
            "hidden size 128 and intermediate size 256",
        ),
    ],
)
def test_a_configuration_of_other_sizes(
    copied: Any, precision: str, layout: str, family: str, changes: dict[str, int], argument: str, got: str
) -> None:
    folder = copied(family, precision=precision, layout=layout)
    config_change(folder, **changes)
    with refused(ConversionError, argument, got=got):
        load(folder)


def test_a_tensor_without_values(copied: Any) -> None:
    folder, name = copied(precision="bf16"), "model.layers.1.mlp.experts.down_proj"
    rewrite(folder, lambda tensors, metadata: tensors.update({name: tensors[name][:0].clone()}))
    with refused(SourceDamageError, f"tensor {name}", got=r"shape [0, "):
        load(folder)


def test_a_configuration_with_fewer_layers(copied: Any) -> None:
    folder = copied(precision="mxfp8")
    config_change(folder, num_hidden_layers=1)
    with refused(ConversionError, "tensor model.layers.1.mlp.experts.down_proj", got="no such module"):
        load(folder)


@pytest.mark.parametrize(
    ("precision", "other"), [("bf16", "disk"), ("mxfp8", "disk"), ("bf16", "meta")], ids=["bf16", "mxfp8", "two"]
)
def test_places_that_blocks_cannot_be_in(converted: Converted, tmp_path: Path, precision: str, other: str) -> None:
    places = {"": "cpu", "model.layers.1": other}
    with refused(UnsupportedModelError, "device_map", got=f"cpu, {other}"):
        load(converted("mixtral", precision=precision), device_map=places, offload_folder=str(tmp_path))


def test_frozen_blocks_may_be_on_several_devices() -> None:
    places = {"model.layers.0": 0, "model.layers.1": 1}
    assert NeuronMoEQuantizer(NeuronMoEQuantizationConfig("mxfp8")).update_device_map(places) is places
    with refused(UnsupportedModelError, "device_map", got="0, 1"):
        NeuronMoEQuantizer(NeuronMoEQuantizationConfig("bf16")).update_device_map(places)


def test_bf16_blocks_that_accelerate_spread_over_devices(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    """``device_map="auto"`` is settled after the look at what was asked for."""
    monkeypatch.setattr(PreTrainedModel, "hf_device_map", {"model": 0, "lm_head": 0}, raising=False)
    assert load(converted("mixtral", precision="bf16")).training is False
    monkeypatch.setattr(PreTrainedModel, "hf_device_map", {"model": 0, "lm_head": 1})
    with refused(UnsupportedModelError, "device_map", got="0, 1"):
        load(converted("mixtral", precision="bf16"))


def test_quantizing_while_loading(source: Source) -> None:
    with refused(UnsupportedModelError, "quantization_config", "hf-neuron-moe convert SRC DST"):
        load(source("llama"), quantization_config=NeuronMoEQuantizationConfig())


def test_a_misspelt_precision_and_another_method() -> None:
    with refused(ConfigError, "precision", "Did you mean 'mxfp8'"):
        NeuronMoEQuantizationConfig(precision="mxfp88")
    with refused(ConfigError, "quant_method"):
        NeuronMoEQuantizationConfig(quant_method="mxfp8")


def test_an_index_without_metadata_is_damage(copied: Any) -> None:
    folder = copied()
    content = json.loads((folder / INDEX_OUT).read_text())
    del content["metadata"]
    (folder / INDEX_OUT).write_text(json.dumps(content))
    with refused(SourceDamageError, f"{INDEX_OUT}: metadata", got="none"):
        load(folder)


def test_options_that_would_hide_a_method_are_refused() -> None:
    with refused(ConfigError, "to_dict", "an option of a conversion"):
        NeuronMoEQuantizationConfig(to_dict="fused")


def test_the_configuration_keeps_what_it_was_given() -> None:
    given = {"quant_method": "neuron_moe", "precision": "mxfp8", "layout": "kernel", "tp_degree": 1, "purpose": "lora"}
    assert NeuronMoEQuantizationConfig.from_dict(given).to_dict() == given
