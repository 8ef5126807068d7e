"""The command ``inspect``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.cli.shared_options import Json, Original, tell


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Conversion or ordinary checkpoint, or a Hub id.")],
    source: Original = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, not one line per kind.")] = False,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's layouts and sizes.

    With --source also the quantization error of every converted tensor.
    """
    from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
    from hf_neuron_moe.convert.io.folder import resolve_source

    directory, source = resolve_source(directory), source and resolve_source(source)
    with watching("comparing", quiet=source is None) as (_, progress):
        report = inspect_checkpoint(directory, source, progress=progress)
    tell(as_json, report.to_dict(), report.to_text(every=tensors))
