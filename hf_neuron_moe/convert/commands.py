"""Carries out a conversion: bounded memory, several threads, the output folder complete or absent.

What a caller names is checked here once: source folder or Hub id, destination, part, number of threads.
"""

from __future__ import annotations

from pathlib import Path

from hf_neuron_moe.checks import Rule, check_rules, is_whole, shown
from hf_neuron_moe.config import ON_NONFINITE
from hf_neuron_moe.convert.execute import Made, bytes_of, make_shards
from hf_neuron_moe.convert.io.folder import check_folder, checkpoint_folder
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, Manifest, WrittenTensor, load_manifest
from hf_neuron_moe.convert.notes import check_nothing_left, warn_of_losses
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan, plan_of
from hf_neuron_moe.convert.result import finished_manifest, write_rest
from hf_neuron_moe.convert.transaction.commit import (
    check_destination,
    check_name,
    check_space,
    clear,
    disk_errors,
    partial_of,
    take_name,
)
from hf_neuron_moe.convert.transaction.parts import check_part, part_of_shards, parts_to_repeat
from hf_neuron_moe.convert.transaction.resume import Job, opened, options_of, parts_of
from hf_neuron_moe.convert.workers import Progress
from hf_neuron_moe.errors import ConversionError, DestinationError, known_names, public


def check_call(destination: Path, options: ConvertOptions | None, workers: int | None) -> None:
    """Raise ConfigError for a destination, options or a number of threads that is none."""
    check_folder(destination, "destination")
    check_name(destination)
    threads = workers is None or (is_whole(workers) and workers >= 1)
    fix = "Make one with hf_neuron_moe.convert.ConvertOptions(...)."
    fits = options is None or isinstance(options, ConvertOptions)
    check_rules(
        [
            Rule(fits, "options", "a ConvertOptions or None", shown(options), fix),
            Rule(threads, "workers", "a positive number of threads", shown(workers), "Leave it out for one per core."),
        ]
    )


@public("convert")
@known_names("convert")
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
    names them. Values of wider sources that bf16 does not hold lose bits: ``manifest.rounded`` counts them per tensor.
    A :class:`NeuronMoEWarning` tells of both, of the latter with ``precision="bf16"``.

    A run that fails leaves `destination` as it was and nothing behind, unless `resume` or `part` is given: then
    finished shards stay in ``DST.partial`` for the next run. So they do when the process is killed.

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
    """
    check_call(destination, options, workers)
    kinds = f"one of {', '.join(ON_NONFINITE)}"
    check_rules([Rule(on_nonfinite in ON_NONFINITE, "on_nonfinite", kinds, repr(on_nonfinite), "Choose one of these.")])
    check_part(part)
    with disk_errors(destination):
        plan = plan_for(source, destination, options, force=force, strict=strict, resume=resume)
        if resume:
            if part is None and (manifest := finished_manifest(plan, destination, force=force)) is not None:
                return manifest
            if not force and (destination / MANIFEST_FILE).is_file():
                expected, got = "unfinished, or a conversion with this source, version and options", "one of others"
                fix = "Choose another name, or use --force to replace it."
                raise DestinationError.about(str(destination), expected, got, fix)
            check_destination(destination, plan.source.directory, force=force)
        parts = part[1] if part is not None else None
        with opened(destination, plan, force=force, resume=resume, part=part is not None, parts=parts) as job:
            shards = part_of_shards(plan.shards, part)
            _check_space(job, shards)
            made = make_shards(
                plan, job, shards, workers=workers, progress=progress, whole=part is None, on_nonfinite=on_nonfinite
            )
            if part is not None:
                job.leave()
                return None
            manifest = _commit(plan, job, made, destination, force=force)
    warn_of_losses(manifest)
    return manifest


def plan_for(
    source: Path | str,
    destination: Path,
    options: ConvertOptions | None,
    *,
    force: bool,
    strict: bool,
    resume: bool = False,
) -> ConversionPlan:
    """Find and check a source, and a destination if it is not one to go on with, and plan the conversion."""
    folder = checkpoint_folder(source)
    if not resume:
        check_destination(destination, folder, force=force)
    plan = plan_of(folder, options or ConvertOptions())
    if strict:
        left = {name: module for name, module in plan.left.items() if name not in plan.allowed}
        check_nothing_left(left, plan.weights)
    return plan


def _check_space(job: Job, shards: dict[str, list[WrittenTensor]]) -> None:
    """Refuse before hours of work what the disk cannot hold."""
    needed = bytes_of(*(tensors for file, tensors in shards.items() if job.shard_record(file) is None))
    check_space(job.home, needed)


def _commit(plan: ConversionPlan, job: Job, made: Made, destination: Path, *, force: bool) -> Manifest:
    manifest = write_rest(plan, job, made)
    check_destination(destination, plan.source.directory, force=force)
    take_name(job.home, destination)
    clear(job.home)
    return manifest


@public("finalize")
@known_names("finalize")
def finalize_checkpoint(
    source: Path | str,
    destination: Path,
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Check that all shards of a conversion are there and right, and let it become `destination`.

    The result is byte for byte what one :func:`hf_neuron_moe.convert.convert_checkpoint` without parts writes. Parts
    are kept when this fails; calling it again after it succeeded changes nothing.

    Args:
        source: what the parts were made of.
        destination: what the parts were made for.
        options: what the parts were made with; None takes it from them.
        force: replace an earlier conversion.
        workers: threads that read the shards back, one per core if None.
        progress: called with bytes checked and bytes in all.
    """
    check_call(destination, options, workers)
    with disk_errors(destination):
        folder = checkpoint_folder(source)
        found = options_of(destination)
        if found is None and (destination / MANIFEST_FILE).is_file():
            plan = plan_of(folder, load_manifest(destination).options)
            if (manifest := finished_manifest(plan, destination)) is not None:
                return manifest
        if found is None:
            got = f"no unfinished conversion {partial_of(destination)}"
            fix = "Make the parts first, with `hf-neuron-moe convert --part I/N`."
            raise DestinationError.about(str(destination), "what parts of a conversion were made for", got, fix)
        plan = plan_of(folder, options or found)
        if (manifest := finished_manifest(plan, destination, force=force)) is not None:
            return manifest
        check_destination(destination, folder, force=force)
        with opened(destination, plan, force=force, resume=True, part=False) as job:
            shards = plan.shards
            made = make_shards(
                plan, job, shards, workers=workers, progress=progress, only_check=True, on_nonfinite="keep"
            )
            if missing := [file for file in shards if file not in made.files]:
                expected = f"complete, all {len(shards)} shards made of this source"
                got = f"{len(missing)} missing or damaged, such as {missing[0]}"
                fix = "Run the same `hf-neuron-moe convert` with --resume"
                if (count := parts_of(job)) is not None:
                    parts = [f"{index}/{count}" for index in parts_to_repeat(shards, missing, count)]
                    several = f" and {len(parts) - 8} more" if len(parts) > 8 else ""
                    fix = f"Run `hf-neuron-moe convert` again with --part {', '.join(parts[:8])}{several}"
                raise ConversionError.about(str(destination), expected, got, f"{fix}; what is finished is kept.")
            manifest = _commit(plan, job, made, destination, force=force)
    warn_of_losses(manifest)
    return manifest
