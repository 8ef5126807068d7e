"""What a finished conversion has besides its shards: index, side files and manifest; and whether one is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.config_json import rewritten_files
from hf_neuron_moe.convert.execute import Made
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.side_files import side_files
from hf_neuron_moe.convert.io.source import SourceCheckpoint, damaged
from hf_neuron_moe.convert.manifest import INDEX_OUT, MANIFEST_FILE, Manifest, WrittenTensor, index_json, load_manifest
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.convert.transaction.commit import clear, copy_file, held, is_free, partial_of, write_file
from hf_neuron_moe.convert.transaction.resume import Job
from hf_neuron_moe.errors import ConversionError, DestinationError, public


def finished_manifest(plan: ConversionPlan, destination: Path, *, force: bool = False) -> Manifest | None:
    """The manifest at `destination` where it is the very result of `plan`, of the source's very bytes; else None.

    A run that was killed after its last step leaves such a destination, and a partial folder to clear away. With
    `force`, a damaged result counts as none.
    """
    if not (destination / MANIFEST_FILE).is_file():
        return None
    try:
        manifest = load_manifest(destination)
        folder = plan.source.directory
        sizes = {file: (folder / file).stat().st_size for file in plan.source.files}
        ours = manifest.options == plan.options and _unsummed(manifest.tensors) == _unsummed(plan.tensors)
        if not ours or manifest.source_files != sizes:
            return None
        if manifest.source_sha256 != {file: hash_file(folder / file) for file in sizes}:
            return None
        files = dict.fromkeys(manifest.by_file(), "") | manifest.file_sha256
        present = {name for name in files if (destination / name).is_file()}
        damage = {name for name in files if name not in present or hash_file(destination / name) != files[name]}
        if damage:
            raise ConversionError(f"{len(damage)} missing or altered files, such as {min(damage)}")
    except ConversionError as error:
        if force:
            return None
        expected, got = "as it was when its conversion finished", str(error).removesuffix(".")
        fix = "Run `hf-neuron-moe verify` for details, or convert again with --force to replace it."
        raise DestinationError.about(str(destination), expected, got, fix) from error
    partial = partial_of(destination)
    if partial.exists() and is_free(partial):
        with held(partial, destination):
            clear(partial)
    return manifest


def _unsummed(tensors: Sequence[WrittenTensor]) -> list[WrittenTensor]:
    return [replace(tensor, checksum="") for tensor in tensors]


@public("convert")
def write_rest(plan: ConversionPlan, job: Job, made: Made) -> Manifest:
    """Write everything but the shards into the future folder, the manifest last."""
    files, manifest = files_beside(plan, made)
    job.drop_strangers({*made.files, *files})
    for name, content in files.items():
        _publish(job, name, content, manifest.file_sha256[name])
    _publish(job, MANIFEST_FILE, manifest.to_json().encode())
    return manifest


def files_beside(plan: ConversionPlan, made: Made) -> tuple[dict[str, bytes | Path], Manifest]:
    """Return every file beside the shards by its path in the folder, its content or which to copy, and the manifest."""
    changed, replaced = rewritten_files(plan)
    index = index_json({}, plan.tensors, {tensor.name: tensor.file for tensor in plan.tensors})
    files: dict[str, bytes | Path] = {**side_files(plan.source.directory), **changed, INDEX_OUT: index}
    checksums = {name: _sha256(content) for name, content in files.items()}
    source = plan.source
    manifest = Manifest(
        tool_version=__version__,
        options=plan.options,
        source_files={file: (source.directory / file).stat().st_size for file in source.files},
        source_metadata={file: dict(metadata) for file, metadata in source.metadata.items()},
        weights=plan.pieces,
        tensors=tuple(replace(tensor, checksum=made.tensors[tensor.name]) for tensor in plan.tensors),
        rounded=dict(made.rounded),
        nonfinite=dict(made.nonfinite),
        source_sha256=made.sources,
        file_sha256={**made.files, **checksums},
        replaced_files=replaced,
        left=dict(plan.left),
        source_index=_index_metadata(source),
        source_format=source.format,
        networks=dict(plan.networks),
    )
    return files, manifest


def _index_metadata(source: SourceCheckpoint) -> dict[str, Any] | None:
    """What the source's index says, for an export: not the bytes of codes, which become other tensors."""
    if source.index_metadata is None or source.format is None:
        return None if source.index_metadata is None else dict(source.index_metadata)
    return {name: value for name, value in source.index_metadata.items() if name != "total_size"}


def _publish(job: Job, name: str, content: bytes | Path, sha256: str = "") -> None:
    path = job.temporary(name)
    if isinstance(content, bytes):
        write_file(path, content)
    elif copy_file(content, path) != sha256:
        raise damaged(name, "left alone during the conversion", "a file that was changed meanwhile")
    job.publish(name)


def _sha256(content: bytes | Path) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else hash_file(content)
