"""What a converted checkpoint says about itself: options, and for every tensor where it lies and what it was made of.

The manifest is written last, so a folder that has one is complete. It holds no time and no path, so that the same
source and options give the same bytes, and a checksum of its own content. All other files are judged by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hf_neuron_moe.convert.io.bounded import (
    MAX_MANIFEST_BYTES,
    is_name,
    is_natural,
    is_relative_path,
    is_shape,
    read_json,
    record,
)
from hf_neuron_moe.convert.io.checksums import SHA256, TensorChecksum
from hf_neuron_moe.convert.io.encoded import values_shape
from hf_neuron_moe.convert.io.source import ITEM_BYTES, Encoding, SourceFormat, SourceTensor, is_plain_name, nbytes_of
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.errors import ConversionError, SourceDamageError, naming, pattern_of, spelled_together

MANIFEST_FILE = "neuron_moe_manifest.json"
INDEX_OUT = "neuron.safetensors.index.json"
"""Not transformers' names: a stock ``from_pretrained`` must stop here instead of misreading another layout."""

FORMAT_VERSION = 7
READABLE_VERSIONS = (1, 2, 3, 4, 5, 6, FORMAT_VERSION)
HEADER_VERSION = 2  # Of the shards' headers, which say the same since that version
CHECKSUM = "sha256"
MAX_WORD = 64  # Characters of the names of layouts and orientations

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Piece:
    """One source tensor's place in a fused weight ``[F, K]`` or ``[E, F, K]``."""

    source: str  # Name in the source checkpoint
    file: str  # Source file that holds it
    dtype: str  # Safetensors dtype there
    shape: tuple[int, ...]  # Shape there
    expert: int | None = None  # Index on the experts' axis; None when the piece has that axis itself or there is none
    start: int = 0  # First row on the F axis
    transposed: bool = False  # The source holds ``[K, F]`` matrices
    interleaved: bool = False  # Their F axis has gate and up in turn, where the fused weight has gate first
    up_first: bool = False  # Their F axis has all of up before gate
    stacked: int = 0  # Number of experts whose matrices lie below one another in a source of two axes

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return nbytes_of(self.dtype, self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one matrix in the source."""
        rows, columns = self.shape[-2:]
        return (rows // self.stacked if self.stacked else rows), columns

    @property
    def rows(self) -> slice:
        """Its rows on the F axis."""
        return slice(self.start, self.start + self.matrix[1 if self.transposed else 0])

    def source_rows(self, rows: slice) -> slice:
        """Where a range of its rows, all of gate or all of up, lies on the source's axis."""
        inner = (self.rows.stop - self.rows.start) // 2
        if self.up_first:
            shift = inner if rows.start < inner else -inner
            return slice(rows.start + shift, rows.stop + shift)
        if not self.interleaved:
            return rows
        half = rows.start // inner
        return slice(2 * (rows.start - half * inner) + half, 2 * (rows.stop - half * inner), 2)

    def place(self, expert: int | None, rows: slice) -> tuple[int | None, slice]:
        """Where rows of a matrix are read: index on the source's first axis, or None, and rows behind that."""
        if not self.stacked:
            return expert, rows
        first = (expert or 0) * self.matrix[0]
        return None, slice(first + rows.start, first + rows.stop)

    @property
    def experts(self) -> int:
        """Number of experts whose matrices the source tensor itself holds; 0 where it is one matrix."""
        return self.stacked or (self.shape[0] if len(self.shape) == 3 else 0)

    @property
    def holds_experts(self) -> bool:
        """Whether the source tensor itself holds the matrices of all experts."""
        return self.experts > 0


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of the converted checkpoint."""

    name: str  # Its name in the shard
    file: str
    dtype: str  # Safetensors dtype
    shape: tuple[int, ...]  # Shape as stored
    layout: str  # ``"source"`` (copied unchanged) or a layout name of :mod:`hf_neuron_moe.convert.layout.orientations`
    weight: str  # Name of the fused weight it belongs to; a quantized weight has two tensors per orientation and rank
    checksum: str = ""  # Of its bytes, with the algorithm's name: ``"xxh3_128:..."``
    scale_layout: str | None = None
    """Where a quantized weight's block scales lie: ``"compact"``, ``"oversized"`` or ``"packed"``; codes say it too."""
    orientation: str = "forward"
    """``"forward"``, or ``"backward"`` for the transposed matrix, quantized along its own last axis."""
    tp_rank: int | None = None  # Tensor-parallel rank whose part of the I axis it holds; None where nothing is split
    padding: dict[str, int] = field(default_factory=dict)  # Zeros at the end of its H and I axes, by letter
    ep_rank: int | None = None  # Expert-parallel rank whose experts it holds; None where it holds those of all
    first_expert: int = 0  # The first expert that it holds

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return nbytes_of(self.dtype, self.shape)

    @property
    def group(self) -> tuple[str, int | None]:
        """What is made together from one pass over the source: tensors of a group lie in one shard."""
        return self.weight, self.ep_rank if self.tp_rank is None else self.tp_rank

    def holds(self, expert: int | None) -> bool:
        """Whether it has a part of this expert's matrix."""
        return self.ep_rank is None or (expert or 0) - self.first_expert in range(self.shape[0])


@dataclass(frozen=True)
class Network:
    """What the block of two weights computes with them, where that is not ``silu(gate) * up`` without biases."""

    gate: dict[str, Any]  # Numbers of its gate that are not those of ``silu(gate) * up``, by their names
    biases: tuple[str, ...] = ()  # Source tensors, of projections in their order, down's last; "" for one without


@dataclass(frozen=True)
class LeftModule:
    """A module that looks like an MLP or experts and stays in its source form."""

    reason: str  # Why no kernel computes it
    tensors: int  # Number of its source tensors
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """Contents of ``neuron_moe_manifest.json``."""

    tool_version: str  # Version of this package that wrote the checkpoint
    options: ConvertOptions  # Options of the conversion
    source_files: dict[str, int]  # Bytes of each source file
    source_metadata: dict[str, dict[str, str]]  # Safetensors ``__metadata__`` of each source file
    weights: dict[str, tuple[Piece, ...]]  # Pieces of every weight by its name; a copied tensor is one piece
    tensors: tuple[WrittenTensor, ...] = field(default=())  # Every tensor written
    rounded: dict[str, int] | None = None
    """By source tensor, the number of its values that bf16 does not hold bit for bit, where there are any. None in a
    manifest of a version that did not count."""
    nonfinite: dict[str, int] | None = None
    """Likewise its NaN and infinite values, which were kept because that was asked for."""
    source_sha256: dict[str, str] = field(default_factory=dict)  # Checksum of each source file
    file_sha256: dict[str, str] = field(default_factory=dict)  # Checksum of each file written but this one
    replaced_files: dict[str, str | None] = field(default_factory=dict)
    """The source's text of each side file that was written differently, by name; None where the source has none."""
    source_index: dict[str, Any] | None = None  # ``metadata`` of the source's index, where it has that
    left: dict[str, LeftModule] | None = None
    """Modules that stay in their source form, by name. None in a manifest of a version that did not say."""
    source_format: SourceFormat | None = None
    """How a quantized source stored its tensors; `weights` are then made of their bf16 values."""
    networks: dict[str, Network] = field(default_factory=dict)  # By module; empty before format version 6

    @property
    def encodings(self) -> dict[str, Encoding]:
        """How the source stores those of its tensors that are codes, by name."""
        return {} if self.source_format is None else self.source_format.encodings

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all weights."""
        return [piece for pieces in self.weights.values() for piece in pieces]

    @property
    def coded(self) -> list[SourceTensor]:
        """The tensors of a quantized source that no weight has under their own name: codes, scales, unused ones."""
        parts = [part for each in self.encodings.values() for part in (each.codes, each.scales)]
        return parts + list(self.source_format.unused if self.source_format is not None else ())

    def by_weight(self) -> dict[str, list[WrittenTensor]]:
        """The tensors that store each weight, in the manifest's order."""
        return grouped(self.tensors, lambda tensor: tensor.weight)

    def by_file(self) -> dict[str, list[WrittenTensor]]:
        """The tensors of each shard, in the order of the shards' names."""
        return grouped(sorted(self.tensors, key=lambda tensor: tensor.file), lambda tensor: tensor.file)

    def was_rounded(self, piece: Piece) -> bool:
        """Whether values of a source tensor may have lost bits in bf16."""
        return piece.dtype != "BF16" if self.rounded is None else piece.source in self.rounded

    def to_json(self) -> str:
        """Serialise, with sorted keys and the checksum of the content (:func:`sealed`) as ``"sha256"``."""
        content = sealed({"format_version": FORMAT_VERSION, **asdict(self)})
        return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def grouped(items: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    """Items by key; keys and items in the order in which they come."""
    groups: dict[KeyT, list[ItemT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def grouped_names(reasons: Mapping[str, str]) -> list[tuple[str, list[str], str]]:
    """Modules of one pattern and reason together: their names as one, their names, the reason."""
    kinds = grouped(reasons, lambda name: (pattern_of(name), reasons[name]))
    return [(spelled_together(names), names, reason) for (_, reason), names in kinds.items()]


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum to a manifest's content, or renew it: of the rest's JSON, keys sorted, no spaces, in ASCII."""
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def header_metadata(tensors: Iterable[WrittenTensor]) -> dict[str, str]:
    """Describe a shard's tensors in its safetensors ``__metadata__``, whose values are text."""
    facts = ("layout", "scale_layout", "orientation", "tp_rank", "padding", "weight")
    dealt = (*facts, "ep_rank", "first_expert")
    content = {t.name: {f: getattr(t, f) for f in (facts if t.ep_rank is None else dealt)} for t in tensors}
    layouts = {name: entry["layout"] for name, entry in content.items()}
    return {
        "format": "pt",
        "hf_neuron_moe.format_version": str(HEADER_VERSION),
        "hf_neuron_moe.layouts": json.dumps(layouts, sort_keys=True),
        "hf_neuron_moe.tensors": json.dumps(content, sort_keys=True),
    }


def index_json(metadata: Mapping[str, Any], stored: Iterable[Piece | WrittenTensor], files: Mapping[str, str]) -> bytes:
    """Return the index of a folder's shards: `metadata`, the bytes of `stored`, and each tensor's file by its name."""
    content = {"metadata": {"total_size": sum(part.nbytes for part in stored), **metadata}, "weight_map": dict(files)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(directory: Path, where: str = "export") -> Manifest:
    """Return what :func:`load_manifest` does, for a caller who has no command: errors name `where`."""
    with naming(where):
        return load_manifest(directory)


def load_manifest(directory: Path) -> Manifest:
    """Return the manifest of a converted checkpoint, also one of an earlier format version."""
    path = directory / MANIFEST_FILE
    expected = f"a manifest of format version {' or '.join(map(str, READABLE_VERSIONS))}"
    try:
        content = read_json(path, MAX_MANIFEST_BYTES)
        version = content["format_version"]
        if type(version) is not int or version not in READABLE_VERSIONS:
            fix = "Use the version of this package that wrote it, or convert the original again."
            raise ConversionError.about(str(path), expected, f"format version {version}", fix)
        if version != 1 and content.pop(CHECKSUM, None) != sealed(content)[CHECKSUM]:  # version 1 had none
            raise ValueError("its content is not what was written: it does not have the checksum that it states")
        del content["format_version"]
        manifest = record(Manifest, _upgrade(content, version))
        for fault in _faults(manifest):
            raise ValueError(fault)
        return manifest
    except FileNotFoundError as error:
        fix = "Give the folder that `hf-neuron-moe convert` wrote."
        raise ConversionError.about(str(path), expected, "a folder without it", fix) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got, fix = f"{type(error).__name__}: {error}", "The conversion is damaged: convert the original again."
        raise SourceDamageError.about(str(path), expected, got, fix) from error


def _upgrade(content: dict[str, Any], version: int) -> dict[str, Any]:
    """Say in this version's words what an earlier one recorded, and what it did not.

    Version 6 had no ranks of experts, version 5 no gates and no permuted words, version 4 no quantized or interleaved
    sources. Version 3 did not say what was left. Version 2 had the SHA-256 of every tensor; version 1 wrote forward
    operands only, scales packed in kernel layout.
    """
    if version < 3:
        for entry in content["tensors"]:
            entry["checksum"] = f"{SHA256}:{entry.pop('sha256')}"
    if version > 1:
        return content
    quantized = content["options"]["precision"] != "bf16"
    scales = "packed" if content["options"]["layout"] == "kernel" else "compact"
    for entry in content["tensors"]:
        entry["scale_layout"] = scales if quantized and entry["layout"] != "source" else None
    return {**content, "options": {**content["options"], "purpose": "inference"}}


def _faults(manifest: Manifest) -> Iterator[str]:
    """What no conversion writes, such as a name that leads out of the folder."""
    shards = {tensor.file for tensor in manifest.tensors} | {part.file for part in manifest.coded}
    shards |= {piece.file for piece in manifest.pieces}
    bad = {name for name in shards | manifest.source_files.keys() if not is_plain_name(name)}
    bad |= {name for name in manifest.file_sha256.keys() | manifest.replaced_files if not is_relative_path(name)}
    if bad:
        yield f"file name {min(bad)!r} leads out of the folder, or is none"
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in manifest.tensors]
    described += [(piece.source, piece.dtype, piece.shape) for piece in manifest.pieces]
    described += [(part.name, part.dtype, part.shape) for part in manifest.coded]
    for name, dtype, shape in described:
        if not (is_name(name) and dtype in ITEM_BYTES and is_shape(shape)):
            yield f"tensor {name!r} of dtype {dtype!r} and shape {list(shape)}"
    for tensor in manifest.tensors:
        TensorChecksum(tensor.checksum)  # of a known kind
        numbers = (*tensor.padding.values(), tensor.tp_rank or 0, tensor.ep_rank or 0, tensor.first_expert)
        words = (tensor.layout, tensor.scale_layout or "none", tensor.orientation, *tensor.padding)
        known = is_name(tensor.weight) and all(is_name(word) and len(word) <= MAX_WORD for word in words)
        if not (known and all(map(is_natural, numbers))):
            yield f"tensor {tensor.name!r} with {(tensor.weight, *words)} and {numbers}"
    for piece in manifest.pieces:
        if not all(map(is_natural, (piece.start, piece.expert or 0, piece.stacked))):
            yield f"source tensor {piece.source!r} at row {piece.start} of expert {piece.expert}"
    sources = {piece.source for piece in manifest.pieces}
    yield from _format_faults(manifest)
    for counts in (manifest.rounded or {}, manifest.nonfinite or {}):
        if not (counts.keys() <= sources and all(map(is_natural, counts.values()))):
            yield "counts of rounded or kept values of no source tensor"
    if not all(map(is_natural, manifest.source_files.values())):
        yield "source files with sizes that are none"
    for module, network in manifest.networks.items():
        typed = all(isinstance(value, str if name == "act" else (int, float)) for name, value in network.gate.items())
        if not (typed and {*network.biases} - {""} <= manifest.weights.keys()):
            yield f"module {module!r} with gate {network.gate} and biases {network.biases}"
    for name, left in (manifest.left or {}).items():
        if not (is_name(name) and is_natural(left.tensors) and is_natural(left.nbytes)):
            yield f"module {name!r} with {left.tensors} tensors of {left.nbytes} bytes"


def _format_faults(manifest: Manifest) -> Iterator[str]:
    """What no conversion says of a quantized source."""
    shapes = {piece.source: (piece.dtype, piece.shape) for piece in manifest.pieces}
    for name, encoding in manifest.encodings.items():
        sizes = len(encoding.block) == 2 and all(map(is_natural, encoding.block)) and 0 not in encoding.block
        try:
            fits = sizes and shapes.get(name) == ("BF16", values_shape(encoding))
        except ConversionError as error:
            raise ValueError(str(error)) from error
        if not fits:
            yield f"source tensor {name!r} as codes of another shape"
