"""The command ``explore``: what MXFP8 does to a model, which blocks should stay in bf16, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.cli.exit_codes import DONE, REFUSED
from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.progress_line import duration, in_words, watching
from hf_neuron_moe.cli.shared_options import Json, Text
from hf_neuron_moe.config import MOST_TOKENS
from hf_neuron_moe.errors import DestinationError
from hf_neuron_moe.output_files import check_file, replacing

if TYPE_CHECKING:
    from hf_neuron_moe.explore.exploration import Exploration, Ranked

NAME_FILE = "Name a file in a folder that exists."
PAGES = (".html", ".htm")
SHOWN = 10
"""Blocks of the ranking that a terminal shows."""


def explore(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a checkpoint with a tokenizer.")],
    text: Text,
    tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of the text to measure on.")] = 16384,
    length: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens per row.")] = 512,
    formats: Annotated[
        str, typer.Option(metavar="LIST", help="mxfp8, and of bf16, mxfp4 and fp8-saved, with commas between.")
    ] = "mxfp8,fp8-saved",
    budget: Annotated[
        str, typer.Option(metavar="LIMIT", help="Largest expected change of the loss: 0.25%, or nats per token.")
    ] = "0.25%",
    device: Annotated[str, typer.Option(metavar="trn2|trn3|h100|b200", help="Whose time the plan saves.")] = "trn3",
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=1, max=MOST_TOKENS, help="Tokens of a training step, for times.")
    ] = 8192,
    verify: Annotated[int, typer.Option(min=0, help="Blocks to switch to mxfp8 one at a time and measure.")] = 4,
    draws: Annotated[int, typer.Option(min=0, max=64, help="Sets of drawn labels per row, for the curvature.")] = 1,
    fold: Annotated[
        Path | None, typer.Option(metavar="DST", help="Write a checkpoint with outlier channels folded away.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan as YAML; with mxfp4 also FILE-convert.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="Write a page.")] = None,
    as_json: Json = False,
) -> None:
    """Tell what MXFP8 does to a model, block by block.

    Predicts the change of the loss, explains it, and plans which blocks stay in bf16. One pass forward and backward
    over the text. A run that was stopped goes on where it was when it is started again in the same folder. Needs
    memory for the model, one row's activations and one block.
    """
    from hf_neuron_moe.explore.precision_plan import as_yaml
    from hf_neuron_moe.explore.run import Options, explore as run

    names = tuple(name.strip() for name in formats.split(",") if name.strip())
    second = plan.with_stem(f"{plan.stem}-convert") if plan is not None and "mxfp4" in names else None
    if output is not None and output.suffix not in ("", *PAGES):
        raise typer.BadParameter(f"{output} is no .html.", param_hint="-o")
    state = Path(f".explore-{model_dir.resolve().name}.partial")
    _check_written([path for path in (plan, second, output, fold) if path is not None], fold, text, model_dir, state)
    quiet_transformers()
    options = Options(tokens, length, names, budget, device, step_tokens, verify, draws, fold)
    with watching("exploring", unit="parts") as (watch, advance):
        try:
            result = run(model_dir, text, options, state, advance)
        except KeyboardInterrupt:
            if state.exists():
                typer.echo(f"The same command continues: what was measured is in {state}", err=True)
            raise
    if plan is not None:
        _write_plan(plan, as_yaml(result.plan, result.model))
        if second is not None and result.convert_plan is not None:
            _write_plan(second, as_yaml(result.convert_plan, result.model))
    if output is not None:
        from hf_neuron_moe.explore.explore_page import write_explore_page

        write_explore_page(result, output)
    state.unlink(missing_ok=True)  # not before: what was measured may have taken hours
    code = REFUSED if fold is not None and not result.folds else DONE
    if as_json:
        ending = {"ok": code is DONE, "kind": code.kind, "exit_code": code.code, "message": " ".join(result.not_folded)}
        typer.echo(json.dumps(ending | {"cost": watch.cost()} | result.to_dict()))
    else:
        _show(result)
        typer.echo(f"Took {duration(watch.seconds)} and {in_words(watch.peak)} of memory.")
        folded = fold if result.folds else None
        wrote = {"plan": plan, "plan for convert": second, "page": output, "folded checkpoint": folded}
        for what, file in wrote.items():
            if file is not None:
                typer.echo(f"Wrote the {what} to {file}.")
        for line in result.not_folded:
            typer.echo(line, err=True)
    if code is not DONE:
        raise typer.Exit(code.code)


def _check_written(paths: list[Path], fold: Path | None, text: Path, model_dir: Path, state: Path) -> None:
    """Raise DestinationError where one of `paths` cannot be written, or is what the run reads or writes elsewhere."""
    files = (file for file in model_dir.glob("*") if file.is_file() and file.suffix not in (*PAGES, ".yaml", ".yml"))
    taken = {os.path.realpath(file): "a file of the model" for file in files}
    taken |= {os.path.realpath(text): "the text", os.path.realpath(state): "the file of an interrupted run"}
    for path in paths:
        if path != fold:  # which is checked where it is written
            check_file(path, NAME_FILE)
        if got := taken.get(os.path.realpath(path)):
            raise DestinationError.about(str(path), "a file that may be replaced", got, "Name another file.")
        taken[os.path.realpath(path)] = "the name of another file to write"


def _write_plan(path: Path, plan: str) -> None:
    with replacing(path, NAME_FILE) as partial:
        partial.write_text(plan, encoding="utf-8")


def _show(result: Exploration) -> None:
    from rich import box
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has no edge

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    loss = result.loss
    line(f"{result.model}: loss {loss:.4f} in bf16 on {result.measures.tokens:,} tokens of {result.text}")
    for form, rows in result.ranking.items():
        table = Table(box=box.SIMPLE, title=f"Change of the loss by {form}, worst blocks first", title_justify="left")
        for heading in ("block", "predicted", "measured", "why"):
            justify: JustifyMethod = "left" if heading in ("block", "why") else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in rows[:SHOWN]:
            table.add_row(row.block, _percent(row.predicted, loss), _measured(row, loss), f"{row.reason.text}")
        console.print(table)
        if len(rows) > SHOWN:
            line(f"  and {len(rows) - SHOWN} more; --json and -o have all.")
    verified = [row for row in result.ranking.get("mxfp8", []) if row.measured is not None]
    if len(verified) >= 3:
        line(f"Rank correlation of predicted and measured, {len(verified)} blocks: {result.correlation:.2f}")
    _show_plan(result, line)
    for advice in (*result.advice, *result.folds):
        line(advice)
    if result.folded:
        line(
            f"Folded: loss {result.folded['bf16']:.4f} in bf16, {result.folded['mxfp8']:.4f} in mxfp8 "
            f"(before: {result.measured['mxfp8']:.4f})."
        )


def _show_plan(result: Exploration, line: Callable[[str], None]) -> None:
    plan, loss = result.plan, result.loss
    line(f"Plan for {plan.device}, expected change below {100 * plan.limit / loss:.2g} % (times are estimates):")
    for name, total in result.totals.items():
        measured = result.measured.get(name.removeprefix("uniform "))
        here = "" if measured is None else f", measured here {_percent(measured - loss, loss)}"
        line(
            f"  {name:14} expected {_percent(total.loss_change, loss)}{here}, "
            f"{1e3 * total.seconds:.3g} ms per step, weights {in_words(total.bytes)}"
        )
    line(f"  precision by block: {plan.recipe}")
    if result.convert_plan is not None:
        line(f"  for convert --recipe, least bytes: {result.convert_plan.recipe}")
    for row in (row for row in next(iter(result.ranking.values()))[:3]):
        line(f"  {row.block}: {row.reason.remedy}")


def _percent(change: float, loss: float) -> str:
    return f"{round(100 * change / loss, 3) + 0.0:+.3f} %"  # no minus before zeros


def _measured(row: Ranked, loss: float) -> str:
    return "" if row.measured is None else _percent(row.measured, loss)
