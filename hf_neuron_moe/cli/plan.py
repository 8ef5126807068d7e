"""The command ``plan``: what patching would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.backends import BACKENDS
from hf_neuron_moe.cli.model_folder import model_folder, quiet_transformers
from hf_neuron_moe.cli.precision_options import Recipe, precision_asked
from hf_neuron_moe.cli.shared_options import Json, choice
from hf_neuron_moe.config import PRECISIONS


def plan(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder with config.json, such a file, or a Hub id org/name.")
    ],
    precision: Annotated[str | None, choice(PRECISIONS, text="Precision of the blocks. Default: bf16.")] = None,
    recipe: Recipe = None,
    backend: Annotated[str, choice(("auto", *BACKENDS), text="What computes the blocks.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show what patch_model would do with a model."""
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.patching import patch_model

    quiet_transformers()
    options = {"precision": precision_asked(precision, recipe), "backend": backend}
    with model_folder(model_dir) as folder:
        patched = patch_model(build_meta_model(folder), options, strict=False)
    typer.echo(json.dumps({"ok": True, **patched.to_dict()}, indent=1) if as_json else str(patched))
