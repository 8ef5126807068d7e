"""The result of ``convert`` and ``finalize``: progress, and what was written."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hf_neuron_moe.cli.progress_line import Update, Watch, in_words, watching
from hf_neuron_moe.errors import NeuronMoEWarning

if TYPE_CHECKING:
    from hf_neuron_moe.convert import Manifest


@contextmanager
def converting(label: str) -> Iterator[tuple[Watch, Update]]:
    """Watch a conversion; the package's warnings are part of its result, where --json shows them too."""
    with warnings.catch_warnings(), watching(label) as watched:
        warnings.simplefilter("ignore", NeuronMoEWarning)
        yield watched


def show_manifest(manifest: Manifest, destination: object, watch: Watch, as_json: bool) -> None:
    """Print what was written, in how much time and memory, and what is worth knowing about it."""
    from hf_neuron_moe.convert import nonfinite_note, rounding_note
    from hf_neuron_moe.convert.notes import left_facts, left_notes

    copied = sum(tensor.layout == "source" for tensor in manifest.tensors)
    facts = {
        "ok": True,
        "destination": str(destination),
        "converted_weights": len(manifest.weights) - copied,
        "copied_tensors": copied,
        "files": len({tensor.file for tensor in manifest.tensors}),
        "rounded_values": sum((manifest.rounded or {}).values()),
        "nonfinite_values": sum((manifest.nonfinite or {}).values()),
        "left": left_facts(manifest.left),
        **cost_of(watch),
    }
    text = "{converted_weights} weights converted, {copied_tensors} tensors copied, {files} files in {destination}"
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(text.format(**facts))
    for note in left_notes(manifest.left):
        typer.echo(f"note: {note}")
    if manifest.options.precision == "bf16" and facts["rounded_values"]:
        typer.echo(f"note: {rounding_note(manifest)}")
    if facts["nonfinite_values"]:
        typer.echo(f"note: {nonfinite_note(manifest)}")
    rate = watch.done / max(watch.seconds, 1e-9)
    typer.echo(
        f"{in_words(watch.done)} in {watch.seconds:.1f} s ({in_words(rate)}/s), peak memory {in_words(watch.peak)}"
    )


def cost_of(watch: Watch) -> dict[str, Any]:
    """Return what a conversion read, how long it took, and its memory, for JSON."""
    return {"bytes": watch.done, "seconds": round(watch.seconds, 3), "peak_memory_bytes": watch.peak}
