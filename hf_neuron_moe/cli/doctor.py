"""The command ``doctor``: whether Neuron kernels can run here, and which blocks of a model they compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.backends.neuron.versions import ASSUMED
from hf_neuron_moe.cli.doctor_text import show_installation, show_usable
from hf_neuron_moe.cli.exit_codes import REFUSED
from hf_neuron_moe.cli.model_folder import model_folder, quiet_transformers
from hf_neuron_moe.cli.shared_options import Json, choice
from hf_neuron_moe.config import BLOCK_SIZES

if TYPE_CHECKING:
    from hf_neuron_moe.device.installed import Installation
    from hf_neuron_moe.device.kernel_support import Usable


_SIZES = tuple(map(str, BLOCK_SIZES))


def doctor(
    model_dir: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL_DIR", help="Checkpoint, its Hub id, conversion or config.json: judge it too."),
    ] = None,
    block_size: Annotated[
        str | None, choice(_SIZES, text="Judge experts at this block size. Default: 512; all that work are listed.")
    ] = None,
    lnc: Annotated[
        str | None,
        choice(
            ("1", "2"), text="Judge Trn2 and Trn3 at this many physical cores per logical core. Default: as set here."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 if no kernel can run here, or none computes a gated block.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show whether Neuron kernels run here and what to fix.

    Also what of the Neuron stack is installed. Works with nothing installed, or something broken. With MODEL_DIR also:
    which kernels compute which of the model's blocks at which block sizes, and why not. That is asked of what is here,
    and of the documents of SDK 2.33 for Trn2 and Trn3. The frozen MX blocks of a conversion count in inference. The
    exit code is 0 whatever was found, unless --strict is given.
    """
    from hf_neuron_moe.device.installed import inspect_installation

    found = inspect_installation()
    size = None if block_size is None else int(block_size)
    # Physical cores per logical core that the documents are asked about, and where that is known from.
    judged_lnc, lnc_source = (lnc, "--lnc") if lnc is not None else found.lnc
    if judged_lnc is None:
        judged_lnc, lnc_source = "2", "the default of Trn2 and Trn3, since what is set here is wrong"
    answers, unjudged = _judge_blocks(model_dir, found, size, int(judged_lnc)) if model_dir is not None else ([], None)
    if as_json:
        blocks = {
            "model": str(model_dir),
            "documented_lnc": {"value": int(judged_lnc), "source": lnc_source},
            "blocks": [answer.to_dict() for answer in answers],
            "unjudged": unjudged,
        }
        typer.echo(json.dumps({"ok": True, **found.to_dict(), **(blocks if model_dir else {})}))
    else:
        show_installation(found, {answer.group.kind for answer in answers})
        if model_dir is not None:
            show_usable(answers, found, f"{model_dir}", unjudged, f"LNC {judged_lnc} ({lnc_source})")
    gated = {answer.group for answer in answers if answer.group.gated}
    computed = {answer.group for answer in answers if answer.here is None}
    if strict and not (found.usable and gated <= computed and (gated or model_dir is None)):
        raise typer.Exit(REFUSED.code)


def _judge_blocks(
    model_dir: Path, found: Installation, block_size: int | None, lnc: int
) -> tuple[Sequence[Usable], str | None]:
    """The answers, and why there are none where torch or transformers cannot be imported."""
    try:
        from hf_neuron_moe.backends.neuron.limits import Device
        from hf_neuron_moe.device.kernel_support import usable_kernels
        from hf_neuron_moe.device.model_dir import groups_of_folder
    except ImportError as error:
        return [], f"that needs torch and transformers ({error})"
    quiet_transformers()
    with model_folder(model_dir) as folder:
        groups = groups_of_folder(folder)
    target, own_lnc = found.target[0], found.lnc[0]
    here = None
    if target is not None and own_lnc is not None:
        here = Device(target, int(own_lnc), assumed=found.target[1] == ASSUMED)
    return usable_kernels(groups, here, found.unsupported_reason, block_size, lnc), None
