"""The command ``smoke``: every Neuron kernel once on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.cli.exit_codes import CLOSE, REFUSED, VERIFY
from hf_neuron_moe.cli.shared_options import Json, choice, tell
from hf_neuron_moe.device.smoke import CASES, KernelResult, run_smoke
from hf_neuron_moe.output_files import replacing


def smoke(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Report to attach to a bug report.")
    ] = Path("neuron-smoke.json"),
    case: Annotated[str | None, choice(tuple(CASES), text="Only this block. Default: all.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each block, compilation included.")] = 1200,
    seed: Annotated[int, typer.Option(help="Of the random operands.")] = 0,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Such as neuron:3. Default: neuron:0.")] = None,
    as_json: Json = False,
) -> None:
    """Run each Neuron kernel once at a small shape.

    Tells kernels apart that cannot be traced, compiled or run, and those that disagree with PyTorch. Each block runs in
    a process of its own with empty caches, so that one that hangs or crashes does not stop the others. Prints seconds
    of compilation and the operations that ran on the CPU, and writes one file with everything.
    Exit code 0 if all kernels of this chip agree with PyTorch, 7 if one is close, 6 if one fails, 1 if no Neuron kernel
    can run here.
    """

    def show(result: KernelResult) -> None:
        if not as_json:
            typer.echo(result.summary)
            if result.fallback_ops:
                typer.echo(f"  ran on the CPU: {', '.join(result.fallback_ops)}")

    if output.exists() and not output.is_file():
        kind = "a folder" if output.is_dir() else "a device, a pipe or a socket"
        raise typer.BadParameter(f"{str(output)!r} is {kind}.", param_hint="--output")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{str(output)!r} is in no existing folder.", param_hint="--output")
    report = run_smoke(device=device, cases=(case,) if case else CASES, timeout=timeout, seed=seed, progress=show)
    with replacing(output) as partial:
        partial.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
    tell(
        as_json,
        {**report.to_dict(), "report": str(output)},
        report.summary(),
        f"Everything is in {output}: attach it to a bug report.",
    )
    if report.verdict != "pass":
        raise typer.Exit({"close": CLOSE, "not run": REFUSED}.get(report.verdict, VERIFY).code)
