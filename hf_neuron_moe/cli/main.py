"""The application and its entry point. Commands import what they need when they run, so ``--help`` loads no torch."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from hf_neuron_moe._version import __version__
from hf_neuron_moe.cli.error_handling import run
from hf_neuron_moe.cli.exit_codes import EXIT_CODES
from hf_neuron_moe.errors import public

COMMANDS = (
    "demo",
    "tiny-model",
    "plan",
    "convert",
    "finalize",
    "export",
    "verify",
    "inspect",
    "estimate",
    "train",
    "report",
    "parity",
    "doctor",
    "verify-device",
    "smoke",
    "explore",
)
"""One row per command: the function of that name in the module of that name in this folder, with ``_`` for ``-``."""


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-neuron-moe {__version__}")
        raise typer.Exit


def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version.")
    ] = False,
) -> None:
    """Neuron's numerics and weight layouts for Hugging Face models."""


def application() -> typer.Typer:
    """Return the application with the commands of :data:`COMMANDS`."""
    codes = ", ".join(f"{code.code} {code.kind}" for code in EXIT_CODES)
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=settings.__doc__,
        epilog=f"Exit codes: {codes}.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(settings)
    for command in COMMANDS:
        name = command.replace("-", "_")
        module = importlib.import_module(f"hf_neuron_moe.cli.{name}")
        app.command(command, **getattr(module, "COMMAND", {}))(public(command)(getattr(module, name)))
    return app


def main() -> None:
    """Entry point of ``hf-neuron-moe``."""
    run(application(), sys.argv[1:])


if __name__ == "__main__":
    main()
