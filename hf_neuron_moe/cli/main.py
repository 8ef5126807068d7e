"""The application and its entry point. Commands import what they need when they run, so ``--help`` loads no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe._version import __version__
from hf_neuron_moe.cli.boundary import run
from hf_neuron_moe.cli.checking import export, inspect, verify
from hf_neuron_moe.cli.conversion import convert, finalize, quiet_transformers
from hf_neuron_moe.cli.diagnosing import doctor, verify_device
from hf_neuron_moe.cli.estimating import estimate
from hf_neuron_moe.cli.exit_codes import EXIT_CODES
from hf_neuron_moe.cli.options import BLOCK_PRECISIONS, Json, choice
from hf_neuron_moe.cli.reporting import report
from hf_neuron_moe.errors import public

_CODES = ", ".join(f"{code.code} {code.kind}" for code in EXIT_CODES)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Neuron's numbers and weight layouts for Hugging Face models.",
    epilog=f"Exit codes: {_CODES}.",
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-neuron-moe {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version.")
    ] = False,
) -> None:
    """Neuron's numbers and weight layouts for Hugging Face models."""


@app.command()
@public
def plan(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json; no weights are needed.")
    ],
    precision: Annotated[str, choice(BLOCK_PRECISIONS, text="Precision of the blocks.")] = "bf16",
    as_json: Json = False,
) -> None:
    """Show what patch_model would do with a model."""
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.patching import patch_model

    quiet_transformers()
    patched = patch_model(build_meta_model(model_dir), {"precision": precision}, strict=False)
    typer.echo(json.dumps({"ok": True, **patched.to_dict()}, indent=1) if as_json else str(patched))


for _command in (convert, finalize, export, verify, inspect, estimate, report, doctor, verify_device):
    app.command()(_command)


def main() -> None:
    """Entry point of ``hf-neuron-moe``."""
    run(app, sys.argv[1:])


if __name__ == "__main__":
    main()
