"""The command ``finalize``: parts of a conversion become one."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_neuron_moe.cli.convert import converting, show_manifest
from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.shared_options import AnySource, Destination, Json


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
    with converting("finalizing") as (watch, progress):
        manifest = finalize_checkpoint(source, destination, force=force, progress=progress)
    show_manifest(manifest, destination, watch, as_json)
