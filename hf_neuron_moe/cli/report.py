"""The command ``report``: one HTML page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.shared_options import Json, tell


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Output folder of a run or of several.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.html in RUN_DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make one HTML page of a run's files.

    Patch map, loss curves, saved bytes, quantization health, expert load, environment; reads the files of
    NeuronMoETrainer and the parity.json of the parity study. The page is one file and loads nothing from a network.
    """
    from hf_neuron_moe.report import read_runs, write_report

    contents = read_runs(run_dir)
    target = output or run_dir / "report.html"
    size = write_report(contents, target)
    runs, studies = len(contents.runs), len(contents.studies)
    facts = {"ok": True, "report": str(target), "runs": runs, "studies": studies, "bytes": size}
    tell(as_json, facts, f"{target}: {size / 1024:,.0f} KiB; runs: {runs}, parity studies: {studies}")
