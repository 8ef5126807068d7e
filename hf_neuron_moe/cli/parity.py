"""The command ``parity``: the same training with the stock model and with recipes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_neuron_moe.activation_policy import activations_from_text
from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.cli.shared_options import Json, Text
from hf_neuron_moe.config import PRECISIONS, NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, not_one_of
from hf_neuron_moe.precision_map import read_recipe

if TYPE_CHECKING:
    from hf_neuron_moe.recipes.study import RecipeStudy

MOST_SEEDS = 1000
_UNFIT = re.compile(r"[^\w.+-]+")  # for a file's name


def parity(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder with config.json and weights, or a hub id org/name.")
    ],
    text: Text,
    recipe: Annotated[
        list[str],
        typer.Option("--recipe", metavar="RECIPE", help=f"{', '.join(PRECISIONS)} or a YAML file; repeatable."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Runs of each variant.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 5e-5,
    activations: Annotated[
        str, typer.Option(metavar="POLICY", help="What the patched blocks save for backward.")
    ] = "minimal",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the runs; ended ones are not repeated.")
    ] = Path("parity_output"),
    as_json: Json = False,
) -> None:
    """Compare recipes with stock by training on a text.

    Every variant starts with the same weights, sees the same batches in the same order, and is trained by the same
    Trainer; seeds change the order. Parameters are in fp32. The text is cut into rows of --length tokens, each of which
    is used once. One batch in ten steps is held out for evaluation, before and after.
    Bands: 95 % confidence over the seeds, by Student's t distribution. Stopped in the middle, the same command
    continues with the run that it was in. `hf-neuron-moe report FOLDER` draws the curves.
    """
    if not 0 < learning_rate < math.inf:
        raise typer.BadParameter(f"{learning_rate} is no finite number above 0.", param_hint="--learning-rate")
    policy = activations_from_text(activations, "--activations")
    recipes = {
        name: NeuronMoEConfig(precision=precision, activations=policy) for name, precision in _named(recipe).items()
    }
    from transformers.utils import logging

    from hf_neuron_moe.recipes.study import RecipeStudy
    from hf_neuron_moe.recipes.variant_runs import Setting

    quiet_transformers()
    logging.disable_progress_bar()
    setting = Setting(steps, batch, length, learning_rate)
    study = RecipeStudy(model, text, recipes, setting, seeds, output)
    _train(study)
    content = study.finish()
    if as_json:
        typer.echo(json.dumps({"ok": True, "folder": str(output), "model": study.name, **content}))
    else:
        _show(study, content["summary"][study.name]["variants"])


def _named(recipes: list[str]) -> dict[str, Any]:
    """The precisions of the recipes by the names of their variants: a precision's own, or a file's without suffix."""
    named: dict[str, Any] = {}
    for recipe in recipes:
        is_file = recipe not in PRECISIONS
        name = _UNFIT.sub("-", Path(recipe).stem) if is_file else recipe
        if name in named or name == "stock" or (is_file and name in PRECISIONS):
            got = f"{recipe!r}, whose variant would be named {name!r} like another one"
            fix = "Name it once." if recipes.count(recipe) > 1 else "Rename the file."
            raise ConfigError.about("recipe", "precisions and files of different names", got, fix)
        if is_file and not Path(recipe).suffix and not Path(recipe).exists():
            raise not_one_of("recipe", recipe, (*PRECISIONS, "a YAML file"))
        named[name] = read_recipe(Path(recipe)) if is_file else recipe
    return named


def _train(study: RecipeStudy) -> None:
    """Do the runs that have no result, with progress and the time that is left on standard error."""
    total = len(study.missing) * study.setting.steps
    with watching("training", unit="steps") as (watch, progress):
        for number, run in enumerate(study.missing, len(study.runs) - len(study.missing)):
            try:
                study.do(*run, lambda: progress(watch.done + 1, total))
            except KeyboardInterrupt:
                done = f"{number} of {len(study.runs)} runs ended"
                typer.echo(f"{done}; the same command continues: they are in {study.folder}", err=True)
                raise


def _show(study: RecipeStudy, summary: Mapping[str, Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from hf_neuron_moe.recipes.loss_differences import t_factor
    from hf_neuron_moe.report.curves import LAST

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has no edge
    last = min(LAST, study.setting.steps)
    numbers = (f"loss, last {last}", "to stock", "eval loss", "to stock", "step", "saved/token")
    columns = (Column("variant"), *(Column(heading, justify="right") for heading in numbers))
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, of in summary.items():
        losses = (f"{of['last_mean']:.4f}", _difference(of), f"{of['eval_loss']:.4f}", _difference(of["eval"]))
        saved = f"{of['saved_bytes_per_token'] / 1024:,.1f} KiB"
        table.add_row(escape(name), *losses, f"x {of['time_ratio']:.2f}", saved)
    console.print(table)
    start = summary["stock"]["eval_before"]
    lines = [f"{study.setting.steps} steps on the same batches; stock's evaluation loss was {start:.4f} before"]
    if (seeds := summary["stock"]["seeds"]) > 1:
        reach = f"{t_factor(seeds - 1):.1f} standard errors of the mean"
        fewer = [f"{name} {of['seeds']}" for name, of in summary.items() if of["seeds"] != seeds]
        but = f" ({', '.join(fewer)})" if fewer else ""
        lines.append(f"±: 95 % confidence over {seeds} seeds{but}, {reach}; more seeds narrow it")
    else:
        lines.append("One seed has no confidence band: add --seeds 3")
    lines += [_verdict(name, of["eval"]) for name, of in summary.items() if name != "stock"]
    for line in (*lines, f"Curves: hf-neuron-moe report {study.folder}"):
        console.print(escape(line), soft_wrap=True, highlight=False)


def _difference(paired: Mapping[str, Any]) -> str:
    if "difference_percent" not in paired:
        return "-"
    band = "" if paired["band_percent"] is None else f" ± {paired['band_percent']:.3f}"
    return f"{paired['difference_percent']:+.3f}{band} %"


def _verdict(name: str, paired: Mapping[str, Any]) -> str:
    """What the difference of the evaluation loss says about a recipe."""
    gap, band = paired["difference_percent"], paired["band_percent"]
    found = f"{name}: evaluation loss {_difference(paired)} to stock's"
    if band is None:
        return f"{found} by one seed, which says nothing about chance"
    if not round(gap, 3):  # as the difference is shown
        return f"{found}: no difference"
    return f"{found}: {'within chance' if abs(gap) <= band else 'worse' if gap > 0 else 'better'}"
