"""The command ``convert``: weights in another layout or precision."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hf_neuron_moe.cli.conversion_result import converting, cost_of, show_manifest
from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.shared_options import (
    AnySource,
    Destination,
    Json,
    check_part,
    check_size,
    choice,
    part_of,
    size_in_bytes,
)
from hf_neuron_moe.config import LAYOUTS, ON_NONFINITE, PURPOSES, SCALE_LAYOUTS, SCALE_RULES, STORED_PRECISIONS


def convert(
    source: AnySource,
    destination: Destination,
    precision: Annotated[str, choice(STORED_PRECISIONS, text="Precision of MLP and expert weights.")] = "bf16",
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
    pad: Annotated[bool, typer.Option("--pad", help="Zero-pad H and I to the kernels' multiples.")] = False,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", callback=check_size, help="Largest output file, such as 500MB or 5GB.")
    ] = "5GB",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads. Default: the number of cores. No byte depends on it.")
    ] = None,
    on_nonfinite: Annotated[str, choice(ON_NONFINITE, text="Refuse NaN and infinite weights, or keep them.")] = "error",
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
    with converting("converting") as (watch, progress):
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
        facts = {"ok": True, "destination": str(destination), "part": part, **cost_of(watch)}
        text = f"part {part} of {destination} is done; when all are, run `hf-neuron-moe finalize`"
        typer.echo(json.dumps(facts) if as_json else text)
    else:
        show_manifest(manifest, destination, watch, as_json)
