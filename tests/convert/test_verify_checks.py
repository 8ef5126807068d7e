"""verify passes what is right, and names what is not: damaged bytes, gaps, wrong layouts, another source."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from hf_neuron_moe.convert import MANIFEST_FILE, ConvertOptions, convert_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.audit.verify import VerifyReport, verify_checkpoint
from hf_neuron_moe.convert.io.source import read_header
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.manifest import sealed
from hf_neuron_moe.errors import ConversionError, SourceDamageError
from tests.refusals import refused
from tests.unsynced import rewrite

TARGETS = {
    "bf16 fused": ConvertOptions("bf16", "fused"),
    "bf16 kernel": ConvertOptions("bf16", "kernel", 60_000),
    "bf16 tp": ConvertOptions("bf16", "kernel", tp_degree=2),
    "bf16 padded": ConvertOptions("bf16", "kernel", pad=True, tp_degree=2),
    "mxfp8 fused": ConvertOptions("mxfp8", "fused", purpose="inference"),
    "mxfp8 training": ConvertOptions("mxfp8", "kernel"),
    "mxfp8 oversized": ConvertOptions("mxfp8", "kernel", scales="oversized", scale_rule="rceil"),
    "mxfp8 words": ConvertOptions("mxfp8", "kernel", purpose="inference", pad=True),
    "mxfp8 words, floor": ConvertOptions("mxfp8", "kernel", purpose="inference", pad=True, scale_rule="floor"),
    "mxfp4 words": ConvertOptions("mxfp4", "kernel", pad=True),
}


def checks_of(report: VerifyReport) -> set[str]:
    """Names of the checks that found something."""
    return {finding.check for finding in report.findings}


def patch_bytes(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a stored tensor's bytes and every checksum of them: a conversion that was wrong from the start."""
    manifest_path = folder / MANIFEST_FILE
    manifest = json.loads(manifest_path.read_text())
    (entry,) = [tensor for tensor in manifest["tensors"] if tensor["name"] == name]
    path = folder / entry["file"]
    tensor = read_header(path)[0][name]
    content = bytearray(path.read_bytes())
    span = slice(tensor.start, tensor.start + tensor.nbytes)
    width = tensor.nbytes // torch.Size(tensor.shape).numel()
    raw = torch.frombuffer(content[span], dtype=torch.uint8).view(*tensor.shape, width)
    content[span] = change(raw).contiguous().numpy().tobytes()
    path.write_bytes(content)
    entry["checksum"] = "xxh3_128:" + xxhash.xxh3_128_hexdigest(content[span])
    manifest["file_sha256"][entry["file"]] = hashlib.sha256(content).hexdigest()
    manifest_path.write_text(json.dumps(sealed(manifest)))


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_every_target_passes(family, target, checkpoint, tmp_path):
    source, options = checkpoint(family), TARGETS[target]
    convert_checkpoint(source, tmp_path / "dst", options)
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok, str(report)
    assert set(report.done) == {"manifest", "files", "coverage", "finite", "source", "probe"}
    # Every expert of two layers; qwen2_moe has a shared one in each.
    assert len(report.probes) == (2 * (4 + 1) if family == "qwen2_moe" else 2 * 12)
    values = [tensor for tensor in read_manifest(tmp_path / "dst").tensors if tensor.layout != "source"]
    assert {name for probe in report.probes for name in probe.weights} == {
        tensor.name for tensor in values if not tensor.layout.endswith("_scales")
    }
    for probe in report.probes:
        quantized = options.quantized and (probe.expert is not None or options.precision == "mxfp8")
        assert all(value == float("inf") for value in probe.weights.values()) != quantized
        assert probe.output > probe.output_floor
    without = verify_checkpoint(tmp_path / "dst")
    assert without.ok and set(without.skipped) == {"source", "probe"}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_dense_targets_pass(family, checkpoint, tmp_path):
    source = checkpoint(family)
    for number, options in enumerate(
        [ConvertOptions("bf16", "kernel", swizzle=True), ConvertOptions("mxfp8", "kernel", pad=True, tp_degree=3)]
    ):
        convert_checkpoint(source, tmp_path / str(number), options)
        report = verify_checkpoint(tmp_path / str(number), source, probes=0)
        assert report.ok and len(report.probes) == 2, str(report)


def swap_halves(raw: torch.Tensor) -> torch.Tensor:
    """Exchange gate and up of ``[E, 2I, H]``."""
    return torch.cat(raw.chunk(2, dim=1)[::-1], dim=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("target", "tensor", "change"),
    [
        ("bf16 fused", "gate_up_proj", swap_halves),
        ("bf16 fused", "down_proj", lambda raw: raw.roll(1, dims=0)),  # every expert has its neighbour's matrix
        ("bf16 fused", "gate_up_proj", lambda raw: raw[[0, 1, 2, 3, 4, 7, 6, 5, 8, 9, 10, 11]]),  # only two of twelve
        ("bf16 kernel", "down_proj", lambda raw: raw.flip(1)),
        ("bf16 tp", "gate_up_proj.tp1", lambda raw: raw.roll(1, dims=2)),
        ("bf16 padded", "down_proj.tp0", lambda raw: raw.index_fill(1, torch.tensor([63]), 0x3F)),  # in the padding
        ("mxfp8 fused", "gate_up_proj", swap_halves),
        ("mxfp8 training", "gate_up_proj", lambda raw: raw.roll(1, dims=1)),  # a row of words further
        ("mxfp8 training", "down_proj_T", lambda raw: raw.roll(4, dims=2)),  # only the backward operand
        ("mxfp8 training", "gate_up_proj_scale", lambda raw: raw.roll(1, dims=2)),
        ("mxfp8 oversized", "down_proj_T_scale", lambda raw: raw.roll(1, dims=1)),
        ("mxfp8 words", "gate_up_proj", lambda raw: raw.flip(2)),  # gate and up exchanged
        ("mxfp8 words", "down_proj", lambda raw: raw.flip(-1)),  # lanes in the wrong order
        ("mxfp4 words", "gate_up_proj", lambda raw: raw.flip(-1)),
        ("mxfp4 words", "down_proj_scale", lambda raw: raw.roll(1, dims=1)),
    ],
)
def test_values_in_the_wrong_place_are_found_by_the_probe_alone(target, tensor, change, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", TARGETS[target])
    name = f"model.layers.1.mlp.experts.{tensor}"
    patch_bytes(tmp_path / "dst", name, change)
    assert verify_checkpoint(tmp_path / "dst").ok, "checksums agree: without the source nothing can be seen"
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert checks_of(report) == {"probe"}
    assert {finding.subject for finding in report.findings} == {"model.layers.1.mlp.experts"}
    assert any(name.removesuffix("_scale") in finding.message for finding in report.findings), str(report)


def flip_bits(folder: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """Flip single bits of the shards, one at a time, and return those that verify did not find."""
    chooser = random.Random(seed)
    shards = sorted(folder.glob("*.safetensors"))
    missed = []
    for _ in range(count):
        path = chooser.choice(shards)
        content = bytearray(path.read_bytes())
        # Every fourth one in the header, which is a small part of a file.
        limit = len(content) if chooser.randrange(4) else 8 + int.from_bytes(content[:8], "little")
        place, bit = chooser.randrange(limit), 1 << chooser.randrange(8)
        content[place] ^= bit
        rewrite(path, content)
        report = verify_checkpoint(folder)
        if "files" not in checks_of(report) or not any(path.name in finding.subject for finding in report.findings):
            missed.append((path.name, place, bit))
        content[place] ^= bit
        rewrite(path, content)
    return missed


def test_flipped_bits_are_found(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", ConvertOptions("mxfp8", "kernel", 60_000))
    assert flip_bits(tmp_path / "dst", 60, seed=1) == []
    assert verify_checkpoint(tmp_path / "dst").ok


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_flipped_bits_are_found(part, checkpoint, tmp_path):
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", ConvertOptions("mxfp8", "kernel", 100_000))
    assert flip_bits(tmp_path / "dst", 250, seed=2 + part) == []
    assert verify_checkpoint(tmp_path / "dst").ok


def test_damaged_tensors_are_named(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    tensor = read_header(shard)[0]["model.norm.weight"]
    content = bytearray(shard.read_bytes())
    content[tensor.start] ^= 1
    shard.write_bytes(content)
    (finding,) = verify_checkpoint(tmp_path / "dst").findings
    assert finding.subject == f"{shard.name}: model.norm.weight"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("damage", "check", "shown"),
    [
        ("missing shard", "files", "missing"),
        ("stray shard", "files", "not part of the conversion"),
        ("cut off", "files", "as the header says"),
        ("index", "coverage", "another file for"),
        ("no index", "coverage", "missing"),
        ("config", "coverage", "quantization_config"),
        ("tokenizer", "files", "not those that were written"),
        ("manifest", "manifest", "format version"),
        ("altered manifest", "manifest", "not what was written"),
        ("gap", "coverage", "have no source"),
        ("lost source", "coverage", "does not say what it was made of"),
        ("header metadata", "coverage", "metadata hf_neuron_moe.layouts differs"),
    ],
)
def test_damage_is_told_by_its_kind(damage, check, shown, checkpoint, tmp_path):
    folder = tmp_path / "dst"
    convert_checkpoint(checkpoint("mixtral"), folder, ConvertOptions("bf16", "kernel", 100_000))
    shards = sorted(folder.glob("*.safetensors"))
    manifest_path, index = folder / MANIFEST_FILE, folder / "neuron.safetensors.index.json"
    manifest = json.loads(manifest_path.read_text())
    weight = "model.layers.0.mlp.experts.gate_up_proj"
    match damage:
        case "missing shard":
            shards[1].unlink()
        case "stray shard":
            shutil.copy(shards[0], folder / "model.safetensors")
        case "cut off":
            shards[0].write_bytes(shards[0].read_bytes()[:-1])
        case "index":
            content = json.loads(index.read_text())
            content["weight_map"][weight] = "neuron-00099-of-00099.safetensors"
            index.write_text(json.dumps(content))
        case "no index":
            index.unlink()
        case "config":
            text = (folder / "config.json").read_text()
            assert '"layout": "kernel"' in text
            (folder / "config.json").write_text(text.replace('"layout": "kernel"', '"layout": "fused"'))
        case "tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "manifest":
            manifest_path.write_text(json.dumps({**manifest, "format_version": 99}))
        case "altered manifest":
            text = manifest_path.read_text()
            assert "experts.0.w1.weight" in text
            manifest_path.write_text(text.replace("experts.0.w1.weight", "experts.0.w1.weighp"))
        case "gap":
            manifest["weights"][weight].pop(3)
            manifest_path.write_text(json.dumps(sealed(manifest)))
        case "lost source":
            manifest["weights"].pop(weight)
            manifest_path.write_text(json.dumps(sealed(manifest)))
        case "header metadata":
            (entry,) = [tensor for tensor in manifest["tensors"] if tensor["name"] == weight]
            path = folder / entry["file"]
            old, new = b'\\"bf16_kernel\\"', b'\\"bf16_colonl\\"'
            content = path.read_bytes()
            assert content.count(old) >= 2
            path.write_bytes(content.replace(old, new, 1))
            manifest["file_sha256"][entry["file"]] = hashlib.sha256(path.read_bytes()).hexdigest()
            manifest_path.write_text(json.dumps(sealed(manifest)))
    report = verify_checkpoint(folder)
    assert not report.ok
    assert any(finding.check == check and shown in finding.message for finding in report.findings), str(report)


def test_nonfinite_values_fail_unless_they_were_to_be_kept(checkpoint, tmp_path):
    source = checkpoint("llama")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    tensors["model.norm.weight"][:2] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    for precision, counts in (("bf16", {"down_proj": 1, "norm": 2}), ("mxfp8", {"down_proj": 1, "norm": 2})):
        folder = tmp_path / precision
        convert_checkpoint(source, folder, ConvertOptions(precision, "fused", purpose="inference"), on_nonfinite="keep")
        report = verify_checkpoint(folder, source)
        found = {f.subject.split(".")[-2]: f.message for f in report.findings if f.check == "finite"}
        assert found == {name: f"{count} NaN or infinite values" for name, count in counts.items()}
        kept = verify_checkpoint(folder, on_nonfinite="keep")
        assert kept.ok and len(kept.notes) == 2


def test_another_source_is_not_taken_for_the_one_that_was_converted(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "kernel"))
    path = source / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    report = verify_checkpoint(tmp_path / "dst", source)
    assert checks_of(report) == {"source"} and "probe" in report.skipped
    path.unlink()
    shutil.copy(checkpoint("phi3") / "model.safetensors", path)
    assert "source model.safetensors" in {
        finding.subject for finding in verify_checkpoint(tmp_path / "dst", source).findings
    }


def test_version_2_is_checked_by_its_files_and_tensors(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", ConvertOptions("mxfp8", "kernel"))
    path = tmp_path / "dst" / MANIFEST_FILE
    content = with_sha256(tmp_path / "dst", json.loads(path.read_text()))
    path.write_text(json.dumps(sealed({**content, "format_version": 2})))
    assert verify_checkpoint(tmp_path / "dst").ok
    name = content["tensors"][-1]["name"]
    shard = tmp_path / "dst" / content["tensors"][-1]["file"]
    damaged = bytearray(shard.read_bytes())
    damaged[read_header(shard)[0][name].start] ^= 1
    shard.write_bytes(damaged)
    report = verify_checkpoint(tmp_path / "dst")
    assert f"{shard.name}: {name}" in {finding.subject for finding in report.findings}


def test_a_checksum_of_an_unknown_kind_is_damage(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["tensors"][0]["checksum"] = "md5:0"
    path.write_text(json.dumps(sealed(content)))
    with refused(SourceDamageError, path, "md5"):
        read_manifest(tmp_path / "dst")


def with_sha256(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Give tensors the checksums that the format versions before 3 had."""
    for tensor in content["tensors"]:
        del tensor["checksum"]
        with open_tensors(folder) as reader:
            data = b"".join(part.numpy().tobytes() for part in reader.chunks(tensor["file"], tensor["name"]))
        tensor["sha256"] = hashlib.sha256(data).hexdigest()
    return content


def test_version_1_is_checked_by_its_tensors(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", ConvertOptions("mxfp8", "fused", purpose="inference"))
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    for name in ("source_sha256", "file_sha256", "replaced_files", "sha256"):
        content.pop(name)
    with_sha256(tmp_path / "dst", content)
    for tensor in content["tensors"]:
        for name in ("scale_layout", "orientation", "tp_rank", "padding"):
            tensor.pop(name)
    content["options"] = {key: content["options"][key] for key in ("precision", "layout", "max_shard_bytes")}
    path.write_text(json.dumps({**content, "format_version": 1}))
    assert verify_checkpoint(tmp_path / "dst").ok
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert checks_of(verify_checkpoint(tmp_path / "dst")) == {"files"}


def test_what_is_no_conversion_is_refused(checkpoint, tmp_path):
    source = checkpoint("llama")
    with refused(ConversionError, source, got="an ordinary checkpoint", where="verify"):
        verify_checkpoint(source)
    convert_checkpoint(source, tmp_path / "dst")
    with refused(ConversionError, tmp_path, got="a folder without it", where="verify"):
        verify_checkpoint(tmp_path / "dst", tmp_path)


def test_probes_are_chosen_by_the_seed(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "kernel"))
    reports = [
        verify_checkpoint(tmp_path / "dst", source, probes=1, seed=seed).to_dict() for seed in (1, 1, 2, 3, 4, 5)
    ]
    assert reports[0] == reports[1]
    assert len({(report["probes"][0]["layer"], report["probes"][0]["expert"]) for report in reports}) > 2
    assert all(len(report["probes"]) == 1 for report in reports)


@pytest.mark.parametrize("place", ["shard", "source", "side file"])
def test_names_that_lead_away_are_not_followed(place, checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst")
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    if place == "shard":
        content["tensors"][0]["file"] = "../outside.safetensors"
    elif place == "source":
        content["source_files"]["../outside.safetensors"] = 5
    else:
        content["file_sha256"]["../outside"] = "0" * 64
    path.write_text(json.dumps(sealed(content)))
    report = verify_checkpoint(tmp_path / "dst", source)
    assert checks_of(report) == {"manifest"} and "'../outside" in report.findings[0].message
    assert set(report.skipped) == {"files", "coverage", "finite", "source", "probe"}


def test_inspect_says_that_a_manifest_lacks_a_weight(checkpoint, tmp_path):
    """The seal is right, the facts do not fit each other."""
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8"))
    file = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(file.read_text(encoding="utf-8"))
    lost = next(tensor["weight"] for tensor in content["tensors"] if tensor["layout"] != "source")
    del content["weights"][lost]
    file.write_text(json.dumps(sealed(content)), encoding="utf-8")
    with refused(SourceDamageError, file, re.escape(lost)):
        inspect_checkpoint(tmp_path / "dst", source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
@pytest.mark.parametrize("name", ["neuron.safetensors.index.json", "config.json", "README.md"])
def test_a_named_pipe_is_a_missing_file(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Nobody writes into it, so reading it would never end."""
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    (tmp_path / "dst" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "dst" / name)
    lines = str(verify_checkpoint(tmp_path / "dst"))
    assert re.search(rf"{re.escape(name)}.*(missing|No such file)", lines), lines
