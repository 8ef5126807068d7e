"""Checkpoints as ``optimum-cli neuron consolidate`` writes them (optimum-neuron 0.4.5, read from its source).

It undoes its fused and sharded layers, so the names and shapes are transformers' own. It writes weights only: beside
``config.json`` where the training checkpoint is (with ``trn_config.json`` and ``shards/``), or alone into another
folder. Its one file name for all shards loses tensors above 5 GB, which must not pass unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteConfig

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.errors import ConversionError
from tests.refusals import refused
from tests.tiny_models import VOCAB, tiny_config, tokens


def consolidated(family: str, folder: Path, max_shard_size: int = 5 * 10**9) -> torch.nn.Module:
    """Write a checkpoint of that form and return the model with its values."""
    torch.manual_seed(7)
    if family == "granite":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = GraniteConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB)
    else:
        config = tiny_config(family, intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir()
    # transformers 4.57 writes the rope parameters at the top level, and no rope_parameters.
    content = config.to_dict()
    rope = content.pop("rope_parameters", None) or {}
    content |= {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
        "transformers_version": "4.57.6",
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "trn_config.json").write_text('{"tensor_parallel_size": 2, "fuse_qkv": true}', encoding="utf-8")
    shards = folder / "shards" / "model"
    shards.mkdir(parents=True)
    (shards / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(b"what one rank saved")
    (folder / "shards" / "mp_metadata_pp_rank_0.json").write_text("{}", encoding="utf-8")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: state[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_a_consolidated_checkpoint_converts_loads_and_comes_back(family: str, tmp_path: Path) -> None:
    """The three families that optimum-neuron trains."""
    source = tmp_path / "consolidated"
    original = consolidated(family, source)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert torch.equal(logits(stock), logits(original))
    report = patch_model(stock, {"precision": "bf16"})
    assert len(report.patched) == 2 and not report.refused
    patched = logits(stock)
    unpatch_model(stock)
    convert_checkpoint(source, tmp_path / "bf16", ConvertOptions(precision="bf16"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")), patched)
    assert verify_checkpoint(tmp_path / "bf16", source).ok
    export_checkpoint(tmp_path / "bf16", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    convert_checkpoint(source, tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    assert verify_checkpoint(tmp_path / "mx", source).ok
    assert not (tmp_path / "mx" / "shards").exists(), "the ranks' own files are no part of the model"


def test_weights_alone_need_their_configuration(tmp_path: Path) -> None:
    """What ``consolidate CHECKPOINT OUTPUT`` leaves in OUTPUT."""
    source = tmp_path / "consolidated"
    consolidated("llama", source)
    config = (source / "config.json").read_bytes()
    alone = tmp_path / "alone"
    alone.mkdir()
    (source / "model.safetensors").rename(alone / "model.safetensors")
    with refused(ConversionError, alone, got="a folder without it"):
        convert_checkpoint(alone, tmp_path / "out", ConvertOptions(precision="bf16"))
    (alone / "config.json").write_bytes(config)
    convert_checkpoint(alone, tmp_path / "out", ConvertOptions(precision="bf16"))
    assert verify_checkpoint(tmp_path / "out", alone).ok


def test_tensors_lost_while_consolidating_are_missed(tmp_path: Path) -> None:
    """All shards have one file name there, so only the last one is left; transformers would make up the rest."""
    source = tmp_path / "consolidated"
    model = consolidated("llama", source, max_shard_size=20_000)
    kept = load_file(source / "model.safetensors")
    assert 0 < len(kept) < len(model.state_dict())
    with pytest.raises(ConversionError) as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(precision="bf16"))
    assert caught.value.argument.removeprefix("parameter ") in model.state_dict().keys() - kept.keys()
    assert not (tmp_path / "out").exists()
