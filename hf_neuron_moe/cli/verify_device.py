"""The command ``verify-device``: the Neuron kernels against PyTorch on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron.generations import KERNEL_PRECISIONS
from hf_neuron_moe.backends.neuron.versions import settle_environment
from hf_neuron_moe.cli.doctor_text import show_table
from hf_neuron_moe.cli.exit_codes import CLOSE, REFUSED, VERIFY
from hf_neuron_moe.cli.model_folder import model_folder, quiet_transformers
from hf_neuron_moe.cli.shared_options import BlockSize, Json, choice, tell
from hf_neuron_moe.config import ACCUMULATIONS

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
    accumulation: Annotated[
        str, choice(ACCUMULATIONS, text="device: compare bf16 experts with a reference that rounds as the kernels do.")
    ] = ACCUMULATIONS[0],
    as_json: Json = False,
) -> None:
    """Compare Neuron kernels with PyTorch, layer by layer.

    Forward and every gradient of each block on random input: largest relative error, signal-to-noise ratio, verdict,
    and what to do next. Options, config.json and the shards' headers are checked first, then this machine, before any
    weights are read. Exit code 0 if rounding explains every difference, 7 if one is more than that, and 6 if a block is
    wrong or failed. It is 1 if no Neuron kernel can run here or none computes a block.
    """
    settle_environment()  # before torch is imported, which may load the plugin
    from hf_neuron_moe.device.model_dir import check_model_dir
    from hf_neuron_moe.device.request import Request

    request = Request(backend, precision, tokens, block_size, seed, layers, device, accumulation)
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

        model = device_verification.load_for_verification(folder, random_weights=random_weights)
        report = device_verification.verify_device(model, progress=show, **vars(request))
    rest = [block for block in report.blocks if block not in shown]
    notes = [f"{block.name} ({block.kind}): {block.verdict}: {block.note}" for block in rest]
    tell(as_json, {**report.to_dict(), "model": str(model_dir)}, *notes, report.summary())
    if not report.ok:
        raise typer.Exit({"close": CLOSE, "not run": REFUSED}.get(report.verdict, VERIFY).code)


def _show_block(block: BlockResult) -> None:
    typer.echo(f"{block.name} ({block.kind}): {block.verdict}, {block.seconds:.1f} s {block.note}".rstrip())
    rows = []
    for tensor in block.tensors:
        numbers = ((tensor.max_relative, ".1e"), (tensor.sqnr_db, ".1f"))
        shown = ["-" if value is None else format(value, form) for value, form in numbers]
        rows.append((tensor.name, *shown, tensor.verdict, tensor.note))
    if rows:
        show_table([("", "max relative", "SQNR dB", "", ""), *rows], indent="  ")
