"""Damaged sources through the command line: one line that names file and tensor, and the exit code of the kind."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_neuron_moe.cli.exit_codes import exit_code_of
from hf_neuron_moe.cli.main import main
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.transaction import commit, disk
from hf_neuron_moe.errors import ConversionError, DestinationError, DiskError, SourceDamageError, naming
from tests.refusals import refused

INDEX = "model.safetensors.index.json"
DAMAGE, DISK = 3, 5
"""Exit codes that docs/convert.md documents."""


def first_shard(folder: Path) -> Path:
    """First shard of a sharded source."""
    return min(folder.glob("*.safetensors"))


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file's bytes."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def edit_header(path: Path, change: Callable[[dict], None]) -> None:
    """Change a safetensors header and keep the data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def shift_offsets(header: dict) -> None:
    """Let one tensor begin two bytes too late."""
    name = min(name for name in header if name != "__metadata__")
    header[name]["data_offsets"] = [offset + 2 for offset in header[name]["data_offsets"]]


def forget(header: dict) -> None:
    """Leave the tensor out whose data come first."""
    names = [name for name in header if name != "__metadata__"]
    del header[min(names, key=lambda name: header[name]["data_offsets"])]


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the index's weight map."""
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def duplicate(folder: Path) -> None:
    """Store one tensor in two shards."""
    for path in sorted(folder.glob("*.safetensors"))[:2]:
        save_file({**load_file(path), "model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}, path)


def lead_outside(folder: Path) -> None:
    """Replace a shard with a link to a file outside."""
    shard = first_shard(folder)
    shard.rename(folder.parent / "outside.safetensors")
    shard.symlink_to(folder.parent / "outside.safetensors")


def lead_index_outside(folder: Path) -> None:
    """Replace the index with a link to one outside."""
    (folder / INDEX).rename(folder.parent / INDEX)
    (folder / INDEX).symlink_to(folder.parent / INDEX)


def lead_config_outside(folder: Path) -> None:
    """Replace a tokenizer file with a link to a file outside."""
    (folder.parent / "secret.json").write_text("{}")
    (folder / "extra.json").symlink_to(folder.parent / "secret.json")


def spoil(folder: Path, value: float) -> None:
    """Put one value into one expert's weights."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name := next((name for name in tensors if ".experts.3.w2" in name), None):
            tensors[name][5, 7] = value
            save_file(tensors, path, {"format": "pt"})
            return


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda folder: edit(first_shard(folder), lambda raw: raw.__delitem__(slice(-9, None))), "{shard}"),
    "flipped header byte": (lambda folder: edit(first_shard(folder), lambda raw: raw.__setitem__(8, 0x3B)), "{shard}"),
    "not UTF-8": (lambda folder: edit(first_shard(folder), lambda raw: raw.__setitem__(12, 0xFE)), "{shard}"),
    "1 GB header": (
        lambda folder: edit(first_shard(folder), lambda raw: raw.__setitem__(slice(8), struct.pack("<Q", 2**30))),
        "{shard}: header length",
    ),
    "wrong offsets": (lambda folder: edit_header(first_shard(folder), shift_offsets), "{shard}: .*data_offsets"),
    "hole in the data": (lambda folder: edit_header(first_shard(folder), forget), "{shard}: .*data_offsets"),
    "missing shard": (lambda folder: first_shard(folder).unlink(), "{shard}"),
    "missing tensor": (
        lambda folder: edit_index(folder, lambda index: index.update({"model.ghost": first_shard(folder).name})),
        "tensor model.ghost .*{shard}",
    ),
    "duplicated tensor": (duplicate, "tensor model.norm.weight"),
    "up": (
        lambda folder: edit_index(folder, lambda index: index.update({"lm_head.weight": "../x.safetensors"})),
        INDEX,
    ),
    "absolute": (
        lambda folder: edit_index(folder, lambda index: index.update({"lm_head.weight": "/etc/x.safetensors"})),
        INDEX,
    ),
    "Windows": (
        lambda folder: edit_index(folder, lambda index: index.update({"lm_head.weight": "C:\\x.safetensors"})),
        INDEX,
    ),
    "link outside": (lead_outside, "{shard} .*a link to"),
    "index outside": (lead_index_outside, f"{INDEX} .*a link to"),
    "side file outside": (lead_config_outside, "extra.json .*a link to"),
    "NaN": (lambda folder: spoil(folder, float("nan")), r"model-.*\.experts\.3\.w2.*NaN or infinite"),
    "infinity": (lambda folder: spoil(folder, float("-inf")), r"model-.*\.experts\.3\.w2.*NaN or infinite"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_one_line_and_exit_code_3(kind, checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("mixtral", shard="100KB")
    damage, shown = DAMAGES[kind]
    shown = shown.format(shard=re.escape(first_shard(source).name))
    damage(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    capsys.readouterr()  # what saving the checkpoint printed
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", "convert", str(source), str(tmp_path / "dst"), *extra])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == DAMAGE
        out, err = capsys.readouterr()
        message = json.loads(out)["message"] if extra else err
        assert re.search(shown, message), message
        assert "Traceback" not in out + err
        assert extra or (out == "" and err.count("\n") == 1)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not (tmp_path / "dst").exists()
    assert not commit.partial_of(tmp_path / "dst").exists()


def test_values_that_are_not_finite_can_be_kept(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    spoil(source, float("nan"))
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "fused"), on_nonfinite="keep")
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    experts = [tensor for name, tensor in load_file(shard).items() if name.endswith("experts.down_proj")]
    assert sum(int(tensor.isnan().sum()) for tensor in experts) == 1


def test_a_copied_tensor_that_is_not_finite_is_named(checkpoint, tmp_path):
    source = checkpoint("llama")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][2] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    with refused(SourceDamageError, "model.safetensors: model.norm.weight", got="1 NaN or infinite"):
        convert_checkpoint(source, tmp_path / "dst")
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_a_file_that_shrinks_while_it_is_open_is_damage_and_no_crash(checkpoint, tmp_path):
    source = checkpoint("llama")
    path = source / "model.safetensors"
    with open_tensors(source) as reader:
        reader.read(path.name, "model.norm.weight")
        path.write_bytes(path.read_bytes()[:2000])
        short = refused(SourceDamageError, "model.safetensors: model.norm.weight", got="a file that ends before them")
        with short, naming("convert"):
            reader.read(path.name, "model.norm.weight")
        absent = refused(SourceDamageError, "model.safetensors: model.nothing.weight", got="a header without it")
        with absent, naming("convert"):
            reader.read(path.name, "model.nothing.weight")


def test_a_failing_source_disk_is_a_disk_error_that_names_the_file(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("llama")
    original, calls = disk.os.preadv, []

    def fail(*arguments):
        if Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).parent == source:
            calls.append(arguments)
            if len(calls) > 12:
                raise OSError(5, "Input/output error")
        return original(*arguments)

    monkeypatch.setattr(disk.os, "preadv", fail)
    with refused(DiskError, tmp_path / "dst", r"Input/output error: '.*model\.safetensors'") as caught:
        convert_checkpoint(source, tmp_path / "dst")
    assert exit_code_of(caught.value).code == DISK
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_kinds_of_refusals(checkpoint, tmp_path):
    """What the exit codes are made of: a taken destination is not a damaged source."""
    source = checkpoint("llama")
    (tmp_path / "dst").mkdir()
    with pytest.raises(DestinationError):
        convert_checkpoint(source, tmp_path / "dst")
    (source / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConversionError) as caught:
        convert_checkpoint(source, tmp_path / "new")
    assert not isinstance(caught.value, (SourceDamageError, DestinationError, DiskError))
