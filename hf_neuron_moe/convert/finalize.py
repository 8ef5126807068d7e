"""Puts the parts of a conversion together (see :mod:`hf_neuron_moe.convert.transaction.parts`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hf_neuron_moe.convert.execute import Progress, make_shards, shards_of
from hf_neuron_moe.convert.io.folder import check_checkpoint
from hf_neuron_moe.convert.io.hub import resolve_source
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, Manifest, load_manifest
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import plan_conversion
from hf_neuron_moe.convert.transaction.commit import check_destination, clear, disk_errors, partial_of, take_name
from hf_neuron_moe.convert.transaction.parts import parts_to_repeat
from hf_neuron_moe.convert.transaction.resume import opened, options_of, parts_of
from hf_neuron_moe.convert.write import finished_manifest, warn_of_losses, write_rest
from hf_neuron_moe.errors import ConversionError, DestinationError, public


@public("finalize")
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

    Raises:
        ConversionError: a shard is missing, has other bytes than its part recorded, or was made of another source.
        DestinationError: there are no parts, they belong to another conversion, or `destination` is taken.
        DiskError: the operating system refused a call.
    """
    with disk_errors(destination):
        folder = resolve_source(source)
        check_checkpoint(folder)
        found = options_of(destination)
        if found is None and (destination / MANIFEST_FILE).is_file():
            plan = plan_conversion(folder, load_manifest(destination).options)
            if (manifest := finished_manifest(plan, destination)) is not None:
                return manifest
        if found is None:
            raise DestinationError.about(
                str(destination),
                "what parts of a conversion were made for",
                f"no unfinished conversion {partial_of(destination)}",
                "Make the parts first, with `hf-neuron-moe convert --part I/N`.",
            )
        plan = plan_conversion(folder, options or found)
        if (manifest := finished_manifest(plan, destination, force=force)) is not None:
            return manifest
        check_destination(destination, folder, force=force)
        with opened(destination, plan, resume=True, part=False) as job:
            shards = shards_of(plan)
            made = make_shards(
                plan, job, shards, workers=workers, progress=progress, only_check=True, on_nonfinite="keep"
            )
            missing = [file for file in shards if file not in made.files]
            if missing:
                raise ConversionError.about(
                    str(destination),
                    f"complete, all {len(shards)} shards made of this source",
                    f"{len(missing)} missing or damaged, such as {missing[0]}",
                    f"{_what_to_run(shards, missing, parts_of(job))}; what is finished is kept.",
                )
            manifest = write_rest(plan, job, made)
            take_name(job.home, destination)
            clear(job.home)
    warn_of_losses(manifest)
    return manifest


def _what_to_run(shards: Iterable[str], missing: list[str], count: int | None) -> str:
    if count is None:
        return "Run the same `hf-neuron-moe convert` with --resume"
    parts = [f"{index}/{count}" for index in parts_to_repeat(shards, missing, count)]
    several = f" and {len(parts) - 8} more" if len(parts) > 8 else ""
    return f"Run `hf-neuron-moe convert` again with --part {', '.join(parts[:8])}{several}"
