"""Commands. Each imports what it needs when it runs, so that ``--help`` loads no torch.

Exit codes: 0 done, 1 refused with the reason on stderr, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.errors import NeuronMoEError, NeuronMoEWarning

REFUSED = 1
"""Exit code of a refusal."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Neuron's numbers and weight layouts for Hugging Face models.",
    epilog="Exit codes: 0 done, 1 refused with a reason, 2 wrong usage.",
)


class Precision(StrEnum):
    """Precisions of ``convert``."""

    bf16 = "bf16"
    mxfp8 = "mxfp8"


class BlockPrecision(StrEnum):
    """Precisions of a patched block."""

    bf16 = "bf16"
    mxfp8 = "mxfp8"
    fp32 = "fp32"


class Layout(StrEnum):
    """Layouts of ``convert``."""

    fused = "fused"
    kernel = "kernel"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def settings(debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False) -> None:
    """Neuron's numbers and weight layouts for Hugging Face models."""


@app.command()
def plan(
    model_dir: Annotated[Path, typer.Argument(help="Folder with config.json; no weights are needed.")],
    precision: Annotated[BlockPrecision, typer.Option(help="Precision of the blocks.")] = BlockPrecision.bf16,
    as_json: Json = False,
) -> None:
    """Show what patch_model would do with a model."""
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.patching import patch_model

    _quiet_transformers()
    report = patch_model(build_meta_model(model_dir, "plan"), {"precision": precision.value}, strict=False)
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    precision: Annotated[Precision, typer.Option(help="Precision of MLP and expert weights.")] = Precision.bf16,
    layout: Annotated[
        Layout, typer.Option(help="Axis order: Hugging Face's fused one or the kernels'.")
    ] = Layout.kernel,
    max_shard_size: Annotated[int, typer.Option(help="Bytes per output file.", min=1)] = 5_000_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint's MLP and expert weights to another layout."""
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, rounding_note

    _quiet_transformers()
    options = ConvertOptions(precision.value, layout.value, max_shard_size)
    with _progress("converting") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuronMoEWarning)  # said below, where it is seen in --json too
        manifest = convert_checkpoint(source, destination, options, force=force, progress=progress)
    copied = sum(tensor.layout == "source" for tensor in manifest.tensors)
    facts = {
        "destination": str(destination),
        "converted_weights": len(manifest.weights) - copied,
        "copied_tensors": copied,
        "files": len({tensor.file for tensor in manifest.tensors}),
        "rounded_values": sum((manifest.rounded or {}).values()),
    }
    text = "{converted_weights} weights converted, {copied_tensors} tensors copied, {files} files in {destination}"
    typer.echo(json.dumps(facts) if as_json else text.format(**facts))
    if not as_json and precision is Precision.bf16 and facts["rounded_values"]:
        typer.echo(f"note: {rounding_note(manifest)}")


@app.command()
def export(
    converted: Annotated[Path, typer.Argument(help="Folder that convert wrote.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Export rounded or dequantised values where the bits are gone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rebuild the checkpoint that a conversion was made of."""
    from hf_neuron_moe.convert import export_checkpoint

    report = export_checkpoint(converted, destination, allow_inexact=allow_inexact)
    facts = {"destination": str(destination), "tensors": report.tensors, "inexact_tensors": len(report.inexact)}
    exactness = "all bit for bit" if not report.inexact else f"{len(report.inexact)} of them not bit for bit"
    typer.echo(json.dumps(facts) if as_json else f"{report.tensors} tensors written to {destination}, {exactness}")


def main() -> None:
    """Entry point of ``hf-neuron-moe``."""
    try:
        app()
    except (NeuronMoEError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        message = str(error)
        as_json = "--json" in sys.argv
        typer.echo(
            json.dumps({"error": type(error).__name__, "message": message}) if as_json else message, err=not as_json
        )
        sys.exit(REFUSED)


def _quiet_transformers() -> None:
    """Keep transformers' notes about generation configs and the like out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, and nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
