"""The roofline of ``estimate --device`` as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from hf_neuron_moe.cli.doctor_text import table
from hf_neuron_moe.precision_map import precisions_in

if TYPE_CHECKING:
    from hf_neuron_moe.device.roofline import GroupFloor, Roofline

LAYOUT = "kernel"  # The weight layout that ``"auto"`` takes where Neuron kernels compute
_IN_PLACE = 'With fallback="torch" PyTorch computes them, padded to multiples of 128 (tokens too)'
_HEADINGS = ("activations", "TFLOP", "again", "padding", "GiB", "compute", "memory", "least", "best B")


def show_roofline(floor: Roofline) -> None:
    """Print the floors by block, their sums by policy, what is left out and why, and what does not fit."""
    typer.echo("\n".join(_lines(floor)))


def _lines(floor: Roofline) -> Iterator[str]:
    yield from _head(floor)
    for label, parts in groupby(floor.computed, key=lambda part: _label(floor, part)):
        yield f"\n{label}"
        yield from _table(parts, on_gpu=floor.on_gpu)
    yield ""
    if floor.computed:
        sums = ", ".join(f"{name} {_milliseconds(seconds)} ms" for name, seconds in floor.seconds.items())
        yield f"All {'patched blocks' if floor.on_gpu else 'blocks with kernels'}, at least, per step: {sums}"
    elif floor.on_gpu:
        yield "No block of this model can be patched."
    else:
        yield "No kernel computes a block of this model in this way."
    if any(floor.discarded_seconds.values()):
        most = _milliseconds(max(floor.discarded_seconds.values()))
        yield f"The documented backward kernels also make the gradients of frozen weights: {most} ms more."
    yield from _left_out(floor)
    if floor.memory and floor.copies:
        yield "\nWeight copies in the form that the kernels read, kept until the optimizer's step:"
        for layout, (total, largest) in floor.copies.items():
            yield f"  weights={layout:<8}{gibibytes(total):>12} of all blocks, {gibibytes(largest)} of the largest"
        yield "  Under FSDP2 (weights=stock) none are kept, and the largest block's exist at a time."
    if floor.memory:
        yield from _memory(floor)


def _head(floor: Roofline) -> Iterator[str]:
    core, step = floor.core, floor.step
    peaks = {name: core.flops.get(name) for name in precisions_in(floor.precision)}
    shown = ", ".join(
        f"no {name}" if peak is None else f"{peak / 1e12:,.0f} TFLOP/s in {name}" for name, peak in peaks.items()
    )
    yield f"\nLeast time of forward and backward on {_place(floor)}{'' if floor.on_gpu else ' (LNC 2)'}:"
    yield f"  {shown}, {core.bandwidth / 1e12:.3f} TB/s, {gibibytes(core.memory)}"
    options = [f"{step.tokens:,} tokens per step"]
    options += [] if floor.on_gpu else [f"blocks of {step.block_size} for experts"]
    options += [] if step.trained else ["blocks frozen (no gradients of their weights)"]
    options += ["every forward twice (gradient checkpointing)"] if step.checkpointing else []
    yield f"  {', '.join(options)}"
    text = "An ESTIMATE from published figures; nothing was measured. Per block; times in milliseconds, operations and "
    text += "bytes without padding; " if floor.on_gpu else "bytes with padding; "
    text += "again: operations that are computed a second time. least: forward and backward each at the longer of "
    text += "compute and memory, added up, so it may exceed both. "
    text += "" if floor.on_gpu else "best B: the block size of experts with the least time. "
    text += "Blocks: count x kind (hidden, intermediate size), experts with their number in front."
    if floor.on_gpu:
        same = core.flops.get("mxfp8") == core.flops["bf16"] and "mxfp8" in peaks
        text += f" {core.name} has no products in MXFP8: it multiplies the values as bf16." if same else ""
        text += " No GPU has run this package."
    yield from textwrap.wrap(text, 110)


def _place(floor: Roofline) -> str:
    """What computes the step."""
    return f"one {floor.core.name}" if floor.on_gpu else f"a logical core of {floor.core.name}"


def _label(floor: Roofline, part: GroupFloor) -> str:
    """The blocks of a part, with their precision where not all have the same."""
    return part.group.label if isinstance(floor.precision, str) else f"{part.group.label} in {part.precision}"


def _left_out(floor: Roofline) -> Iterator[str]:
    left = [part for part in floor.groups if part.reason is not None]
    if left:
        why = "they are not patched" if floor.on_gpu else "no Neuron kernel computes them"
        yield f"\nNot in the sum, since {why}:"
    for label, parts in groupby(left, key=lambda part: _label(floor, part)):
        rows = list(parts)
        yield f"{label}: {rows[0].reason}"
        if any(part.floor for part in rows):
            yield f"  {_IN_PLACE}; then at least:"
            yield from _table(rows)


def _memory(floor: Roofline) -> Iterator[str]:
    limit, too_large = f"{gibibytes(floor.core.memory)} of {_place(floor)}", floor.too_large()
    copies = f"with the copies of weights={LAYOUT}"
    if not too_large:
        counted = f"{copies}, before temporaries" if floor.copies else "before temporaries"
        yield f"\nMemory: every total above, {counted}, fits into the {limit}."
        more = [name for name in floor.too_large("stock") if name in floor.policies]
        if more:
            yield f"  With the copies of weights=stock it is more than that: {', '.join(more)}"
        return
    yield f"\nMemory: more than the {limit}{f', {copies}' if floor.copies else ''}:"
    yield from (f"  {name}: {gibibytes(floor.held(name))}" for name in too_large)
    fits = [name for name in floor.memory if name not in too_large]
    if fits:
        yield f"  within it, before temporaries: {', '.join(fits)}"
    where = "GPU" if floor.on_gpu else "core"
    yield f"FSDP2 shards parameters, gradients and states over {where}s. Activations are each {where}'s own: fewer"
    yield "tokens, another policy or gradient checkpointing make them smaller."
    if floor.on_gpu:
        yield "With --fsdp N in place of --device, estimate counts one of N GPUs."


def _table(parts: Iterable[GroupFloor], *, on_gpu: bool = False) -> Iterator[str]:
    rows = [
        (
            ", ".join(part.policies),
            f"{part.floor.padded_flops / 1e12:,.3g}",
            f"{part.floor.recomputed_flops / 1e12:,.3g}",
            f"{part.padding_overhead_percent:,.1f} %",
            f"{part.floor.bytes / 2**30:,.3g}",
            *map(_milliseconds, (part.floor.compute_seconds, part.floor.memory_seconds, part.floor.seconds)),
            str(part.best_block_size or "-"),
        )
        for part in parts
        if part.floor is not None
    ]
    shown = [column for column, heading in enumerate(_HEADINGS) if not (on_gpu and heading in ("padding", "best B"))]
    yield from table([tuple(row[column] for column in shown) for row in (_HEADINGS, *rows)], "  ", numbers=True)


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def gibibytes(size: int) -> str:
    """A size for people, in powers of 1024 as memory counts: ``3.21 GiB``, ``12.0 MiB``."""
    return f"{size / 1024**3:,.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:,.1f} MiB"
