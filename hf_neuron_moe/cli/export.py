"""The command ``export``: the checkpoint that a conversion was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.cli.shared_options import Converted, Json, tell
from hf_neuron_moe.errors import counted


def export(
    converted: Converted,
    destination: Annotated[Path, typer.Argument(metavar="NEW", help="Folder to make.")],
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Export rounded or dequantized values where the bits are gone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rebuild the checkpoint a conversion was made of.

    Bit for bit from bf16 layouts. Codes come back as the values that they stand for. Where those are not the source's
    values, --allow-inexact is needed.
    """
    from hf_neuron_moe.convert import export_checkpoint
    from hf_neuron_moe.convert.io.folder import resolve_source

    converted = resolve_source(converted)
    with watching("exporting") as (_, progress):
        report = export_checkpoint(converted, destination, allow_inexact=allow_inexact, progress=progress)
    exact = "all bit for bit" if not report.statement else "all exact, codes as the values that they stand for"
    exactness = exact if not report.inexact else f"{len(report.inexact)} of them not bit for bit"
    summary = f"{counted(report.tensors, 'tensor')} written to {destination}, {exactness}"
    facts = {"ok": True, "destination": str(destination), **report.to_dict()}
    tell(as_json, facts, summary, *(f"note: {line}" for line in report.statement))
