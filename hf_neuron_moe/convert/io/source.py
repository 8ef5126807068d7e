"""Which tensors a folder of safetensors files holds, from the files' headers alone.

No file is trusted: names stay inside the folder, a header accounts for every byte of its file, index and headers agree.
Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian length, JSON, data).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe.convert.io import bounded
from hf_neuron_moe.convert.transaction import disk
from hf_neuron_moe.errors import ConversionError, SourceDamageError

# What torch calls the safetensors dtypes whose elements fill whole bytes, in the library's own order.
TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
ITEM_BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000  # The safetensors library's own limit
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NATURAL = "natural numbers of 63 bits"
_JSON = "JSON in UTF-8 without repeated names"

_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (lambda name: isinstance(name, str) and name in ITEM_BYTES, f"one of {', '.join(ITEM_BYTES)}"),
    "shape": (bounded.is_shape, f"at most {bounded.MAX_AXES} {_NATURAL}"),
    "data_offsets": (lambda pair: bounded.is_shape(pair) and len(pair) == 2, f"two {_NATURAL}"),
}
"""What a header says of a tensor: the check of each field, and its rule in words."""


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors dtype."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def is_plain_name(file: object) -> bool:
    """Whether `file` names a safetensors file on every system: no folder, no drive, no way up."""
    return bounded.is_relative_path(file) and "/" not in str(file) and str(file).endswith(".safetensors")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the source, as its file's header describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0  # Where its data begin, in bytes from the beginning of the file

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Encoding:
    """How a source stores the values of a tensor: as codes, with a scale for each block of them."""

    codes: SourceTensor  # ``[(E,) N, K]`` of FP8, ``[(E,) N, K/2]`` of packed FP4, or ``[(E,) N, K/32, 16]`` of MXFP4
    scales: SourceTensor  # One per block of the matrices ``[N, K]``
    block: tuple[int, ...]  # Rows and columns of a block; the last of an axis may be partial
    transposed: bool = False  # The tensor of values holds every matrix transposed: ``[(E,) K, N]``

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class SourceFormat:
    """What a quantized checkpoint is, beyond the tensors of values that are made of it."""

    method: str  # ``quant_method`` of its ``quantization_config``
    encodings: dict[str, Encoding]  # By the name of the tensor of values, which is always bf16
    unused: tuple[SourceTensor, ...] = ()  # Tensors for quantized activations, which no kernel here reads


@dataclass(frozen=True)
class SourceCheckpoint:
    """A folder of safetensors files: its tensors by name, in the files' own order."""

    directory: Path
    files: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, Mapping[str, str]]  # ``__metadata__`` of each file
    index_metadata: Mapping[str, Any] | None = None  # ``metadata`` of the index, such as the number of parameters
    format: SourceFormat | None = None  # Of a quantized checkpoint, whose `tensors` are then those of values

    @property
    def encodings(self) -> dict[str, Encoding]:
        """How those tensors are stored that are codes in the files, by name."""
        return {} if self.format is None else self.format.encodings


def damaged(subject: str, expected: str, got: object) -> SourceDamageError:
    """The error for files whose bytes contradict themselves."""
    fix = "The file is damaged or incomplete: download or save it again."
    return SourceDamageError.about(subject, expected, got, fix)


def misfit(tensor: SourceTensor, expected: str, got: object) -> ConversionError:
    """The error for a tensor that is not what the configuration says, or what belongs to it."""
    fix = "Check that config.json belongs to these weights; download both again."
    return ConversionError.about(f"{tensor.file}: {tensor.name}", expected, got, fix)


def _check(holds: bool, subject: str, expected: str, got: object) -> None:
    if not holds:
        raise damaged(subject, expected, got)


def read_header(path: Path) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """Read and check a safetensors header: tensors by name in the order of their data, and the file's metadata."""
    file = path.name
    _check(path.is_file(), file, "a file of the checkpoint", "no such file")
    size = path.stat().st_size
    with disk.open_to_read(path) as opened:
        prefix = _read_up_to(opened, 0, 8)
        _check(len(prefix) == 8, file, "a safetensors file of at least 8 bytes", f"{size} bytes")
        length = struct.unpack("<Q", prefix)[0]
        limit = min(MAX_HEADER_BYTES, size - 8)
        _check(length <= limit, f"{file}: header length", f"at most {limit}", length)
        raw = _read_up_to(opened, 8, length)
    try:
        header = bounded.parse_json(raw, unique=True)
    except ValueError as error:
        raise damaged(f"{file}: header", _JSON, error) from error
    _check(isinstance(header, dict), f"{file}: header", "a JSON object", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    _check(texts, f"{file}: __metadata__", "a map of strings", metadata)
    return _tensors(file, header, 8 + length, size - 8 - length), metadata


def _read_up_to(file: FileIO, start: int, count: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: disk.read_at(file, memoryview(buffer), start)])


def _tensors(file: str, header: dict[str, Any], data_start: int, data_bytes: int) -> dict[str, SourceTensor]:
    """The tensors of a header in the order of their data, which have to fill the file without gap or overlap."""
    tensors = [_tensor(file, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    end = 0
    for tensor in tensors:
        start = tensor.start - data_start
        _check(start == end, f"{file}: {tensor.name}: data_offsets", f"a start at {end}", start)
        end += tensor.nbytes
    _check(end == data_bytes, f"{file}: data", f"{end} bytes long as the header says", f"{data_bytes} bytes")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: str, name: str, entry: Any, data_start: int) -> SourceTensor:
    subject = f"{file}: {name}"
    if not bounded.is_name(name):
        raise damaged(f"{file}: a tensor's name", f"1 to {bounded.MAX_NAME:,} printable characters", repr(name))
    complete = isinstance(entry, dict) and entry.keys() == _FIELDS.keys()
    _check(complete, subject, "an entry with dtype, shape and data_offsets", entry)
    for field, (holds, expected) in _FIELDS.items():
        if not holds(entry[field]):
            raise damaged(f"{subject}: {field}", expected, repr(entry[field]))
    start, stop = entry["data_offsets"]
    tensor = SourceTensor(name, file, entry["dtype"], tuple(entry["shape"]), data_start + start)
    _check(stop - start == tensor.nbytes, f"{subject}: data_offsets", f"{tensor.nbytes} bytes apart", [start, stop])
    return tensor


def read_source(directory: Path) -> SourceCheckpoint:
    """Describe the checkpoint in `directory` without reading a weight."""
    single, index = (directory / SINGLE_FILE).exists(), (directory / INDEX_FILE).exists()
    if single and index:
        expected = f"a folder with either {SINGLE_FILE} or {INDEX_FILE}"
        fix = "Remove the one that does not belong to the checkpoint."
        raise SourceDamageError.about(str(directory), expected, "both", fix)
    if index:
        return read_indexed(directory, INDEX_FILE)
    if not single:
        raise _no_safetensors(directory)
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
        for name in found:
            if name in tensors:
                raise damaged(f"tensor {name}", "in one file", f"in {tensors[name].file} and in {file}")
            place = f"in {file}, where the index does not name it"
            _check(named.get(name) == file, f"tensor {name}", f"where {index} says", place)
        tensors |= found
    for name, file in named.items():
        _check(name in tensors, f"tensor {name}", f"in {file} as {index} says", "a file without it")
    return SourceCheckpoint(directory, tuple(files), tensors, metadata, index_metadata)


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any] | None]:
    """File by tensor name, and the index's metadata."""
    try:
        content = bounded.read_json(path, bounded.MAX_INDEX_BYTES, unique=True)
    except ValueError as error:
        raise damaged(path.name, _JSON, error) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(f"{path.name}: weight_map", "a map from tensor names to files", weight_map)
    for name, file in weight_map.items():
        if not is_plain_name(file):
            most = f"at most {bounded.MAX_FILE_NAME} bytes"
            expected = f"the plain name of a .safetensors file in the same folder, {most}"
            fix = "An index that points elsewhere is not followed; repair it."
            raise SourceDamageError.about(f"{path.name}: file of {name}", expected, repr(file), fix)
    metadata = content.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else None


def inside(directory: Path, file: str) -> Path:
    """The path of `file`, which may lie in a folder of the checkpoint; an error where a link leads out."""
    path = directory / file
    _check(path.is_file(), file, "a file of the checkpoint", "no such file")
    home, target = directory.resolve(), path.resolve()
    # huggingface_hub keeps snapshots/<commit>/file as links to blobs/<hash> of the same repository.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if target.parent not in ((home / file).parent, blobs):
        fix = "Copy the file into the folder if it belongs there."
        raise SourceDamageError.about(file, "a file inside the checkpoint folder", f"a link to {target}", fix)
    return path


GGUF_FIX = (
    "Make a checkpoint of it first: load it in transformers with from_pretrained(FOLDER, gguf_file=NAME) and call "
    "save_pretrained."
)


def gguf_in(directory: Path) -> str | None:
    """What a message says of the first GGUF file of a folder; None where there is none."""
    name = min((path.name for path in directory.glob("*.gguf")), default=None)
    return None if name is None else f"GGUF weights ({name})"


def _no_safetensors(directory: Path) -> ConversionError:
    """The error for a folder without weights that could be read; it names those that the folder has."""
    shards, pickles = (sorted(path.name for path in directory.glob(kind)) for kind in ("*.safetensors", "*.bin"))
    error: type[ConversionError] = ConversionError
    got, fix = "a folder without them", "Give the folder that holds config.json and the weights."
    if shards:
        error = SourceDamageError
        got = f"{shards[0]}{f' and {len(shards) - 1} more' if len(shards) > 1 else ''} without either"
        fix = f"{INDEX_FILE} says which tensors belong to the checkpoint: download or save it again."
    elif pickles:
        got = f"pickled weights ({pickles[0]})"
        fix = (
            "Opening a pickle runs whatever code it holds, so it is not read here. If you trust it, make safetensors "
            "of it: python -c \"from transformers import AutoModelForCausalLM as A; A.from_pretrained('SRC', "
            "dtype='auto').save_pretrained('NEW')\"."
        )
    elif (found := gguf_in(directory)) is not None:
        got, fix = found, GGUF_FIX
    return error.about(str(directory), f"a folder with {SINGLE_FILE} or {INDEX_FILE}", got, fix)
