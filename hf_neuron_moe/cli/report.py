"""The command ``report``: one page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_neuron_moe.cli.shared_options import Json, choice, tell

_SUFFIXES = {".md": "md", ".json": "json", ".html": "html", ".htm": "html", "": "html"}


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Output folder of a run or of several.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: report.html in RUN_DIR; - prints."),
    ] = None,
    form: Annotated[
        str | None, choice(("html", "md", "json"), "--format", text="Form of FILE. Default: by its suffix, else html.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in a web browser.")] = False,
    as_json: Json = False,
) -> None:
    """Make one page of a run's files.

    Results, loss curves, patch map, saved bytes, quantization health, expert load, environment; reads the files of
    NeuronMoETrainer and the parity.json of the parity study. The page is one file and loads nothing from a network.
    """
    from hf_neuron_moe.errors import DestinationError
    from hf_neuron_moe.output_files import check_file
    from hf_neuron_moe.report import read_runs, render, write_report
    from hf_neuron_moe.report.page import NAME_PAGE

    form = form or _SUFFIXES.get(output.suffix if output else "")
    if form is None:
        raise typer.BadParameter(f"{output} is no .html, .md or .json: name the form with --format.", param_hint="-o")
    printed = str(output) == "-"
    if printed and (as_json or open_it):
        raise typer.BadParameter("leave out --json and --open, or name a file.", param_hint="-o -")
    target = output or run_dir / f"report.{form}"
    if not printed and (output or run_dir.is_dir()):  # without a folder there is no run to read
        check_file(target, NAME_PAGE)
        inside = target.resolve().parent in (run_dir.resolve(), (run_dir / "neuron_moe").resolve())
        if inside and target.is_file() and target.suffix in (".json", ".md") and target.stem != "report":
            raise DestinationError.about(str(target), "a file that may be replaced", "a file of the run", NAME_PAGE)
    contents = read_runs(run_dir)
    if printed:
        typer.echo(render(contents, form))
        return
    size = write_report(contents, target, form)
    runs, studies = len(contents.runs), len(contents.studies)
    facts: dict[str, Any] = {"ok": True, "report": str(target), "runs": runs, "studies": studies, "bytes": size}
    text = f"{target}: {size / 1024:,.0f} KiB; runs: {runs}, parity studies: {studies}"
    if open_it:
        import webbrowser

        facts["opened"] = webbrowser.open(target.resolve().as_uri())
        text += "" if facts["opened"] else "; no web browser found to open it"
    tell(as_json, facts, text)
