"""Export gives nothing back from a conversion whose bytes are not those that were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.export import NOTE_FILE
from hf_neuron_moe.convert.io.source import read_header
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from hf_neuron_moe.errors import SourceDamageError
from tests.refusals import refused


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.fixture
def converted(checkpoint, tmp_path) -> Path:
    """A conversion of several shards."""
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", ConvertOptions("bf16", "kernel", 60_000))
    return tmp_path / "dst"


def export_refused(converted: Path, file: str, got: str) -> None:
    """Exporting is refused because of this file and leaves nothing."""
    before = sorted(converted.parent.iterdir())
    with refused(SourceDamageError, file, got=got, where="export"):
        export_checkpoint(converted, converted.with_name("back"), allow_inexact=True)
    assert sorted(converted.parent.iterdir()) == before


@pytest.mark.parametrize("layout", ["source", "bf16_kernel"])
def test_a_flipped_bit_is_refused_with_file_and_tensor(layout, converted):
    tensor = [tensor for tensor in read_manifest(converted).tensors if tensor.layout == layout][-1]
    path = converted / tensor.file
    flip(path, read_header(path)[0][tensor.name].start + 9)
    export_refused(converted, tensor.file, f"other bytes of {tensor.name}")


def test_other_altered_tensors_of_a_file_are_counted(converted):
    file, tensors = max(read_manifest(converted).by_file().items(), key=lambda item: len(item[1]))
    header = read_header(converted / file)[0]
    for tensor in tensors[:2]:
        flip(converted / file, header[tensor.name].start)
    export_refused(converted, file, f"other bytes of {tensors[0].name} and 1 other tensor")


def test_a_changed_header_is_refused(converted):
    path = max(converted.glob("neuron-*.safetensors"))
    content = path.read_bytes()
    # Another number of the same length in the metadata: still a well-formed header.
    path.write_bytes(content.replace(b'format_version":"2"', b'format_version":"4"', 1))
    assert path.read_bytes() != content
    export_refused(converted, path.name, "other bytes in its header")


def test_an_edited_or_missing_side_file_is_refused(converted):
    path = converted / "generation_config.json"
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    export_refused(converted, path.name, "other bytes")
    path.unlink()
    export_refused(converted, path.name, "no such file")
    path.write_bytes(content)
    export_checkpoint(converted, converted.with_name("back"))
    assert (converted.with_name("back") / path.name).read_bytes() == content


def test_without_checksums_of_files_those_of_tensors_count(converted):
    path = converted / MANIFEST_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**content, "file_sha256": {}})))
    export_checkpoint(converted, converted.with_name("back"))
    file = content["tensors"][0]["file"]
    flip(converted / file, -1)
    (converted.parent / "back").rename(converted.parent / "good")
    export_refused(converted, file, "other bytes of ")


def test_a_missing_shard_is_damage(converted):
    path = max(converted.glob("neuron-*.safetensors"))
    path.unlink()
    export_refused(converted, path.name, "no such file")


def rewrite(converted: Path, change) -> None:
    """Change a manifest's content, whose own checksum is right again."""
    path = converted / MANIFEST_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(sealed(content)))


def test_a_manifest_writes_no_note_of_the_export(converted):
    rewrite(converted, lambda content: content["replaced_files"].update({NOTE_FILE: "{}"}))
    export_refused(converted, MANIFEST_FILE, f"file names ['{NOTE_FILE}']")


def test_a_source_tensor_has_one_place(converted):
    norms = [weight for weight in read_manifest(converted).weights if weight.endswith("layernorm.weight")]

    def name_twice(content) -> None:
        content["weights"][norms[1]][0]["source"] = content["weights"][norms[0]][0]["source"]

    rewrite(converted, name_twice)
    export_refused(converted, MANIFEST_FILE, f"more than one place of {norms[0]}")


def test_another_shape_in_a_header_is_refused(converted):
    (tensor,) = (tensor for tensor in read_manifest(converted).tensors if tensor.name == "lm_head.weight")
    path = converted / tensor.file
    content = path.read_bytes()
    old, new = (str(list(shape)).replace(" ", "").encode() for shape in (tensor.shape, tensor.shape[::-1]))
    start = content.index(b'"lm_head.weight"')
    path.write_bytes(content[:start] + content[start:].replace(old, new, 1))
    assert path.read_bytes() != content
    export_refused(converted, tensor.file, f"something else for {tensor.name}")
