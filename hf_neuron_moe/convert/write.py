"""Carries out a conversion: bounded memory, several threads, the output folder complete or absent."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.config_json import rewritten_files
from hf_neuron_moe.convert.execute import Made, Progress, bytes_of_all, make_shards, shards_of
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import check_checkpoint
from hf_neuron_moe.convert.io.hub import resolve_source
from hf_neuron_moe.convert.io.nonfinite import ON_NONFINITE
from hf_neuron_moe.convert.io.side_files import side_files
from hf_neuron_moe.convert.io.source import damaged, nbytes_of
from hf_neuron_moe.convert.left import check_nothing_left, left_notes
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, Manifest, Piece, WrittenTensor, load_manifest
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan, plan_conversion
from hf_neuron_moe.convert.transaction.commit import (
    check_destination,
    clear,
    copy_file,
    disk_errors,
    held,
    is_free,
    partial_of,
    take_name,
    write_file,
)
from hf_neuron_moe.convert.transaction.parts import check_part, part_of_shards
from hf_neuron_moe.convert.transaction.resume import Job, opened
from hf_neuron_moe.errors import ConfigError, ConversionError, DestinationError, DiskError, NeuronMoEWarning, public

INDEX_OUT = "neuron.safetensors.index.json"
"""Not transformers' names: a stock ``from_pretrained`` must stop here instead of misreading another layout."""


@public("convert")
def convert_checkpoint(
    source: Path | str,
    destination: Path,
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    workers: int | None = None,
    on_nonfinite: str = "error",
    strict: bool = False,
    progress: Progress | None = None,
) -> Manifest | None:
    """Convert a checkpoint.

    Modules that look like MLPs or experts and that no kernel computes stay in their source form: ``manifest.left``
    names them, and a :class:`NeuronMoEWarning` tells of them.

    Sources wider than bf16 lose bits where their values need them: the manifest counts those values per tensor
    (``manifest.rounded``), and a :class:`NeuronMoEWarning` tells when ``precision="bf16"`` rounded any.

    A run that fails leaves nothing behind, unless `resume` or `part` is given: then finished shards stay in
    ``DST.partial`` for the next run. So they do when the process is killed.

    Args:
        source: folder with ``config.json`` and safetensors files, which is never written to, or a Hub id.
        destination: folder to make. Its files are shards ``neuron-*.safetensors``, an index, the source's
            configuration and tokenizer files, and the manifest.
        options: what to write.
        force: replace an earlier conversion at `destination` once the new one is complete.
        resume: go on with an unfinished run of the same source and options; a new run where there is none. A finished
            one is read and compared with its checksums.
        part: (i, n) makes the i-th of n disjoint sets of shards only, i from 1 to n. Other processes, here or
            elsewhere, make the others; :func:`hf_neuron_moe.convert.finalize_checkpoint` puts them together.
        workers: threads, one per core if None; fewer where they would together hold more than twice the largest weight
            and 128 MiB. The bytes written do not depend on it.
        on_nonfinite: ``"error"`` refuses NaN and infinite weights, ``"keep"`` converts them as they are.
        strict: refuse a model of which a module would stay in its source form.
        progress: called with bytes written and bytes in all, on the calling thread.

    Returns:
        The manifest that was written; None for a part.

    Raises:
        SourceDamageError: the source's files contradict themselves, or hold weights that are not finite.
        DestinationError: the destination is taken or cannot be used.
        DiskError: the operating system refused a call.
        ConversionError: the source is no checkpoint that can be converted.
        ConfigError: an option has a value outside its documented set.

        In all these cases `destination` is what it was before.
    """
    options = options or ConvertOptions()
    _check_arguments(workers, on_nonfinite)
    check_part(part)
    with disk_errors(destination):
        folder = resolve_source(source)
        check_checkpoint(folder)
        if not resume:
            check_destination(destination, folder, force=force)
        plan = plan_conversion(folder, options)
        if strict:
            check_nothing_left(plan.left)
        if resume and part is None and (manifest := finished_manifest(plan, destination, force=force)) is not None:
            return manifest
        check_destination(destination, folder, force=force)
        parts = part[1] if part is not None else None
        with opened(destination, plan, resume=resume, part=part is not None, parts=parts) as job:
            shards = part_of_shards(shards_of(plan), part)
            _check_space(job, shards)
            made = make_shards(
                plan, job, shards, workers=workers, progress=progress, whole=part is None, on_nonfinite=on_nonfinite
            )
            if part is not None:
                job.leave()
                return None
            manifest = write_rest(plan, job, made)
            take_name(job.home, destination)
            clear(job.home)
    warn_of_losses(manifest)
    return manifest


@public("convert")
def _check_arguments(workers: int | None, on_nonfinite: str) -> None:
    if workers is not None and workers < 1:
        raise ConfigError.about("workers", "a positive number of threads", workers, "Leave it out for one per core.")
    if on_nonfinite not in ON_NONFINITE:
        raise ConfigError.about(
            "on_nonfinite", f"one of {', '.join(ON_NONFINITE)}", repr(on_nonfinite), "Choose one of these."
        )


@public("convert")
def _check_space(job: Job, shards: dict[str, list[WrittenTensor]]) -> None:
    """Refuse before hours of work what the disk cannot hold."""
    needed = bytes_of_all(tensors for file, tensors in shards.items() if job.shard_record(file) is None)
    free = shutil.disk_usage(job.home).free
    if needed > free:
        raise DiskError.about(
            str(job.home.parent),
            f"on a disk with {needed:,} free bytes",
            f"one with {free:,}",
            "Free some space or choose another destination.",
        )


def finished_manifest(plan: ConversionPlan, destination: Path, *, force: bool = False) -> Manifest | None:
    """The manifest at `destination` where it is the very result of `plan`, of the source's very bytes; else None.

    A run that was killed after its last step leaves such a destination, and a partial folder to clear away. With
    `force`, a damaged result counts as none.
    """
    if not (destination / MANIFEST_FILE).is_file():
        return None
    try:
        manifest = load_manifest(destination)
    except ConversionError as error:
        if force:
            return None
        raise _damaged_result(destination, str(error)) from error
    planned = [replace(tensor, checksum="") for tensor in plan.tensors]
    if manifest.options != plan.options or [replace(tensor, checksum="") for tensor in manifest.tensors] != planned:
        return None
    folder = plan.source.directory
    sizes = {file: (folder / file).stat().st_size for file in plan.source.files}
    if manifest.source_files != sizes or manifest.source_sha256 != {file: hash_file(folder / file) for file in sizes}:
        return None
    if damage := _damaged_files(destination, manifest):
        if force:
            return None
        raise _damaged_result(destination, f"{len(damage)} missing or altered files, such as {damage[0]}")
    partial = partial_of(destination)
    if partial.exists() and is_free(partial):
        with held(partial, destination):
            clear(partial)
    return manifest


def _damaged_result(destination: Path, got: str) -> DestinationError:
    return DestinationError.about(
        str(destination),
        "as it was when its conversion finished",
        got.removesuffix("."),
        "`hf-neuron-moe verify` tells more; convert again with --force to replace it.",
    )


def _damaged_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files of a finished conversion that are missing or do not have the bytes that were written."""
    files = {**dict.fromkeys((tensor.file for tensor in manifest.tensors), ""), **manifest.file_sha256}
    return sorted(
        name
        for name, sha256 in files.items()
        if not (directory / name).is_file() or hash_file(directory / name) != sha256
    )


def write_rest(plan: ConversionPlan, job: Job, made: Made) -> Manifest:
    """Write everything but the shards into the future folder, the manifest last."""
    files, manifest = files_beside(plan, made)
    job.drop_strangers({*made.files, *files})
    for name, content in files.items():
        _publish(job, name, content, manifest.file_sha256[name])
    _publish(job, MANIFEST_FILE, manifest.to_json().encode())
    return manifest


@public("convert")
def files_beside(plan: ConversionPlan, made: Made) -> tuple[dict[str, bytes | Path], Manifest]:
    """Make the content of every file beside the shards, or say which to copy, by its path in the folder.

    Returns:
        These, and the manifest, which knows all their checksums.
    """
    tensors = [replace(tensor, checksum=made.tensors[tensor.name]) for tensor in plan.tensors]
    changed, replaced = rewritten_files(plan)
    files: dict[str, bytes | Path] = {**side_files(plan.source.directory), **changed}
    files[INDEX_OUT] = _index(tensors).encode()
    checksums = {name: _sha256(content) for name, content in files.items()}
    manifest = _manifest(plan, tensors, made)
    return files, replace(manifest, replaced_files=replaced, file_sha256={**made.files, **checksums})


@public("convert")
def _publish(job: Job, name: str, content: bytes | Path, sha256: str = "") -> None:
    path = job.temporary(name)
    if isinstance(content, bytes):
        write_file(path, content)
    elif copy_file(content, path) != sha256:
        raise damaged(name, "left alone during the conversion", "a file that was changed meanwhile")
    job.publish(name)


def _sha256(content: bytes | Path) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else hash_file(content)


def warn_of_losses(manifest: Manifest) -> None:
    """Warn when a bf16 conversion rounded values, and when modules stayed in their source form."""
    for note in left_notes(manifest.left):
        warnings.warn(f"convert: {note}", NeuronMoEWarning, stacklevel=3)
    if manifest.options.precision == "bf16" and manifest.rounded:
        warnings.warn(f"convert: {rounding_note(manifest)}", NeuronMoEWarning, stacklevel=3)


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


def nonfinite_note(manifest: Manifest) -> str:
    """Say in one sentence how many NaN and infinite values a conversion kept; empty where it kept none."""
    kept = manifest.nonfinite or {}
    if not kept:
        return ""
    effect = "they are in the weights as they were."
    if manifest.options.quantized:
        effect = (
            "in MX such a value spoils its whole block, whose other values become zero or NaN, and an infinity may "
            "turn into the largest finite code under the largest scale."
        )
    return (
        f"{sum(kept.values()):,} NaN or infinite values in {len(kept)} tensors (first: {min(kept)}) were kept: {effect}"
    )


def _manifest(plan: ConversionPlan, tensors: list[WrittenTensor], made: Made) -> Manifest:
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
        rounded=dict(made.rounded),
        nonfinite=dict(made.nonfinite),
        source_sha256=made.sources,
        file_sha256=made.files,
        left=dict(plan.left),
        source_index=None if source.index_metadata is None else dict(source.index_metadata),
    )


def _index(tensors: list[WrittenTensor]) -> str:
    total = sum(nbytes_of(tensor.dtype, tensor.shape) for tensor in tensors)
    content = {"metadata": {"total_size": total}, "weight_map": {tensor.name: tensor.file for tensor in tensors}}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
