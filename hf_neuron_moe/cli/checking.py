"""The commands that read a conversion: ``export``, ``verify`` and ``inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.exit_codes import VERIFY
from hf_neuron_moe.cli.options import NONFINITE, Converted, Json, choice
from hf_neuron_moe.cli.progress import watching

Source = Annotated[
    Path | None, typer.Option("--source", metavar="SRC", help="The checkpoint it was made of, to compare with.")
]


def export(
    converted: Converted,
    destination: Annotated[Path, typer.Argument(metavar="NEW", help="Folder to make.")],
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Export rounded or dequantised values where the bits are gone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rebuild the checkpoint a conversion was made of.

    Bit for bit from bf16 layouts; from MX only the dequantised values, and only with --allow-inexact.
    """
    from hf_neuron_moe.convert import export_checkpoint

    with watching("exporting") as (_, progress):
        report = export_checkpoint(converted, destination, allow_inexact=allow_inexact, progress=progress)
    if as_json:
        typer.echo(json.dumps({"ok": True, "destination": str(destination), **report.to_dict()}))
        return
    exactness = "all bit for bit" if not report.inexact else f"{len(report.inexact)} of them not bit for bit"
    typer.echo(f"{report.tensors} tensors written to {destination}, {exactness}")
    for line in report.statement:
        typer.echo(f"note: {line}")


def verify(
    converted: Converted,
    source: Source = None,
    probes: Annotated[int, typer.Option(min=0, help="Layers to compare with the source; 0: every expert of all.")] = 8,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Chooses the layers and their inputs.")] = 0,
    on_nonfinite: Annotated[str, choice(NONFINITE, text="NaN and infinite weights fail, or are only told.")] = "error",
    as_json: Json = False,
) -> None:
    """Check a conversion, with or without its source.

    Checksums, coverage and finite values always; with --source also the source's checksums and a random probe through
    layers of both.
    """
    from hf_neuron_moe.convert.audit.verify import verify_checkpoint

    with watching("verifying") as (_, progress):
        report = verify_checkpoint(
            converted, source, probes=probes, seed=seed, on_nonfinite=on_nonfinite, progress=progress
        )
    typer.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(VERIFY.code)


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Conversion, or an ordinary checkpoint.")],
    source: Source = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, not one line per kind.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds.

    Layouts, dtypes and sizes; with --source also the quantisation error of every converted tensor.
    """
    from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint

    with watching("comparing", quiet=source is None) as (_, progress):
        report = inspect_checkpoint(directory, source, progress=progress)
    typer.echo(json.dumps(report.to_dict()) if as_json else report.to_text(every=tensors))
