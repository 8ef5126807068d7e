"""Experts that are dealt out to ranks, each with files of its own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_neuron_moe.convert import (
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
    read_manifest,
)
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.errors import ConversionError
from tests.refusals import refused

TARGETS = {
    "bf16": {"precision": "bf16"},
    "codes": {"precision": "mxfp8"},
    "words": {"precision": "mxfp8", "purpose": "inference", "pad": True},
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("family", "first_product"), [("qwen2_moe", "gate_up_proj"), ("nemotron_h", "up_proj")])
def test_ranks_have_ranges_of_what_a_whole_conversion_has(
    family, first_product, target, checkpoint, snapshot, tmp_path
):
    source, options = checkpoint(family), TARGETS[target]
    convert_checkpoint(source, tmp_path / "whole", ConvertOptions(**options))
    convert_checkpoint(source, tmp_path / "parts", ConvertOptions(**options, ep_degree=2, tp_degree=2))
    whole = {
        name: value for path in (tmp_path / "whole").glob("*.safetensors") for name, value in load_file(path).items()
    }
    experts = {tensor.name for tensor in read_manifest(tmp_path / "whole").tensors if ".experts." in tensor.weight}
    dealt = [tensor for tensor in read_manifest(tmp_path / "parts").tensors if tensor.ep_rank is not None]
    assert {tensor.name.rpartition(".")[0] for tensor in dealt} == experts
    for tensor in dealt:
        name, _, end = tensor.name.rpartition(".")
        path = tmp_path / "parts" / tensor.file
        assert (end, tensor.tp_rank) == (f"ep{tensor.ep_rank}", None)
        assert path.name.startswith(f"neuron-ep-0{tensor.ep_rank}-of-02-")
        stored, first = load_file(path)[tensor.name], tensor.first_expert
        assert first == tensor.ep_rank * len(stored) and len(stored) * 2 == len(whole[name])
        assert torch.equal(stored, whole[name][first : first + len(stored)])
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["hf_neuron_moe.tensors"])[tensor.name]
        assert (facts["ep_rank"], facts["first_expert"], facts["tp_rank"]) == (tensor.ep_rank, first, None)
    others = {tensor.name for tensor in read_manifest(tmp_path / "parts").tensors if tensor.tp_rank is not None}
    assert bool(others) is (family == "qwen2_moe") and all("shared_expert." in name for name in others)
    assert not verify_checkpoint(tmp_path / "parts", source, probes=0).findings
    report = inspect_checkpoint(tmp_path / "parts", source).to_text()
    assert f"experts.{first_product}.ep*" in report
    export_checkpoint(tmp_path / "parts", tmp_path / "back", allow_inexact=True)
    export_checkpoint(tmp_path / "whole", tmp_path / "same", allow_inexact=True)
    assert snapshot(tmp_path / "back") == snapshot(tmp_path / "same")


def test_one_file_of_a_rank_that_is_exchanged_is_found(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", ConvertOptions(ep_degree=2))
    first, second = sorted((tmp_path / "dst").glob("neuron-ep-*"))
    first.write_bytes(second.read_bytes())
    assert verify_checkpoint(tmp_path / "dst").findings


def test_experts_that_cannot_be_dealt_out(checkpoint, tmp_path):
    with refused(ConversionError, "number of experts of model.layers.0.mlp.experts.gate_up_proj", "--ep-degree"):
        convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", ConvertOptions(ep_degree=7))
    with refused(ConversionError, "ep_degree", "Leave --ep-degree out", got="2"):
        convert_checkpoint(checkpoint("llama"), tmp_path / "dst", ConvertOptions(ep_degree=2))
    assert not (tmp_path / "dst").exists()
