"""What ``doctor`` found, as text. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hf_neuron_moe.device.installed import Installation
    from hf_neuron_moe.device.kernel_support import Usable

_NEEDS_OF_KIND = {"mlp": ("mlp_",), "experts": ("moe_",)}  # how the needs of each kind of block begin
_OF_BOTH = ("moe_forward", "moe_backward")  # the bf16 kernels of experts compute dense blocks too


def show_installation(found: Installation, kinds: Collection[str] = ()) -> None:
    """Print whether kernels can run, what to do first, what is installed, and the kernels of `kinds`, or of all."""
    typer.echo(f'backend="neuron" can run here: {"yes" if found.usable else "no"}')
    if found.unsupported_reason is not None:
        typer.echo(f"  why:   {found.unsupported_reason}")
    for number, step in enumerate(found.first_steps):
        typer.echo(f"  {'then: ' if number else 'next: ' if found.usable else 'first:'} {step}")
    typer.echo(f'backend="nki-sim" can run here: {_answer(found.simulator_reason)}')
    everywhere = "yes, as on any device; it computes the same contract"
    typer.echo(f'backend="torch" can run here: {_answer(found.torch_reason, everywhere)}')
    by = "yes" if found.gpus.names else "yes, in Triton's interpreter"
    typer.echo(f'backend="triton" can run here: {_answer(found.gpus.triton_reason, by)}')
    for name in found.gpus.names:
        typer.echo(f"GPU: {name}")
    typer.echo(
        "No GPU has run this package. Compare losses with the stock model first."
        if found.gpus.names
        else f"GPU: none: {found.gpus.reason}"
    )
    typer.echo(f"\nPython {found.python}, {found.machine}; Neuron SDK {found.sdk or 'not installed'}")
    typer.echo(", ".join(f"{name} {version or 'not installed'}" for name, version in found.others.items()))
    rows = [(package.name, package.version or "-", package.state, package.note) for package in found.packages]
    show_table([("package", "version", "state", "note"), *rows])
    cores = "no runtime" if found.devices is None else f"{found.devices} logical cores"
    typer.echo(f"\ndevice: {cores}; chip {found.target[0] or 'unknown'} ({found.target[1]})")
    typer.echo(f"LNC (physical cores per logical core) {found.lnc[0] or 'unknown'} ({found.lnc[1]})")
    for name, value in found.environment.items():
        typer.echo(f"{name}={value}")
    for wrong in found.wrong_variables:
        typer.echo(f"wrong: {wrong}")
    wanted = tuple(start for kind in kinds or _NEEDS_OF_KIND for start in _NEEDS_OF_KIND[kind])
    kernels = [kernel for kernel in found.kernels if kernel.need.startswith(wanted) or kernel.need in _OF_BOTH]
    cells = [(kernel.need, kernel.function, kernel.generation or "-", kernel.reason) for kernel in kernels]
    show_table([("kernel for", "in nkilib", "arguments of", "note"), *cells])
    for note in dict.fromkeys(kernel.note for kernel in kernels if kernel.note):
        needs = " and ".join(kernel.need for kernel in kernels if kernel.note == note)
        typer.echo(f"{needs}: {note}.")


def show_usable(
    answers: Sequence[Usable], found: Installation, title: str, unjudged: str | None, documented: str
) -> None:
    """Print which kernels compute which blocks of a model.

    `title` is what was looked at, `unjudged` why there are no answers, and `documented` what the answers by the
    documents are for, such as ``"LNC 2 (--lnc)"``.
    """
    if unjudged is not None:
        typer.echo(f"\nBlocks of {title}: not looked at: {unjudged}")
        return
    typer.echo(f"\nBlocks of {title}, written as count x kind (hidden, intermediate size), experts with their number")
    typer.echo(f"trn2 and trn3: by the documents of SDK 2.33, {documented}")
    for answer in answers:
        typer.echo(f"{answer.group.label}, {answer.precision}: {', '.join(answer.kernels) or 'no kernels'}")
        for place, reason in {"here": answer.here, **answer.documented}.items():
            shown = _answer(reason, "yes, in inference" if answer.group.codes else "yes")
            if reason is not None and reason == found.unsupported_reason:
                shown = "no, see the top"
            sizes = f"block sizes {', '.join(map(str, answer.block_sizes.get(place, ())))}"
            listed = place in answer.block_sizes and answer.block_sizes[place] and sizes not in (reason or "")
            typer.echo(f"  {place}  {shown}{f'; {sizes}' if listed else ''}")
        if None in (answer.here, *answer.documented.values()):
            for note in answer.notes:
                typer.echo(f"  note  {note}.")
    if any(answer.group.codes for answer in answers):
        typer.echo("MX weights have kernels for inference only. Train adapters on them with fallback='torch'.")
        reasons = [answer.documented["trn3"] or "" for answer in answers if answer.group.codes]
        if any(reason and "LNC" not in reason for reason in reasons):
            typer.echo(
                "`hf-neuron-moe convert SRC DST --precision mxfp8 --for inference --pad` writes experts as words and "
                "adds zeros up to the sizes that the kernels take."
            )
    if any(answer.group.experts is not None and not answer.group.codes for answer in answers):
        size = answers[0].block_size
        typer.echo(f"Experts are judged at block_size={size}; NeuronMoEConfig(block_size=...) chooses another one.")
    if not answers:
        typer.echo("none that patch_model knows")


def _answer(reason: str | None, yes: str = "yes") -> str:
    return yes if reason is None else f"no: {reason}"


def show_table(rows: Sequence[tuple[str, ...]], indent: str = "") -> None:
    """Print rows whose first one has the headings."""
    typer.echo("\n".join(table(rows, indent)))


def table(rows: Sequence[tuple[str, ...]], indent: str = "", *, numbers: bool = False) -> Iterator[str]:
    """Yield the lines of a table, whose columns of `numbers` (all but the first) are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width in zip(others, widths[1:])]
        yield f"{indent}{'  '.join([first.ljust(widths[0]), *cells])}".rstrip()
