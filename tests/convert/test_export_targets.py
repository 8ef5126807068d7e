"""The way back from every target: the source's own files from bf16, the kernels' values from MX, and a plain word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.compare import MX_FLOORS_DB, Comparison, sqnr_db
from hf_neuron_moe.convert.export import NOTE_FILE
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.layout.orientations import SOURCE
from hf_neuron_moe.errors import ConversionError
from tests.refusals import refused

BF16 = {
    "fused": ConvertOptions("bf16", "fused"),
    "kernel": ConvertOptions("bf16", "kernel"),
    "many shards": ConvertOptions("bf16", "kernel", 30_000),
    "ranks": ConvertOptions("bf16", "kernel", tp_degree=2),
    "padded": ConvertOptions("bf16", "kernel", pad=True),
    "padded ranks": ConvertOptions("bf16", "kernel", pad=True, tp_degree=3),
    "for inference": ConvertOptions("bf16", "kernel", purpose="inference"),
}
MX = {
    "mxfp8 fused": ConvertOptions("mxfp8", "fused", purpose="inference"),
    "mxfp8": ConvertOptions("mxfp8", "kernel", pad=True, tp_degree=2),
    "mxfp8 oversized": ConvertOptions("mxfp8", "kernel", scales="oversized", scale_rule="rceil"),
    "mxfp8 words": ConvertOptions("mxfp8", "kernel", purpose="inference", pad=True),
    "mxfp4 words": ConvertOptions("mxfp4", "kernel", pad=True, tp_degree=2),
}
FAMILIES = ("llama", "llama_tied", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.sampled(4)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("target", BF16)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_gives_the_source_back_file_by_file(family, target, checkpoint, snapshot, tmp_path):
    source = checkpoint(family)
    (source / "README.md").write_bytes(b"# A card\r\nwithout a last newline")
    before = snapshot(source)
    convert_checkpoint(source, tmp_path / "dst", BF16[target])
    report = export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert (report.inexact, report.statement) == ((), ())
    assert snapshot(tmp_path / "back") == before


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_swizzled_bf16_gives_the_source_back(family, checkpoint, snapshot, tmp_path):
    source = checkpoint(family)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel", swizzle=True))
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", MX)
def test_mx_gives_back_what_an_independent_reading_finds(target, checkpoint, tmp_path):
    source, options = checkpoint("qwen2_moe"), MX[target]
    convert_checkpoint(source, tmp_path / "dst", options)
    steps: list[tuple[int, int]] = []
    report = export_checkpoint(
        tmp_path / "dst",
        tmp_path / "back",
        allow_inexact=True,
        progress=lambda done, total: steps.append((done, total)),
    )
    original, back = load(source), load(tmp_path / "back")
    assert original.keys() == back.keys()
    assert {name for name in original if not torch.equal(original[name], back[name])} == set(report.inexact)
    assert steps[-1][0] == steps[-1][1] == sum(tensor.nbytes for tensor in back.values())
    for name in report.inexact:
        assert sqnr_db(original[name], back[name]) >= MX_FLOORS_DB[options.precision][options.rule]
    manifest = read_manifest(tmp_path / "dst")
    with open_tensors(tmp_path / "back") as exported, open_tensors(tmp_path / "dst") as stored:
        wanted = Comparison(manifest, exported, stored)
        names = dict.fromkeys(tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE)
        for weight in names:
            for expert in wanted.experts_of(weight):
                pairs = wanted.pairs(weight, expert, wanted.original(weight, expert))
                for pair in (pair for pair in pairs if pair.tensor.orientation == "forward"):
                    assert torch.equal(pair.wanted, pair.held.to(pair.wanted.dtype)), pair.tensor.name


def test_what_cannot_come_back_is_said(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("qwen2_moe"), tmp_path / "dst", ConvertOptions("mxfp4", "kernel", pad=True))
    with refused(ConversionError, tmp_path / "dst", got="24 tensors"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    report = export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=True)
    # The shared experts stay bf16 beside MXFP4 experts: only those are named.
    assert all(".experts." in name for name in report.inexact) and len(report.inexact) == 24
    (sentence,) = report.statement
    assert sentence.startswith("24 tensors (first: model.layers.0.mlp.experts.0.") and "MXFP4 (e2m1 codes)" in sentence
    assert "scale rule floor" in sentence and "keep the original checkpoint" in sentence
    note = json.loads((tmp_path / "back" / NOTE_FILE).read_text())
    assert (note["statement"], note["inexact"]) == (list(report.statement), list(report.inexact))
    assert report.to_dict() == {"tensors": report.tensors, "inexact_tensors": 24, "statement": [sentence]}


def test_what_the_index_says_comes_back(checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral", shard="100KB")
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"] |= {"total_parameters": 12345, "note": {"of": ["the", None, "maker"]}}
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    convert_checkpoint(source, tmp_path / "dst", BF16["kernel"])
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)
    del content["metadata"]
    index.write_text(json.dumps(content))
    convert_checkpoint(source, tmp_path / "bare", BF16["kernel"])
    export_checkpoint(tmp_path / "bare", tmp_path / "sized")
    metadata = json.loads((tmp_path / "sized" / index.name).read_text())["metadata"]
    assert metadata == {"total_size": sum(tensor.nbytes for tensor in load(source).values())}
