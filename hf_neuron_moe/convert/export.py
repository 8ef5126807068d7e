"""The way back: from a converted checkpoint to the original tensor names, shapes and dtypes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.audit.manifest_check import disagreements
from hf_neuron_moe.convert.audit.verify_files import altered_tensors
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import check_conversion, check_folder
from hf_neuron_moe.convert.io.shard import Entry, ShardWriter
from hf_neuron_moe.convert.io.side_files import WEIGHT_SUFFIXES, make_parents, side_files
from hf_neuron_moe.convert.io.source import INDEX_FILE, SINGLE_FILE, read_header
from hf_neuron_moe.convert.io.tensors import TensorReader, open_tensors
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, SOURCE
from hf_neuron_moe.convert.layout.relayout import restore
from hf_neuron_moe.convert.manifest import (
    MANIFEST_FILE,
    Manifest,
    Piece,
    WrittenTensor,
    grouped,
    index_json,
    load_manifest,
)
from hf_neuron_moe.convert.transaction.commit import (
    check_destination,
    check_name,
    check_space,
    committed_folder,
    copy_file,
    write_file,
)
from hf_neuron_moe.convert.workers import Progress, counting
from hf_neuron_moe.errors import ConversionError, SourceDamageError, counted, known_names, public

NOTE_FILE = "neuron_moe_export.json"  # Lies in exports whose values are not all the original's bits


@dataclass(frozen=True)
class ExportReport:
    """What came back."""

    tensors: int  # Number of tensors written
    inexact: tuple[str, ...]  # Source tensors whose values are not the original's bits: they were quantized or rounded
    statement: tuple[str, ...] = ()  # Sentences that say what cannot come back, and why

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"tensors": self.tensors, "inexact_tensors": len(self.inexact), "statement": list(self.statement)}


@public("export")
@known_names("export")
def export_checkpoint(
    converted: Path, destination: Path, *, allow_inexact: bool = False, progress: Progress | None = None
) -> ExportReport:
    """Rebuild the checkpoint that a conversion was made of.

    Tensors that were bf16 come back with the same bits from bf16 layouts. From MX only the dequantized values can come
    back, and from bf16 layouts of fp32 or fp16 sources the rounded ones where bf16 did not hold them. Such an export
    says so in its report and in a file :data:`NOTE_FILE`, which an exact one does not have. Of a quantized source the
    decoded values come back in bf16 under the names of the model's parameters, never its codes; this is said too.

    Every file is compared with the checksum that the manifest has for it before anything of it is used.

    Args:
        converted: folder that :func:`hf_neuron_moe.convert.convert_checkpoint` wrote.
        destination: folder to make; where this fails, it is what it was before.
        allow_inexact: also export what cannot come back bit for bit.
        progress: called after each tensor with bytes written and bytes in all.
    """
    check_folder(converted, "converted")
    check_folder(destination, "destination")
    check_name(destination)
    check_conversion(converted, "export")
    check_destination(destination, converted, force=None)
    manifest = load_manifest(converted)
    stored = _check_files(converted, manifest)
    quantized, rounded = _lost(manifest, stored)
    gone = {*quantized, *rounded}
    inexact = tuple(piece.source for piece in manifest.pieces if piece.source in gone)
    if inexact and not allow_inexact:
        got = f"{counted(len(inexact), 'tensor')} rounded or quantized, such as {inexact[0]}"
        fix = "Keep the original checkpoint; --allow-inexact exports the rounded or dequantized values."
        raise ConversionError.about(str(converted), "a conversion whose source can come back bit for bit", got, fix)
    statement = _statement(manifest, quantized, rounded)
    step = counting(progress, sum(piece.nbytes for piece in manifest.pieces))
    outputs = [(weight, piece) for weight, pieces in manifest.weights.items() for piece in pieces]
    unchecked = manifest.by_file()
    with committed_folder(destination, converted) as folder, open_tensors(converted) as reader:
        check_space(folder, sum(piece.nbytes for _, piece in outputs))
        for file, parts in sorted(grouped(outputs, lambda part: part[1].file).items()):
            entries = (Entry(piece.source, piece.dtype, piece.shape) for _, piece in parts)
            with ShardWriter(folder / file, entries, manifest.source_metadata.get(file, {})) as writer:
                for weight, piece in parts:
                    for shard in sorted({tensor.file for tensor in stored[weight]} & unchecked.keys()):
                        # Right before it is used, while the cache has it.
                        _check_bytes(converted / shard, unchecked.pop(shard), manifest.file_sha256.get(shard))
                    writer.write(piece.source, _restored(piece, stored[weight], reader))
                    step(piece.nbytes)
        _write_side_files(converted, folder, manifest, exact=not statement)
        if statement:
            note = {"tool_version": __version__, "statement": statement, "inexact": inexact}
            write_file(folder / NOTE_FILE, (json.dumps(note, indent=1) + "\n").encode())
    return ExportReport(len(outputs), inexact, statement)


def _check_bytes(path: Path, tensors: list[WrittenTensor], expected: str | None) -> None:
    """Compare a shard with its checksum; manifests of format version 1 have none of files, only of tensors."""
    if expected is not None and hash_file(path) == expected:
        return
    if altered := altered_tensors(path, tensors):
        more = f" and {counted(len(altered) - 1, 'other tensor')}" if len(altered) > 1 else ""
        raise _disagrees(path.name, f"other bytes of {altered[0]}{more}")
    if expected is not None:
        raise _disagrees(path.name, "other bytes in its header")


def _restored(piece: Piece, tensors: list[WrittenTensor], reader: TensorReader) -> torch.Tensor:
    if tensors[0].layout == SOURCE:
        return reader.read(tensors[0].file, tensors[0].name)

    def read(index: int, expert: int | None) -> torch.Tensor:
        return reader.read(tensors[index].file, tensors[index].name, expert)

    return restore(piece, tensors, read)


def _check_files(converted: Path, manifest: Manifest) -> dict[str, list[WrittenTensor]]:
    """Compare shards with the manifest and group its tensors by weight."""
    stored = manifest.by_weight()
    bad = sorted(name for name in manifest.replaced_files if name.endswith(WEIGHT_SUFFIXES) or name == NOTE_FILE)
    if bad:
        raise _disagrees(MANIFEST_FILE, f"file names {bad}")
    sources = Counter(piece.source for piece in manifest.pieces)
    if twice := [name for name, count in sources.items() if count > 1]:
        raise _disagrees(MANIFEST_FILE, f"more than one place of {twice[0]}")
    if stored.keys() != manifest.weights.keys():
        raise _disagrees(MANIFEST_FILE, "weights without tensors, or tensors without weight")
    for weight, what in disagreements(manifest):
        raise _disagrees(MANIFEST_FILE, f"{weight}, which is {what}")
    for file, group in manifest.by_file().items():
        path, tensors = converted / file, {tensor.name: (tensor.dtype, tensor.shape) for tensor in group}
        if not path.is_file():
            raise _disagrees(file, "no such file")
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path)[0].items()}
        if found != tensors:
            wrong = sorted(name for name in found.keys() | tensors.keys() if found.get(name) != tensors.get(name))
            raise _disagrees(file, f"something else for {wrong[0]}")
    return stored


def _disagrees(file: str, got: str) -> SourceDamageError:
    fix = "The conversion is damaged: `hf-neuron-moe verify` lists every difference; convert the original again."
    return SourceDamageError.about(file, "what the manifest describes", got, fix)


def _lost(manifest: Manifest, stored: dict[str, list[WrittenTensor]]) -> tuple[dict[str, str], list[str]]:
    """Source tensors whose bits are gone: the quantized ones, with their weights, and the rounded ones."""
    quantized, rounded = dict[str, str](), list[str]()
    for weight, pieces in manifest.weights.items():
        if any(tensor.layout in PERMUTED_WORDS.values() for tensor in stored[weight]):
            continue
        if any(tensor.layout in SCALES for tensor in stored[weight]):
            quantized |= {piece.source: weight for piece in pieces}
        elif stored[weight][0].layout != SOURCE:
            rounded += [piece.source for piece in pieces if manifest.was_rounded(piece)]
    return quantized, rounded


def _statement(manifest: Manifest, quantized: dict[str, str], rounded: list[str]) -> tuple[str, ...]:
    """Say in sentences what does not come back with the original's bits."""
    sentences = []
    if manifest.source_format is not None:
        sentences.append(
            f"{len(manifest.encodings)} tensors (first: {min(manifest.encodings, default='')}) were codes "
            f"({manifest.source_format.method}) in the source. They come back as decoded values in bf16."
        )
    for options, sources in grouped(quantized, lambda source: manifest.options.of(quantized[source])).items():
        kind = {"mxfp8": "MXFP8 (e4m3 codes)", "mxfp4": "MXFP4 (e2m1 codes)"}[options.precision]
        sentences.append(
            f"{len(sources)} tensors (first: {sources[0]}) went through {kind} with one power-of-two scale per 32 "
            f"values (scale rule {options.rule}). They come back as code times scale, rounded to their original dtype: "
            "the values the kernels compute with. The original values are gone; keep the original checkpoint."
        )
    if rounded:
        sentences.append(
            f"{len(rounded)} tensors (first: {rounded[0]}) were rounded to bf16 and come back as the rounded values."
        )
    return tuple(sentences)


def _write_side_files(converted: Path, folder: Path, manifest: Manifest, *, exact: bool) -> None:
    names = {*side_files(converted), *manifest.file_sha256}
    for name in sorted(names - {MANIFEST_FILE} - manifest.replaced_files.keys()):
        if name.endswith(WEIGHT_SUFFIXES) or (name == NOTE_FILE and not exact):
            continue
        if not (converted / name).is_file():
            raise _disagrees(name, "no such file")
        if manifest.file_sha256.get(name) not in (None, copy_file(converted / name, make_parents(folder, name))):
            raise _disagrees(name, "other bytes")
    for name, text in sorted(manifest.replaced_files.items()):
        if text is not None:
            write_file(make_parents(folder, name), text.encode())
    pieces = manifest.pieces
    if {piece.file for piece in pieces} != {SINGLE_FILE}:
        index = index_json(manifest.source_index or {}, pieces, {piece.source: piece.file for piece in pieces})
        write_file(folder / INDEX_FILE, index)
