"""The command ``tiny-model``: something to try the other commands on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.model_folder import quiet_transformers
from hf_neuron_moe.cli.shared_options import Json, make_folder, tell
from hf_neuron_moe.errors import DestinationError, nearest
from hf_neuron_moe.finetune.configs import TINY_FAMILIES as FAMILIES


def _known(family: str) -> str:
    if family not in FAMILIES:
        raise typer.BadParameter(f"{family!r} is not one of {', '.join(FAMILIES)}.{nearest(family, list(FAMILIES))}")
    return family


def tiny_model(
    family: Annotated[str, typer.Argument(metavar="FAMILY", callback=_known, help=f"One of {', '.join(FAMILIES)}.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a tiny untrained model to try commands on.

    It has two layers, a tokenizer of one token per byte, and a chat template. Nothing is downloaded.
    """
    fix, missing = "Name another folder.", [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder, fix)
    if any(folder.iterdir()):
        raise DestinationError.about(str(folder), "a new or empty folder", "one with files", fix)
    from hf_neuron_moe.demo.tiny_model import CHAT_TEMPLATE, make_tiny_model

    quiet_transformers()
    try:
        make_tiny_model(family, folder, seed, CHAT_TEMPLATE)
    except BaseException:
        with suppress(OSError):
            for path in folder.iterdir():
                path.unlink()
            for made in missing:
                made.rmdir()
        raise
    tell(as_json, {"ok": True, "folder": str(folder)}, f"{folder}: a tiny {family} of random weights")
