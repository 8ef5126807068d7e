"""The commands about a Neuron machine: ``doctor`` and ``verify-device``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.cli.exit_codes import CLOSE, REFUSED, VERIFY
from hf_neuron_moe.cli.options import Json, choice

if TYPE_CHECKING:
    from hf_neuron_moe.device.installed import Installation
    from hf_neuron_moe.device.outcome import BlockResult, DeviceReport
    from hf_neuron_moe.device.usable import Usable

DEVICE_BACKENDS = ("neuron", "nki-sim")
KERNEL_PRECISIONS = ("bf16", "mxfp8")


def doctor(
    model_dir: Annotated[
        Path | None, typer.Argument(metavar="[MODEL_DIR]", help="Folder with config.json: also judge its blocks.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=128, help="Tokens per block of experts.")] = 512,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 if no Neuron kernel can run here, or none computes a block.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell what of the Neuron stack is installed and which kernels can be used.

    Works with nothing installed. With MODEL_DIR also: which kernels compute which of the model's blocks, here and by
    the documents of SDK 2.33 on Trn2 and Trn3, and why not. The exit code is 0 whatever was found, unless --strict is
    given.
    """
    from hf_neuron_moe.device.installed import inspect_installation

    found = inspect_installation()
    answers = _judge_blocks(model_dir, found, block_size) if model_dir is not None else []
    if as_json:
        blocks = {"model": str(model_dir), "blocks": [answer.to_dict() for answer in answers]} if model_dir else {}
        typer.echo(json.dumps({"ok": True, **found.to_dict(), **blocks}))
    else:
        _show_installation(found)
        if model_dir is not None:
            _show_usable(answers, str(model_dir))
    groups = {answer.group: False for answer in answers}
    groups |= {answer.group: True for answer in answers if answer.here is None}
    if strict and not (found.usable and all(groups.values())):
        raise typer.Exit(REFUSED.code)


def _judge_blocks(model_dir: Path, found: Installation, block_size: int) -> list[Usable]:
    from hf_neuron_moe.backends.neuron.limits import Device
    from hf_neuron_moe.cli.conversion import quiet_transformers
    from hf_neuron_moe.cli.estimating import model_folder
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.device.usable import block_groups, usable_kernels

    quiet_transformers()
    with model_folder(model_dir) as folder:
        groups = block_groups(build_meta_model(folder, "doctor"))
    target, lnc = found.target[0], found.lnc[0]
    here = Device(target, int(lnc)) if target is not None and lnc is not None else None
    return usable_kernels(groups, here, found.reason, block_size)


def verify_device(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Checkpoint, conversion, or config.json alone.")
    ],
    precision: Annotated[
        str | None, choice(KERNEL_PRECISIONS, text="Of the blocks. Default: mxfp8 on Trn3, bf16 on Trn2.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the random input.")] = 256,
    block_size: Annotated[int, typer.Option(min=128, help="Tokens per block of experts.")] = 512,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first so many blocks. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random input.")] = 0,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Do not read the weights.")] = False,
    backend: Annotated[str, choice(DEVICE_BACKENDS, text="nki-sim runs the kernels in NKI's simulator.")] = "neuron",
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Such as neuron:3. Default: neuron:0.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the Neuron kernels with PyTorch on this machine, layer by layer.

    Forward and every gradient of each block on random input: largest relative error, signal-to-noise ratio, verdict,
    and what to do next. Options and MODEL_DIR are checked first, then this machine, before any weights are read.
    Exit code 0 if rounding explains every difference, 7 if one is more than that, 6 if a block is wrong or failed, 1 if
    no Neuron kernel can run here or none computes a block.
    """
    from hf_neuron_moe.cli.conversion import quiet_transformers
    from hf_neuron_moe.cli.estimating import model_folder
    from hf_neuron_moe.convert.folder import check_model
    from hf_neuron_moe.device.request import WHERE, Request

    request = Request(backend, precision, tokens, block_size, seed, layers, device)
    with model_folder(model_dir) as folder:
        check_model(folder, WHERE)
        request.device_here()
        request.precision_here()
        from hf_neuron_moe.device import verify

        quiet_transformers()
        report = verify.verify_device(
            verify.load_for_verification(folder, random_weights=random_weights),
            progress=None if as_json else _show_block,
            **vars(request),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "model": str(model_dir)}))
    else:
        _show_outcome(report)
    if not report.ok:
        raise typer.Exit({"close": CLOSE, "not run": REFUSED}.get(report.verdict, VERIFY).code)


def _show_installation(found: Installation) -> None:
    yes = "yes" if found.usable else f"no: {found.reason}"
    typer.echo(f'backend="neuron" can run here: {yes}')
    simulated = "yes" if found.simulator_reason is None else "no"
    typer.echo(f'backend="nki-sim" can run here: {simulated}; backend="torch": yes, on any device')
    typer.echo(f"\nPython {found.python}, {found.machine}; Neuron SDK {found.sdk or 'not installed'}")
    typer.echo(", ".join(f"{name} {version or 'not installed'}" for name, version in found.others.items()))
    rows = [("package", "version", "state", "note")]
    rows += [(package.name, package.version or "-", package.state, package.note) for package in found.packages]
    _show_table(rows)
    cores = "no runtime" if found.devices is None else f"{found.devices} logical cores"
    typer.echo(f"\ndevice: {cores}; chip {found.target[0] or 'unknown'} ({found.target[1]})")
    typer.echo(f"LNC {found.lnc[0] or 'unknown'} ({found.lnc[1]})")
    for name, value in found.environment.items():
        typer.echo(f"{name}={value}")
    kernels = [(kernel.need, kernel.function, kernel.generation or "-", kernel.reason) for kernel in found.kernels]
    _show_table([("kernel for", "in nkilib", "arguments of", "note"), *kernels])


def _show_usable(answers: list[Usable], title: str) -> None:
    def told(reason: str | None) -> str:
        return "yes" if reason is None else f"no: {reason}"

    typer.echo(f"\nBlocks of {title}; trn2 and trn3: by the documents of SDK 2.33, LNC 2")
    for answer in answers:
        typer.echo(f"{answer.group.label}, {answer.precision}: {', '.join(answer.kernels) or 'no kernels'}")
        typer.echo(f"  here  {told(answer.here)}")
        for chip, reason in answer.documented.items():
            typer.echo(f"  {chip}  {told(reason)}")
    if not answers:
        typer.echo("none that patch_model knows")


def _show_block(block: BlockResult) -> None:
    typer.echo(f"{block.name} ({block.kind}): {block.verdict}, {block.seconds:.1f} s {block.note}".rstrip())
    rows = [
        (tensor.name, _number(tensor.max_relative, ".1e"), _number(tensor.sqnr_db, ".1f"), tensor.verdict, tensor.note)
        for tensor in block.tensors
    ]
    if rows:
        _show_table([("", "max relative", "SQNR dB", "", ""), *rows], indent="  ")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _show_outcome(report: DeviceReport) -> None:
    for block in report.blocks:
        if not block.tensors and block.verdict != "error":
            typer.echo(f"{block.name} ({block.kind}): {block.verdict}: {block.note}")
    typer.echo(report.summary())


def _show_table(rows: Sequence[tuple[str, ...]], indent: str = "") -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        typer.echo(f"{indent}{line}".rstrip())
