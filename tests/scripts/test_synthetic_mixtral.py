"""Synthetic checkpoints are ones that transformers loads and conversions take."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.io.source import read_header
from scripts.make_synthetic_mixtral import make_checkpoint


def test_size_and_loading(tmp_path):
    sizes = {"hidden": 128, "intermediate": 64, "experts": 4, "shard": 1_000_000}
    small, large = (make_checkpoint(tmp_path / str(nbytes), nbytes, **sizes) for nbytes in (5_000_000, 7_000_000))
    assert abs(small - 5e6) < 4e5 and abs(large - 7e6) < 4e5
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "5000000", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert sum(parameter.nbytes for parameter in model.parameters()) == small
    shards = [read_header(path)[0] for path in (tmp_path / "5000000").glob("*.safetensors")]
    assert len(shards) > 1
    # A shard is within the limit, unless one tensor alone is larger.
    assert all(len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= 1_000_000 for shard in shards)


def test_conversion_and_back(tmp_path):
    make_checkpoint(tmp_path / "source", 5_000_000, hidden=128, intermediate=64, experts=4, shard=2_000_000)
    convert_checkpoint(tmp_path / "source", tmp_path / "dst", ConvertOptions("bf16", "kernel"), workers=2)
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    for path in (tmp_path / "source").glob("*.safetensors"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
