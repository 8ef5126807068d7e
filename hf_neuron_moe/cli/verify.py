"""The command ``verify``: whether a conversion is whole and right."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_neuron_moe.cli.exit_codes import VERIFY
from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.cli.shared_options import Converted, Json, Original, choice, tell
from hf_neuron_moe.config import ON_NONFINITE


def verify(
    converted: Converted,
    source: Original = None,
    probes: Annotated[int, typer.Option(min=0, help="Layers to compare with the source; 0: every expert of all.")] = 8,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Chooses the layers and their inputs.")] = 0,
    on_nonfinite: Annotated[str, choice(ON_NONFINITE, text="On NaN or infinite weights: fail or report.")] = "error",
    as_json: Json = False,
) -> None:
    """Check a conversion, with or without its source.

    Checksums, coverage and finite values always; with --source also the source's checksums and a random probe through
    layers of both.
    """
    from hf_neuron_moe.convert.audit.verify import verify_checkpoint
    from hf_neuron_moe.convert.io.folder import resolve_source

    converted, source = resolve_source(converted), source and resolve_source(source)
    with watching("verifying") as (_, progress):
        report = verify_checkpoint(
            converted, source, probes=probes, seed=seed, on_nonfinite=on_nonfinite, progress=progress
        )
    tell(as_json, report.to_dict(), str(report))
    if not report.ok:
        raise typer.Exit(VERIFY.code)
