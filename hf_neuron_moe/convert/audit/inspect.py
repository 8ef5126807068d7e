"""What a checkpoint holds: tensors by layout, their sizes, and how far they are from a source."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.audit.compare import Comparison, in_db, number
from hf_neuron_moe.convert.audit.manifest_check import disagreements
from hf_neuron_moe.convert.io.folder import check_checkpoint
from hf_neuron_moe.convert.io.source import damaged, read_header, read_source
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.layout.orientations import SCALES, SOURCE
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, Manifest, WrittenTensor, grouped, load_manifest
from hf_neuron_moe.convert.notes import left_facts, left_notes
from hf_neuron_moe.convert.workers import Progress, counting
from hf_neuron_moe.errors import ConfigError, SourceDamageError, printable, public

MAX_CELL = 300
"""Characters of a name or a shape in a line of text."""


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
    """Signal to noise in dB against the source: the least of its experts. Infinite where equal, None where not
    compared."""

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
    left: dict[str, LeftModule] | None = None
    """Modules that the conversion left in their source form; None for a checkpoint, and where it is not known."""

    @property
    def layouts(self) -> dict[str, dict[str, int]]:
        """Tensors and bytes by layout."""
        totals: dict[str, dict[str, int]] = {}
        for tensor in self.tensors:
            entry = totals.setdefault(tensor.layout, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += tensor.nbytes
        return totals

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
            "tensors": [tensor.to_dict() for tensor in self.tensors],
        }

    def to_text(self, *, every: bool = False) -> str:
        """A table: one line per kind of tensor (numbers in names replaced by ``*``), or per tensor."""
        files = len({tensor.file for tensor in self.tensors})
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        lines = [f"{self.directory}: {self.kind}, {len(self.tensors)} tensors, {nbytes:,} bytes in {files} files"]
        if self.options:
            lines.append("options: " + ", ".join(f"{key} {value}" for key, value in self.options.items()))
        lines += [
            f"  {layout}: {entry['tensors']} tensors, {entry['bytes']:,} bytes"
            for layout, entry in self.layouts.items()
        ]
        rows = [_row(tensor.name, [tensor]) for tensor in self.tensors] if every else self._kinds()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        lines += [f"note: {note}" for note in left_notes(self.left)]
        return "\n".join(lines)

    def _kinds(self) -> list[tuple[str, ...]]:
        def kind(tensor: TensorFacts) -> tuple[str, ...]:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)|(?<=\.tp)\d+$", "*", tensor.name)
            return pattern, tensor.dtype, str(tensor.shape), tensor.layout

        return [_row(key[0], tensors) for key, tensors in grouped(self.tensors, kind).items()]


@public("inspect")
def inspect_checkpoint(
    directory: Path, source: Path | None = None, *, progress: Progress | None = None
) -> InspectReport:
    """Describe a conversion or an ordinary checkpoint.

    Args:
        directory: the folder.
        source: the checkpoint that a conversion was made of; every converted tensor is then compared with it.
        progress: called with bytes compared and bytes in all.
    """
    if not (directory / MANIFEST_FILE).is_file():
        check_checkpoint(directory)
        if source is not None:
            expected = "left out for an ordinary checkpoint, which was made of nothing"
            fix = "Give a folder that `hf-neuron-moe convert` wrote, or leave the option out."
            raise ConfigError.about("source", expected, f"{source} with {directory}, which has no {MANIFEST_FILE}", fix)
        return _inspect_source(directory)
    manifest = load_manifest(directory)
    for file in dict.fromkeys(tensor.file for tensor in manifest.tensors):
        read_header(directory / file)
    tensors = {tensor.name: _facts(tensor) for tensor in manifest.tensors}
    if source is not None:
        check_checkpoint(source)
        _check_source(source, manifest)
        for name, sqnr in _errors(directory, source, manifest, progress).items():
            tensors[name] = replace(tensors[name], sqnr=sqnr)
    return InspectReport(directory, "conversion", asdict(manifest.options), tuple(tensors.values()), manifest.left)


def _inspect_source(directory: Path) -> InspectReport:
    found = read_source(directory).tensors.values()
    tensors = [TensorFacts(t.name, t.file, t.dtype, t.shape, t.nbytes, "Hugging Face") for t in found]
    return InspectReport(directory, "checkpoint", {}, tuple(tensors))


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


def _facts(tensor: WrittenTensor) -> TensorFacts:
    details = [tensor.orientation] if tensor.layout != SOURCE else []
    if tensor.tp_rank is not None:
        details.append(f"rank {tensor.tp_rank}")
    if tensor.scale_layout is not None:
        details.append(f"{tensor.scale_layout} scales")
    if tensor.padding:
        details.append("padded " + ", ".join(f"{axis} by {count}" for axis, count in sorted(tensor.padding.items())))
    known = (tensor.name, tensor.file, tensor.dtype, tensor.shape, tensor.nbytes, tensor.layout)
    return TensorFacts(*known, ", ".join(details))


def _errors(directory: Path, source: Path, manifest: Manifest, progress: Progress | None) -> dict[str, float]:
    """Signal to noise of every tensor that holds converted values, the least of its experts."""
    weights = dict.fromkeys(t.weight for t in manifest.tensors if t.layout not in (SOURCE, *SCALES))
    if missing := weights.keys() - manifest.weights.keys():
        raise damaged(f"{directory}/{MANIFEST_FILE}", "a manifest with the pieces of every weight", repr(min(missing)))
    step = counting(progress, sum(piece.nbytes for weight in weights for piece in manifest.weights[weight]))
    errors: dict[str, float] = {}
    with open_tensors(source) as original, open_tensors(directory) as stored:
        comparison = Comparison(manifest, original, stored)
        for weight in weights:
            count = comparison.experts_of(weight)
            for expert in [None] if count is None else range(count):
                matrix_FK = comparison.original(weight, expert)
                for operand in comparison.operands(weight):
                    pair = comparison.pair(operand, matrix_FK, expert)
                    errors[pair.name] = _worse(errors.get(pair.name, math.inf), pair.sqnr)
                step(matrix_FK.numel() * matrix_FK.itemsize)
    return errors


def _worse(first: float, second: float) -> float:
    """The smaller of two, where NaN is smaller than every number."""
    return math.nan if math.isnan(first) or math.isnan(second) else min(first, second)


def _row(name: str, tensors: list[TensorFacts]) -> tuple[str, ...]:
    first = tensors[0]
    known = [tensor.sqnr for tensor in tensors if tensor.sqnr is not None]
    worst = known[0] if known else None
    for value in known[1:]:
        assert worst is not None
        worst = _worse(worst, value)
    # One line for several ranks cannot name one of them.
    told = [part for part in first.details.split(", ") if len(tensors) == 1 or not part.startswith("rank ")]
    return (
        printable(name, MAX_CELL),
        f"{len(tensors)}x",
        first.dtype,
        printable(str(list(first.shape)), MAX_CELL),
        first.layout,
        f"{sum(tensor.nbytes for tensor in tensors):,} B",
        "" if worst is None else f"SQNR {in_db(worst)}",
        ", ".join(told),
    )
