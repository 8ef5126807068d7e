"""The command ``convert``: weights in another layout or precision; and how a conversion's result is shown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.precision_options import Recipe, precision_asked
from hf_neuron_moe.cli.progress_line import Update, Watch, in_words, watching
from hf_neuron_moe.cli.shared_options import (
    AnySource,
    Destination,
    Json,
    check_part,
    check_size,
    choice,
    part_of,
    size_in_bytes,
    tell,
)
from hf_neuron_moe.config import LAYOUTS, ON_NONFINITE, PURPOSES, SCALE_LAYOUTS, SCALE_RULES, STORED_PRECISIONS
from hf_neuron_moe.errors import NeuronMoEWarning, counted

if TYPE_CHECKING:
    from hf_neuron_moe.convert import Manifest


def convert(
    source: AnySource,
    destination: Destination,
    precision: Annotated[
        str | None, choice(STORED_PRECISIONS, text="Precision of MLP and expert weights. Default: bf16.")
    ] = None,
    recipe: Recipe = None,
    keep_bf16: Annotated[
        list[str] | None,
        typer.Option("--keep-bf16", metavar="GLOB", help="Blocks that stay bf16, by module name; repeatable."),
    ] = None,
    layout: Annotated[str, choice(LAYOUTS, text="Axis order: Hugging Face's fused one or the kernels'.")] = "kernel",
    swizzle: Annotated[
        bool | None, typer.Option("--swizzle/--no-swizzle", help="Swizzle MX operands. Default: in kernel layout.")
    ] = None,
    scales: Annotated[
        str | None, choice(SCALE_LAYOUTS, text="Where MX block scales lie. Default: as the layout's kernels take them.")
    ] = None,
    scale_rule: Annotated[
        str | None, choice(SCALE_RULES, text="How an MX block's scale is chosen. Default: neuron; mxfp4: floor.")
    ] = None,
    purpose: Annotated[
        str | None,
        choice(PURPOSES, "--for", text="What will read the weights. Default: training; mxfp4: inference."),
    ] = None,
    tp_degree: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that share the intermediate axis.")] = 1,
    ep_degree: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks that experts are dealt out to.")] = 1,
    pad: Annotated[bool, typer.Option("--pad", help="Zero-pad H and I to the kernels' multiples.")] = False,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Quantize a source's MX codes again where they cannot be kept.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", callback=check_size, help="Largest output file, such as 500MB or 5GB.")
    ] = "5GB",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads. Default: the number of cores. No byte depends on it.")
    ] = None,
    on_nonfinite: Annotated[str, choice(ON_NONFINITE, text="On NaN or infinite weights: fail or keep.")] = "error",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if an MLP or experts block would stay in source form.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", callback=check_part, help="Convert part I of N; then run finalize.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an unfinished run with the same options.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier conversion when this one is done.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; say what would be written, in how much memory and time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert MLP and expert weights to another layout."""
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    quiet_transformers()
    options = ConvertOptions(
        precision=precision_asked(precision, recipe, keep_bf16),
        layout=layout,
        swizzle=swizzle,
        scales=scales,
        scale_rule=scale_rule,
        purpose=purpose,
        tp_degree=tp_degree,
        ep_degree=ep_degree,
        pad=pad,
        allow_inexact=allow_inexact,
        max_shard_bytes=size_in_bytes(max_shard_size),
    )
    if dry_run:
        from hf_neuron_moe.convert.estimate import estimate_conversion

        estimate = estimate_conversion(
            source, destination, options, force=force, workers=workers, part=part_of(part), strict=strict
        )
        tell(as_json, estimate.to_dict(), str(estimate))
        return
    with converting("converting") as (watch, progress), _continuing(destination, resume or part is not None, as_json):
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
    if manifest is not None:
        show_manifest(manifest, destination, watch, as_json)
        return
    done = f"part {part} of {destination} is done; when all are, run `hf-neuron-moe finalize`"
    tell(as_json, {"ok": True, "destination": str(destination), "part": part, **watch.cost()}, done)


@contextmanager
def _continuing(destination: object, stays: bool, as_json: bool) -> Iterator[None]:
    """Say how to go on when a conversion is stopped whose finished files stay."""
    try:
        yield
    except KeyboardInterrupt:
        if stays and not as_json:
            typer.echo(f"{destination}.partial has what is finished: repeat the command with --resume", err=True)
        raise


@contextmanager
def converting(label: str) -> Iterator[tuple[Watch, Update]]:
    """Watch a conversion; the package's warnings are part of its result, where --json shows them too."""
    with warnings.catch_warnings(), watching(label) as watched:
        warnings.simplefilter("ignore", NeuronMoEWarning)
        yield watched


def show_manifest(manifest: Manifest, destination: object, watch: Watch, as_json: bool) -> None:
    """Print what was written, in how much time and memory, and what is worth knowing about it."""
    from hf_neuron_moe.convert import nonfinite_note, rounding_note
    from hf_neuron_moe.convert.notes import left_facts, left_notes, requantized, requantized_note

    again = requantized(manifest.weights, manifest.tensors, manifest.encodings, manifest.options)
    copied = sum(tensor.layout == "source" for tensor in manifest.tensors)
    facts = {
        "ok": True,
        "destination": str(destination),
        "converted_weights": len(manifest.weights) - copied,
        "copied_tensors": copied,
        "files": len(manifest.by_file()),
        "rounded_values": sum((manifest.rounded or {}).values()),
        "nonfinite_values": sum((manifest.nonfinite or {}).values()),
        "requantized": again,
        "left": left_facts(manifest.left),
        **watch.cost(),
    }
    weights, files = counted(len(manifest.weights) - copied, "weight"), counted(len(manifest.by_file()), "file")
    text = f"{weights} converted, {counted(copied, 'tensor')} copied, {files} in {destination}"
    notes = (*left_notes(manifest.left), rounding_note(manifest), requantized_note(again), nonfinite_note(manifest))
    rate = in_words(watch.done / max(watch.seconds, 1e-9))
    cost = f"{in_words(watch.done)} in {watch.seconds:.1f} s ({rate}/s), peak memory {in_words(watch.peak)}"
    if not watch.done:
        cost = f"nothing was left to convert; what was there was checked in {watch.seconds:.1f} s"
    tell(as_json, facts, text, *(f"note: {note}" for note in notes if note), cost)
