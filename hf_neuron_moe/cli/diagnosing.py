"""The commands about a Neuron machine: ``doctor`` and ``verify-device``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron.generations import KERNEL_PRECISIONS
from hf_neuron_moe.backends.neuron.versions import ASSUMED
from hf_neuron_moe.cli.doctor_text import show_installation, show_table, show_usable
from hf_neuron_moe.cli.exit_codes import CLOSE, REFUSED, VERIFY
from hf_neuron_moe.cli.model_folder import model_folder
from hf_neuron_moe.cli.options import BlockSize, Json, choice
from hf_neuron_moe.config import BLOCK_SIZES
from hf_neuron_moe.errors import public

if TYPE_CHECKING:
    from hf_neuron_moe.device.device_report import BlockResult, DeviceReport
    from hf_neuron_moe.device.installed import Installation
    from hf_neuron_moe.device.kernel_support import Usable


def doctor(
    model_dir: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL_DIR", help="Checkpoint, conversion, or config.json: also judge its blocks."),
    ] = None,
    block_size: Annotated[
        str | None,
        choice(
            tuple(map(str, BLOCK_SIZES)),
            text="Judge experts at this block size. Default: 512; all that work are listed.",
        ),
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
    """Tell whether Neuron kernels can run here, and if not the first thing to do.

    Then what of the Neuron stack is installed. Works with nothing installed, or something broken. With MODEL_DIR also:
    which kernels compute which of the model's blocks at which block sizes, here and by the documents of SDK 2.33 on
    Trn2 and Trn3, and why not; the frozen MX blocks of a conversion in inference. The exit code is 0 whatever was
    found, unless --strict is given.
    """
    from hf_neuron_moe.device.installed import inspect_installation

    found = inspect_installation()
    size = None if block_size is None else int(block_size)
    judged_lnc, lnc_source = _documented_lnc(lnc, found)
    answers, unjudged = _judge_blocks(model_dir, found, size, judged_lnc) if model_dir is not None else ([], None)
    if as_json:
        blocks = {
            "model": str(model_dir),
            "documented_lnc": {"value": judged_lnc, "source": lnc_source},
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
    nothing = model_dir is not None and not gated
    if strict and (not found.usable or nothing or not gated <= computed):
        raise typer.Exit(REFUSED.code)


def _documented_lnc(wanted: str | None, found: Installation) -> tuple[int, str]:
    """Physical cores per logical core that the documents are asked about, and where that is known from."""
    if wanted is not None:
        return int(wanted), "--lnc"
    value, source = found.lnc
    if value is None:
        return 2, "the default of Trn2 and Trn3, since what is set here is wrong"
    return int(value), source


@public("doctor")
def _judge_blocks(
    model_dir: Path, found: Installation, block_size: int | None, lnc: int
) -> tuple[Sequence[Usable], str | None]:
    """The answers, and why there are none where torch or transformers cannot be imported."""
    try:
        from hf_neuron_moe.backends.neuron.limits import Device
        from hf_neuron_moe.cli.conversion import quiet_transformers
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
    return usable_kernels(groups, here, found.why_not, block_size, lnc), None


@public("verify_device")
def verify_device(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Checkpoint or conversion; config.json with --random-weights.")
    ],
    precision: Annotated[
        str | None, choice(KERNEL_PRECISIONS, text="Of the blocks. Default: mxfp8 on Trn3, bf16 on Trn2.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**20, help="Rows of the random input.")] = 256,
    block_size: BlockSize = 512,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first so many blocks. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random input.")] = 0,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Do not read the weights.")] = False,
    backend: Annotated[str, choice(NEURON_BACKENDS, text="nki-sim runs the kernels in NKI's simulator.")] = "neuron",
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Such as neuron:3. Default: neuron:0.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the Neuron kernels with PyTorch on this machine, layer by layer.

    Forward and every gradient of each block on random input: largest relative error, signal-to-noise ratio, verdict,
    and what to do next. Options, config.json and the shards' headers are checked first, then this machine, before any
    weights are read.
    Exit code 0 if rounding explains every difference, 7 if one is more than that, 6 if a block is wrong or failed, 1 if
    no Neuron kernel can run here or none computes a block.
    """
    from hf_neuron_moe.cli.conversion import quiet_transformers
    from hf_neuron_moe.device.model_dir import check_model_dir
    from hf_neuron_moe.device.request import Request

    request = Request(backend, precision, tokens, block_size, seed, layers, device)
    with model_folder(model_dir) as folder:
        quiet_transformers()
        check_model_dir(folder, random_weights=random_weights)
        request.device_here()
        request.precision_here()
        from hf_neuron_moe.device import device_verification

        shown: list[BlockResult] = []

        def show(block: BlockResult) -> None:
            shown.append(block)
            if not as_json:
                _show_block(block)

        report = device_verification.verify_device(
            device_verification.load_for_verification(folder, random_weights=random_weights),
            progress=show,
            **vars(request),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "model": str(model_dir)}))
    else:
        _show_outcome(report, shown)
    if not report.ok:
        raise typer.Exit({"close": CLOSE, "not run": REFUSED}.get(report.verdict, VERIFY).code)


def _show_block(block: BlockResult) -> None:
    typer.echo(f"{block.name} ({block.kind}): {block.verdict}, {block.seconds:.1f} s {block.note}".rstrip())
    rows = [
        (tensor.name, _number(tensor.max_relative, ".1e"), _number(tensor.sqnr_db, ".1f"), tensor.verdict, tensor.note)
        for tensor in block.tensors
    ]
    if rows:
        show_table([("", "max relative", "SQNR dB", "", ""), *rows], indent="  ")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _show_outcome(report: DeviceReport, shown: Sequence[BlockResult]) -> None:
    for block in report.blocks:
        if block not in shown:
            typer.echo(f"{block.name} ({block.kind}): {block.verdict}: {block.note}")
    typer.echo(report.summary())
