"""The command ``verify-device``: the Neuron kernels against PyTorch on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron.generations import KERNEL_PRECISIONS
from hf_neuron_moe.cli.doctor_text import show_table
from hf_neuron_moe.cli.exit_codes import CLOSE, REFUSED, VERIFY
from hf_neuron_moe.cli.model_folder import model_folder, quiet_transformers
from hf_neuron_moe.cli.shared_options import BlockSize, Json, choice

if TYPE_CHECKING:
    from hf_neuron_moe.device.device_report import BlockResult


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
    from hf_neuron_moe.device.model_dir import check_model_dir
    from hf_neuron_moe.device.request import Request

    request = Request(backend, precision, tokens, block_size, seed, layers, device)
    with model_folder(model_dir) as folder:
        quiet_transformers()
        check_model_dir(folder, random_weights=random_weights)
        request.device_here()
        request.precision_here()
        from hf_neuron_moe.device.device_verification import load_for_verification
        from hf_neuron_moe.device.device_verification import verify_device as verify

        shown: list[BlockResult] = []

        def show(block: BlockResult) -> None:
            shown.append(block)
            if not as_json:
                _show_block(block)

        report = verify(
            load_for_verification(folder, random_weights=random_weights),
            progress=show,
            **vars(request),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "model": str(model_dir)}))
    else:
        for block in report.blocks:
            if block not in shown:
                typer.echo(f"{block.name} ({block.kind}): {block.verdict}: {block.note}")
        typer.echo(report.summary())
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
