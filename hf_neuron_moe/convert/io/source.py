"""The source checkpoint: which tensors a folder of safetensors files holds, from the files' headers alone.

Nothing here trusts a file: names must stay inside the folder, every header must account for every byte of its file, and
index and headers must agree. Header format: https://huggingface.co/docs/safetensors (8 bytes of little-endian length,
JSON, data).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.io.bounded import (
    MAX_AXES,
    MAX_FILE_NAME,
    MAX_INDEX_BYTES,
    MAX_NAME,
    is_file_name,
    is_name,
    is_natural,
    is_shape,
    parse_json,
    read_json,
)
from hf_neuron_moe.convert.transaction import disk
from hf_neuron_moe.errors import ConversionError, SourceDamageError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes per element of the safetensors dtypes whose elements fill whole bytes, in the library's own order of dtypes."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit on the header length."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors dtype."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def is_plain_name(file: object) -> bool:
    """Whether `file` names a safetensors file on every system: no folder, no drive, no way up."""
    return is_file_name(file) and str(file).endswith(".safetensors")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the source, as its file's header describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    """Where its data begin, in bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class SourceCheckpoint:
    """A folder of safetensors files: its tensors by name, in the files' own order."""

    directory: Path
    files: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, Mapping[str, str]]
    """``__metadata__`` of each file."""
    index_metadata: Mapping[str, Any] | None = None
    """``metadata`` of the index, such as the number of parameters; None where there is none."""


def damaged(subject: str, expected: str, got: object) -> SourceDamageError:
    """The refusal for files whose bytes contradict themselves."""
    return SourceDamageError.about(
        subject, expected, got, "The file is damaged or incomplete: download or save it again."
    )


def read_header(path: Path) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """Read and check one safetensors header.

    Returns:
        Tensors by name in the order of their data, and the file's metadata.
    """
    if not path.is_file():
        raise damaged(path.name, "a file of the checkpoint", "no such file")
    size = path.stat().st_size
    with disk.open_to_read(path) as file:
        prefix = _read_up_to(file, 0, 8)
        if len(prefix) < 8:
            raise damaged(path.name, "a safetensors file of at least 8 bytes", f"{size} bytes")
        length = struct.unpack("<Q", prefix)[0]
        limit = min(MAX_HEADER_BYTES, size - 8)
        if length > limit:
            raise damaged(f"{path.name}: header length", f"at most {limit}", length)
        raw = _read_up_to(file, 8, length)
    try:
        header = parse_json(raw, unique=True)
    except ValueError as error:
        raise damaged(f"{path.name}: header", "JSON in UTF-8 without repeated names", error) from error
    if not isinstance(header, dict):
        raise damaged(f"{path.name}: header", "a JSON object", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(f"{path.name}: __metadata__", "a map of strings", metadata)
    return _check_entries(path.name, header, 8 + length, size - 8 - length), metadata


def _read_up_to(file: FileIO, start: int, count: int) -> bytes:
    """Bytes of a file from `start` on; fewer than `count` where it ends before."""
    buffer = bytearray(count)
    return bytes(buffer[: disk.read_at(file, memoryview(buffer), start)])


def _check_entries(file: str, header: dict[str, Any], data_start: int, data_bytes: int) -> dict[str, SourceTensor]:
    spans: list[tuple[int, int, SourceTensor]] = []
    for name, entry in header.items():
        if not is_name(name):
            raise damaged(f"{file}: a tensor's name", f"1 to {MAX_NAME:,} printable characters", repr(name))
        subject = f"{file}: {name}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise damaged(subject, "an entry with dtype, shape and data_offsets", entry)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise damaged(f"{subject}: dtype", f"one of {', '.join(ITEM_BYTES)}", repr(dtype))
        if not (isinstance(shape, list) and is_shape(shape)):
            raise damaged(f"{subject}: shape", f"at most {MAX_AXES} natural numbers of 63 bits", shape)
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_natural, offsets))):
            raise damaged(f"{subject}: data_offsets", "two natural numbers of 63 bits", offsets)
        tensor = SourceTensor(name, file, dtype, tuple(shape), data_start + offsets[0])
        if offsets[1] - offsets[0] != tensor.nbytes:
            raise damaged(f"{subject}: data_offsets", f"{tensor.nbytes} bytes apart", offsets)
        spans.append((offsets[0], offsets[1], tensor))
    spans.sort(key=lambda span: span[:2])
    position = 0
    for start, end, tensor in spans:
        if start != position:
            raise damaged(f"{file}: {tensor.name}: data_offsets", f"a start at {position}", start)
        position = end
    if position != data_bytes:
        raise damaged(f"{file}: data", f"{position} bytes long as the header says", f"{data_bytes} bytes")
    return {tensor.name: tensor for _, _, tensor in spans}


def read_source(directory: Path) -> SourceCheckpoint:
    """Describe the checkpoint in `directory` without reading a weight."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not (single.exists() or index.exists()):
        raise _no_safetensors(directory)
    if single.exists() and index.exists():
        expected = f"a folder with either {SINGLE_FILE} or {INDEX_FILE}"
        fix = "Remove the one that does not belong to the checkpoint."
        raise SourceDamageError.about(str(directory), expected, "both", fix)
    if index.exists():
        return read_indexed(directory, INDEX_FILE)
    tensors, metadata = read_header(inside(directory, SINGLE_FILE))
    return SourceCheckpoint(directory, (SINGLE_FILE,), tensors, {SINGLE_FILE: metadata})


def read_indexed(directory: Path, index: str) -> SourceCheckpoint:
    """Describe the tensors of the files that an index names."""
    named, index_metadata = read_index(inside(directory, index))
    files = sorted(set(named.values()))
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        found, metadata[file] = read_header(inside(directory, file))
        for name, tensor in found.items():
            if name in tensors:
                raise damaged(f"tensor {name}", "in one file", f"in {tensors[name].file} and in {file}")
            if named.get(name) != file:
                place = f"in {file}, where the index does not name it"
                raise damaged(f"tensor {name}", f"where {index} says", place)
            tensors[name] = tensor
    for name, file in named.items():
        if name not in tensors:
            raise damaged(f"tensor {name}", f"in {file} as {index} says", "a file without it")
    return SourceCheckpoint(directory, tuple(files), tensors, metadata, index_metadata)


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any] | None]:
    """File by tensor name, and the index's metadata."""
    try:
        content = read_json(path, MAX_INDEX_BYTES, unique=True)
    except ValueError as error:
        raise damaged(path.name, "JSON in UTF-8 without repeated names", error) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(f"{path.name}: weight_map", "a map from tensor names to files", weight_map)
    for name, file in weight_map.items():
        if not is_plain_name(file):
            expected = f"the plain name of a .safetensors file in the same folder, at most {MAX_FILE_NAME} bytes"
            fix = "An index that points elsewhere is not followed; repair it."
            raise SourceDamageError.about(f"{path.name}: file of {name}", expected, repr(file), fix)
    metadata = content.get("metadata")
    return dict(weight_map), metadata if isinstance(metadata, dict) else None


def inside(directory: Path, file: str) -> Path:
    """The path of `file`, which may lie in a folder of the checkpoint; refused when a link leads out."""
    path = directory / file
    if not path.is_file():
        raise damaged(file, "a file of the checkpoint", "no such file")
    home, target = directory.resolve(), path.resolve()
    # huggingface_hub keeps snapshots/<commit>/file as links to blobs/<hash> of the same repository.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if target.parent not in ((home / file).parent, blobs):
        fix = "Copy the file into the folder if it belongs there."
        raise SourceDamageError.about(file, "a file inside the checkpoint folder", f"a link to {target}", fix)
    return path


def _no_safetensors(directory: Path) -> ConversionError:
    """Refuse a folder without weights that could be read, and name those that it has."""
    if shards := sorted(path.name for path in directory.glob("*.safetensors")):
        more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        expected = f"a folder with {SINGLE_FILE} or {INDEX_FILE}"
        fix = f"{INDEX_FILE} says which tensors belong to the checkpoint: download or save it again."
        return SourceDamageError.about(str(directory), expected, f"{shards[0]}{more} without either", fix)
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    got, remedy = "a folder without them", "Give the folder that holds config.json and the weights."
    if pickles:
        got = f"pickled weights ({pickles[0]})"
        remedy = (
            "Opening a pickle runs whatever code it holds, so it is not read here. If you trust it, make safetensors "
            "of it: python -c \"from transformers import AutoModelForCausalLM as A; A.from_pretrained('SRC', "
            "dtype='auto').save_pretrained('NEW')\"."
        )
    return ConversionError.about(str(directory), f"a folder with {SINGLE_FILE} or {INDEX_FILE}", got, remedy)
