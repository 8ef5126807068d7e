"""The command ``plan``: what patching would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.shared_options import Json, choice
from hf_neuron_moe.config import PRECISIONS


def plan(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json; no weights are needed.")
    ],
    precision: Annotated[str, choice(PRECISIONS, text="Precision of the blocks.")] = "bf16",
    as_json: Json = False,
) -> None:
    """Show what patch_model would do with a model."""
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.patching import patch_model

    quiet_transformers()
    patched = patch_model(build_meta_model(model_dir), {"precision": precision}, strict=False)
    typer.echo(json.dumps({"ok": True, **patched.to_dict()}, indent=1) if as_json else str(patched))
