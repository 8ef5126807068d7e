"""What a checkpoint holds: tensors by layout, their sizes, and how far they are from a source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.assign import read_checkpoint
from hf_neuron_moe.convert.audit.compare import Comparison, in_db, number
from hf_neuron_moe.convert.audit.manifest_check import disagreements
from hf_neuron_moe.convert.io.bounded import MAX_CONFIG_BYTES, read_json
from hf_neuron_moe.convert.io.folder import CONFIG_FILE, check_checkpoint, is_conversion
from hf_neuron_moe.convert.io.source import damaged, read_header, read_source
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, SOURCE
from hf_neuron_moe.convert.layout.tensor_parallel import halves_in
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, Manifest, WrittenTensor, grouped, load_manifest
from hf_neuron_moe.convert.notes import left_facts, left_notes
from hf_neuron_moe.convert.source_formats import METHODS, QUANTIZATION_CONFIG, check_method
from hf_neuron_moe.convert.workers import Progress, counting
from hf_neuron_moe.errors import ConfigError, ConversionError, SourceDamageError, counted, printable, public

MAX_CELL = 300  # Characters of a name or a shape in a line of text


@dataclass(frozen=True)
class TensorFacts:
    """One tensor."""

    name: str
    file: str
    dtype: str  # Safetensors dtype
    shape: tuple[int, ...]  # Shape as stored
    nbytes: int
    layout: str  # How its values lie
    details: str = ""  # Orientation, rank, scale layout and padding, where they say something
    sqnr: float | None = None
    """Signal to noise in dB against the source, the least of its experts: infinite where equal, None: not compared."""

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {**asdict(self), "sqnr": None if self.sqnr is None else number(self.sqnr)}


@dataclass(frozen=True)
class InspectReport:
    """A checkpoint's contents."""

    directory: Path
    kind: str  # ``"conversion"`` or ``"checkpoint"``
    options: dict[str, Any]
    tensors: tuple[TensorFacts, ...]
    left: dict[str, LeftModule] | None = None  # What a conversion left in its source form; None where it is unknown
    refused: str | None = None  # Why `convert` takes no checkpoint of this quantization, and what to do; None: it does

    @property
    def layouts(self) -> dict[str, dict[str, int]]:
        """Tensors and bytes by layout."""
        return {
            layout: {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}
            for layout, tensors in grouped(self.tensors, lambda tensor: tensor.layout).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "ok": True,
            "directory": str(self.directory),
            "kind": self.kind,
            "options": self.options,
            "bytes": sum(tensor.nbytes for tensor in self.tensors),
            "files": len({tensor.file for tensor in self.tensors}),
            "layouts": self.layouts,
            "left": left_facts(self.left),
            "refused": self.refused,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
        }

    def to_text(self, *, every: bool = False) -> str:
        """A table: one line per kind of tensor (numbers in names replaced by ``*``), or per tensor."""
        nbytes, files = sum(tensor.nbytes for tensor in self.tensors), len({tensor.file for tensor in self.tensors})
        count = f"{counted(len(self.tensors), 'tensor')}, {nbytes:,} bytes in {counted(files, 'file')}"
        lines = [f"{self.directory}: {self.kind}, {count}"]
        if self.options:
            lines.append(
                "options: " + ", ".join(f"{key} {value}" for key, value in self.options.items() if value is not None)
            )
        for layout, entry in self.layouts.items():
            lines.append(f"  {layout}: {counted(entry['tensors'], 'tensor')}, {entry['bytes']:,} bytes")
        kinds = [(tensor.name, [tensor]) for tensor in self.tensors]
        if not every:
            kinds = [(key[0], tensors) for key, tensors in grouped(self.tensors, _kind).items()]
        rows = [_row(name, tensors) for name, tensors in kinds]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        lines += [f"note: {note}" for note in left_notes(self.left)]
        if self.refused is not None:
            lines.append(f"note: convert refuses it: {self.refused}")
        return "\n".join(lines)


@public("inspect")
def inspect_checkpoint(
    directory: Path, source: Path | None = None, *, progress: Progress | None = None
) -> InspectReport:
    """Describe a conversion or an ordinary checkpoint; with the `source` of a conversion, compare all its tensors.

    `progress` is called with bytes compared and bytes in all.
    """
    if not is_conversion(directory):
        check_checkpoint(directory)
        if source is not None:
            expected = "left out for an ordinary checkpoint, which was made of nothing"
            fix = "Give a folder that `hf-neuron-moe convert` wrote, or leave the option out."
            raise ConfigError.about("source", expected, f"{source} with {directory}, which has no {MANIFEST_FILE}", fix)
        return _checkpoint(directory)
    manifest = load_manifest(directory)
    for file in dict.fromkeys(tensor.file for tensor in manifest.tensors):
        read_header(directory / file)
    errors: dict[str, float] = {}
    if source is not None:
        check_checkpoint(source)
        _check_source(source, manifest)
        errors = _errors(directory, source, manifest, progress)
    tensors = [
        TensorFacts(t.name, t.file, t.dtype, t.shape, t.nbytes, t.layout, _details(t), errors.get(t.name))
        for t in manifest.tensors
    ]
    options = asdict(manifest.options)
    if manifest.source_format is not None:
        options["source"] = manifest.source_format.method
    return InspectReport(directory, "conversion", options, tuple(tensors), manifest.left)


def _checkpoint(directory: Path) -> InspectReport:
    """Describe an ordinary checkpoint; of a quantized one that can be converted, which tensors are codes and scales."""
    source, (method, refused) = read_source(directory), _method(directory)
    layouts: dict[str, str] = {}
    if method in METHODS:
        found = read_checkpoint(directory)
        for each in found.encodings.values():
            size = " x ".join(map(str, each.block))
            layouts |= {each.codes.name: f"codes, blocks of {size}", each.scales.name: f"scales, blocks of {size}"}
        layouts |= {tensor.name: "not used" for tensor in (found.format.unused if found.format is not None else ())}
    tensors = [
        TensorFacts(t.name, t.file, t.dtype, t.shape, t.nbytes, layouts.get(t.name, "Hugging Face"))
        for t in source.tensors.values()
    ]
    options = {} if method is None else {"source": method}
    return InspectReport(directory, "checkpoint", options, tuple(tensors), refused=refused)


def _method(directory: Path) -> tuple[str | None, str | None]:
    """The quantization method that config.json names, as far as it can be read, and why it is refused."""
    path, method, refused = directory / CONFIG_FILE, None, None
    with suppress(OSError, ValueError, TypeError, AttributeError):
        content = read_json(path, MAX_CONFIG_BYTES)
        try:
            check_method(path, content)
        except ConversionError as error:
            refused = str(error)
        named = content.get(QUANTIZATION_CONFIG, {}).get("quant_method")
        method = None if named is None else printable(str(named))
    return method, refused


def _check_source(source: Path, manifest: Manifest) -> None:
    for weight, wrong in disagreements(manifest):
        raise damaged(MANIFEST_FILE, "one that agrees with itself", f"{weight}, which is {wrong}")
    for file, size in manifest.source_files.items():
        path = source / file
        found = f"one of {path.stat().st_size} bytes" if path.is_file() else "no such file"
        if found != f"one of {size} bytes":
            expected = f"the file of {size} bytes that was converted"
            fix = "Give the checkpoint that this conversion was made of; if this is it, download it again."
            raise SourceDamageError.about(f"{file} of {source}", expected, found, fix)


def _errors(directory: Path, source: Path, manifest: Manifest, progress: Progress | None) -> dict[str, float]:
    """Signal to noise of every tensor that holds converted values, the least of its experts."""
    weights = dict.fromkeys(t.weight for t in manifest.tensors if t.layout not in (SOURCE, *SCALES))
    if missing := weights.keys() - manifest.weights.keys():
        raise damaged(f"{directory}/{MANIFEST_FILE}", "a manifest with the pieces of every weight", repr(min(missing)))
    step = counting(progress, sum(piece.nbytes for weight in weights for piece in manifest.weights[weight]))
    errors: dict[str, list[float]] = {}
    with open_tensors(source, manifest.encodings) as original, open_tensors(directory) as stored:
        comparison = Comparison(manifest, original, stored)
        for weight in weights:
            for expert in comparison.experts_of(weight):
                matrix_FK = comparison.original(weight, expert)
                for pair in comparison.pairs(weight, expert, matrix_FK):
                    errors.setdefault(pair.tensor.name, []).append(pair.sqnr)
                step(matrix_FK.numel() * matrix_FK.itemsize)
    return {name: _worst(values) for name, values in errors.items()}


def _worst(values: Iterable[float]) -> float:
    """The smallest, where NaN is smaller than every number."""
    return min(values, key=lambda value: (not math.isnan(value), value))


def _details(tensor: WrittenTensor) -> str:
    details = [tensor.orientation] if tensor.layout != SOURCE else []
    if tensor.tp_rank is not None:
        details.append(f"rank {tensor.tp_rank}")
    if tensor.ep_rank is not None:
        details.append(f"rank {tensor.ep_rank}: experts from {tensor.first_expert}")
    if tensor.scale_layout is not None:
        details.append(f"{tensor.scale_layout} scales")
    if tensor.layout in PERMUTED_WORDS.values():
        details.append("groups of the source: I permuted" + (" and H" if halves_in(tensor.weight) else ""))
    if tensor.padding:
        details.append("padded " + ", ".join(f"{axis} by {count}" for axis, count in sorted(tensor.padding.items())))
    return ", ".join(details)


def _kind(tensor: TensorFacts) -> tuple[str, ...]:
    pattern = re.sub(r"(?<=\.)\d+(?=\.)|(?<=\.[te]p)\d+$", "*", tensor.name)
    return pattern, tensor.dtype, str(tensor.shape), tensor.layout


def _row(name: str, tensors: list[TensorFacts]) -> tuple[str, ...]:
    first = tensors[0]
    known = [tensor.sqnr for tensor in tensors if tensor.sqnr is not None]
    # One line for several ranks cannot name one of them.
    parts = [part for part in first.details.split(", ") if len(tensors) == 1 or not part.startswith("rank ")]
    return (
        printable(name, MAX_CELL),
        f"{len(tensors)}x",
        first.dtype,
        printable(str(list(first.shape)), MAX_CELL),
        first.layout,
        f"{sum(tensor.nbytes for tensor in tensors):,} B",
        f"SQNR {in_db(_worst(known))}" if known else "",
        ", ".join(parts),
    )
