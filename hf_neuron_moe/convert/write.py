"""Carries out a conversion: one weight in memory at a time, the output folder complete or absent."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.commit import check_destination, committed_folder, write_file
from hf_neuron_moe.convert.folder import check_checkpoint
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, ConvertOptions, Manifest, Piece, WrittenTensor
from hf_neuron_moe.convert.plan import ConversionPlan, plan_conversion
from hf_neuron_moe.convert.read import TensorReader, open_tensors
from hf_neuron_moe.convert.relayout import SOURCE, Scratch, scratch_bytes, store, stored_forms
from hf_neuron_moe.convert.shard import Entry, ShardWriter
from hf_neuron_moe.convert.source import inside, nbytes_of
from hf_neuron_moe.errors import NeuronMoEWarning

INDEX_OUT = "neuron.safetensors.index.json"
"""Not transformers' names: a stock ``from_pretrained`` must stop here instead of misreading another layout."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


def convert_checkpoint(
    source: Path,
    destination: Path,
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a local checkpoint folder.

    Sources wider than bf16 lose bits where their values need them: the manifest counts those values per tensor
    (``manifest.rounded``), and a :class:`NeuronMoEWarning` tells when ``precision="bf16"`` rounded any.

    Args:
        source: folder with ``config.json`` and safetensors files; never written to.
        destination: folder to make. Its files are shards ``neuron-*.safetensors``, an index, the source's
            configuration and tokenizer files, and the manifest.
        options: target precision and layout.
        force: replace an earlier conversion at `destination` once the new one is complete.
        progress: called after each tensor.

    Returns:
        The manifest that was written.

    Raises:
        ConversionError: the source or the destination is unusable; `destination` is then what it was before.
        ConfigError: an option has a value outside its documented set.
    """
    options = options or ConvertOptions()
    check_checkpoint(source, "convert")
    check_destination(destination, source, force=force)
    plan = plan_conversion(source, options)
    with committed_folder(destination) as folder:
        rounded: Counter[str] = Counter()
        tensors = _write_shards(plan, folder, progress or (lambda done, total: None), rounded)
        for path in _side_files(source):
            write_file(folder / path.name, path.read_bytes())
        write_file(folder / INDEX_OUT, _index(tensors).encode())
        manifest = _manifest(plan, tensors, rounded)
        write_file(folder / MANIFEST_FILE, manifest.to_json().encode())
    if options.precision == "bf16" and rounded.total():
        warnings.warn(f"convert: {rounding_note(manifest)}", NeuronMoEWarning, stacklevel=2)
    return manifest


def rounding_note(manifest: Manifest) -> str:
    """Say in one sentence how many values a conversion rounded to bf16; empty where it rounded none."""
    rounded = manifest.rounded or {}
    if not rounded:
        return ""
    pieces = {piece.source: piece for group in manifest.weights.values() for piece in group}
    values = sum(math.prod(pieces[name].shape) for name in rounded)
    kinds = "/".join(sorted({pieces[name].dtype for name in rounded}))
    return (
        f"{sum(rounded.values()):,} of {values:,} {kinds} values in {len(rounded)} tensors (first: {min(rounded)}) do "
        "not fit bf16 and were rounded; keep the original checkpoint, export cannot bring them back."
    )


def _write_shards(plan: ConversionPlan, folder: Path, progress: Progress, rounded: Counter[str]) -> list[WrittenTensor]:
    done: list[WrittenTensor] = []
    total, written = plan.output_bytes, 0
    scratch = Scratch(max(scratch_bytes(w, stored_forms(w, plan.options)) for w in plan.weights.values()))
    with open_tensors(plan.source.directory) as reader:
        for file in dict.fromkeys(tensor.file for tensor in plan.tensors):
            shard = [tensor for tensor in plan.tensors if tensor.file == file]
            layouts = {tensor.name: tensor.layout for tensor in shard}
            metadata = {"format": "pt", "hf_neuron_moe.layouts": json.dumps(layouts, sort_keys=True)}
            with ShardWriter(folder / file, (Entry(t.name, t.dtype, t.shape) for t in shard), metadata) as writer:
                for weight in dict.fromkeys(tensor.weight for tensor in shard):
                    group = [tensor for tensor in shard if tensor.weight == weight]
                    for tensor, data in zip(group, _data_of(weight, group, plan, reader, scratch, rounded)):
                        done.append(replace(tensor, sha256=writer.write(tensor.name, data)))
                        written += nbytes_of(tensor.dtype, tensor.shape)
                        progress(written, total)
    return done


def _data_of(
    name: str,
    group: list[WrittenTensor],
    plan: ConversionPlan,
    reader: TensorReader,
    scratch: Scratch,
    rounded: Counter[str],
) -> list[torch.Tensor]:
    """The tensors that store one weight, or the copied tensor itself."""
    if group[0].layout == SOURCE:
        return [reader.read(plan.copied[name].file, name)]

    def read(piece: Piece, expert: int | None) -> torch.Tensor:
        return reader.read(piece.file, piece.source, expert)

    weight = plan.weights[name]
    return store(weight, stored_forms(weight, plan.options), read, scratch, rounded)


def _manifest(plan: ConversionPlan, tensors: list[WrittenTensor], rounded: Counter[str]) -> Manifest:
    source = plan.source
    weights = {name: weight.pieces for name, weight in plan.weights.items()}
    weights |= {t.name: (Piece(t.name, t.file, t.dtype, t.shape),) for t in plan.copied.values()}
    return Manifest(
        tool_version=__version__,
        options=plan.options,
        source_files={file: (source.directory / file).stat().st_size for file in source.files},
        source_metadata={file: dict(metadata) for file, metadata in source.metadata.items()},
        weights=weights,
        tensors=tuple(tensors),
        rounded={name: count for name, count in rounded.items() if count},
    )


def _index(tensors: list[WrittenTensor]) -> str:
    total = sum(nbytes_of(tensor.dtype, tensor.shape) for tensor in tensors)
    content = {"metadata": {"total_size": total}, "weight_map": {tensor.name: tensor.file for tensor in tensors}}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _side_files(source: Path) -> list[Path]:
    """Configuration, tokenizer and similar files beside the weights."""
    return sorted(
        inside(source, path.name)
        for path in source.iterdir()
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != MANIFEST_FILE
    )
