"""The commands that write a conversion: ``convert`` and ``finalize``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_neuron_moe.cli.options import (
    LAYOUTS,
    NONFINITE,
    PRECISIONS,
    PURPOSES,
    SCALE_RULES,
    SCALES,
    AnySource,
    Destination,
    Json,
    check_part,
    check_size,
    choice,
    part_of,
    size_in_bytes,
)
from hf_neuron_moe.cli.progress import Watch, in_words, watching
from hf_neuron_moe.errors import NeuronMoEWarning

if TYPE_CHECKING:
    from hf_neuron_moe.convert import Manifest


def convert(
    source: AnySource,
    destination: Destination,
    precision: Annotated[str, choice(PRECISIONS, text="Precision of MLP and expert weights.")] = "bf16",
    layout: Annotated[str, choice(LAYOUTS, text="Axis order: Hugging Face's fused one or the kernels'.")] = "kernel",
    swizzle: Annotated[
        bool | None, typer.Option("--swizzle/--no-swizzle", help="Swizzle MX operands. Default: in kernel layout.")
    ] = None,
    scales: Annotated[
        str | None, choice(SCALES, text="Where MX block scales lie. Default: as the layout's kernels take them.")
    ] = None,
    scale_rule: Annotated[
        str | None, choice(SCALE_RULES, text="How an MX block's scale is chosen. Default: neuron; mxfp4: floor.")
    ] = None,
    purpose: Annotated[
        str | None,
        choice(PURPOSES, "--for", text="What will read the weights. Default: training; mxfp4: inference."),
    ] = None,
    tp_degree: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that share the intermediate axis.")] = 1,
    pad: Annotated[bool, typer.Option("--pad", help="Zero-pad H and I to the kernels' multiples.")] = False,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", callback=check_size, help="Largest output file, such as 500MB or 5GB.")
    ] = "5GB",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads. Default: the number of cores. No byte depends on it.")
    ] = None,
    on_nonfinite: Annotated[str, choice(NONFINITE, text="Refuse NaN and infinite weights, or keep them.")] = "error",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a model with MLPs or experts that would stay in source form.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", callback=check_part, help="Convert part I of N; then run finalize.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run of the same options.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier conversion when this one is done.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; say what would be written, in how much memory and time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint's MLP and expert weights to another layout."""
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    quiet_transformers()
    options = ConvertOptions(
        precision=precision,
        layout=layout,
        swizzle=swizzle,
        scales=scales,
        scale_rule=scale_rule,
        purpose=purpose,
        tp_degree=tp_degree,
        pad=pad,
        max_shard_bytes=size_in_bytes(max_shard_size),
    )
    if dry_run:
        from hf_neuron_moe.convert.estimate import estimate_conversion

        estimate = estimate_conversion(
            source, destination, options, force=force, workers=workers, part=part_of(part), strict=strict
        )
        typer.echo(json.dumps(estimate.to_dict()) if as_json else str(estimate))
        return
    with _told_later(), watching("converting") as (watch, progress):
        manifest = convert_checkpoint(
            source,
            destination,
            options,
            force=force,
            resume=resume,
            part=part_of(part),
            workers=workers,
            on_nonfinite=on_nonfinite,
            strict=strict,
            progress=progress,
        )
    if manifest is None:
        facts = {"ok": True, "destination": str(destination), "part": part, **_cost(watch)}
        text = f"part {part} of {destination} is done; when all are, run `hf-neuron-moe finalize`"
        typer.echo(json.dumps(facts) if as_json else text)
    else:
        _tell(manifest, destination, watch, as_json)


def finalize(
    source: AnySource,
    destination: Destination,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion.")] = False,
    as_json: Json = False,
) -> None:
    """Commit a conversion made with --part.

    Checks that all N parts are there; the result is byte for byte that of one run.
    """
    from hf_neuron_moe.convert import finalize_checkpoint

    quiet_transformers()
    with _told_later(), watching("finalizing") as (watch, progress):
        manifest = finalize_checkpoint(source, destination, force=force, progress=progress)
    _tell(manifest, destination, watch, as_json)


def quiet_transformers() -> None:
    """Keep transformers' notes about generation configs and the like out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()


@contextmanager
def _told_later() -> Iterator[None]:
    """Hold the package's warnings back: they are told after the command's result, where --json shows them too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuronMoEWarning)
        yield


def _tell(manifest: Manifest, destination: object, watch: Watch, as_json: bool) -> None:
    from hf_neuron_moe.convert import nonfinite_note, rounding_note
    from hf_neuron_moe.convert.notes import left_facts, left_notes

    copied = sum(tensor.layout == "source" for tensor in manifest.tensors)
    facts = {
        "ok": True,
        "destination": str(destination),
        "converted_weights": len(manifest.weights) - copied,
        "copied_tensors": copied,
        "files": len({tensor.file for tensor in manifest.tensors}),
        "rounded_values": sum((manifest.rounded or {}).values()),
        "nonfinite_values": sum((manifest.nonfinite or {}).values()),
        "left": left_facts(manifest.left),
        **_cost(watch),
    }
    text = "{converted_weights} weights converted, {copied_tensors} tensors copied, {files} files in {destination}"
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(text.format(**facts))
    for note in left_notes(manifest.left):
        typer.echo(f"note: {note}")
    if manifest.options.precision == "bf16" and facts["rounded_values"]:
        typer.echo(f"note: {rounding_note(manifest)}")
    if facts["nonfinite_values"]:
        typer.echo(f"note: {nonfinite_note(manifest)}")
    rate = watch.done / max(watch.seconds, 1e-9)
    typer.echo(
        f"{in_words(watch.done)} in {watch.seconds:.1f} s ({in_words(rate)}/s), peak memory {in_words(watch.peak)}"
    )


def _cost(watch: Watch) -> dict[str, Any]:
    return {"bytes": watch.done, "seconds": round(watch.seconds, 3), "peak_memory_bytes": watch.peak}
