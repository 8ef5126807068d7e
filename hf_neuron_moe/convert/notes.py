"""What a conversion leaves in its source form, rounds and keeps, in sentences.

Left are modules that look like MLPs or experts and that no kernel computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from hf_neuron_moe.convert.audit.compare import MX_FLOORS_DB
from hf_neuron_moe.convert.io.source import Encoding
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SOURCE
from hf_neuron_moe.convert.manifest import LeftModule, Manifest, Piece, WrittenTensor, grouped, grouped_names
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.errors import ConversionError, NeuronMoEWarning, counted, pattern_of, printable

Left = Mapping[str, LeftModule]


def left_facts(left: Left | None) -> dict[str, Any] | None:
    """What ``--json`` prints: modules by name, and their tensors and bytes together; None where it is not known."""
    if left is None:
        return None
    return {
        "modules": {name: asdict(module) for name, module in left.items()},
        "tensors": sum(module.tensors for module in left.values()),
        "bytes": sum(module.nbytes for module in left.values()),
    }


def left_notes(left: Left | None) -> list[str]:
    """One sentence for each kind of module and reason; none where nothing is left."""
    left = left or {}
    return [
        printable(
            f"{counted(len(names), 'module')} left in source form "
            f"({counted(sum(left[name].tensors for name in names), 'tensor')}, "
            f"{sum(left[name].nbytes for name in names):,} bytes): {spelled}: {reason}"
        )
        for spelled, names, reason in grouped_names({name: module.reason for name, module in left.items()})
    ]


def check_nothing_left(left: Left, weights: Iterable[str]) -> None:
    """Refuse a conversion that would leave modules in their source form, for ``strict``; others have the `weights`."""
    if left:
        expected, got = "one that convert takes, with strict", "; ".join(left_notes(left))
        others = {name.removesuffix(".weight").rpartition(".")[0] for name in weights}
        wide = {glob for glob in map(pattern_of, left) if any(fnmatchcase(name, glob) for name in others)}
        names = sorted({name if pattern_of(name) in wide else pattern_of(name) for name in left})
        globs = " ".join(f"--keep-bf16 {name!r}" for name in names)
        fix = f"Leave --strict out to copy what these modules hold as it is, or, in an MX conversion, add {globs}."
        raise ConversionError.about("every MLP and experts module", expected, got, fix)


def warn_of_losses(manifest: Manifest) -> None:
    """Warn when a bf16 conversion rounded values, and when modules stayed in their source form."""
    for note in left_notes(manifest.left):
        warnings.warn(f"convert: {note}", NeuronMoEWarning, stacklevel=4)
    if note := rounding_note(manifest):
        warnings.warn(f"convert: {note}", NeuronMoEWarning, stacklevel=4)


def rounding_note(manifest: Manifest) -> str:
    """Say in one sentence how many values were rounded in blocks that are stored in bf16; empty where none were."""
    stored = [pieces for weight, pieces in manifest.weights.items() if not manifest.options.of(weight).quantized]
    pieces = {piece.source: piece for group in stored for piece in group}
    rounded = {name: count for name, count in (manifest.rounded or {}).items() if name in pieces}
    if not rounded:
        return ""
    values = sum(math.prod(pieces[name].shape) for name in rounded)
    kinds = "/".join(sorted({pieces[name].dtype for name in rounded}))
    return (
        f"{sum(rounded.values()):,} of {values:,} {kinds} values in {counted(len(rounded), 'tensor')} "
        f"(first: {min(rounded)}) do not fit bf16 and were rounded; keep the original checkpoint, "
        "export cannot bring them back."
    )


def requantized(
    weights: Mapping[str, Sequence[Piece]],
    tensors: Iterable[WrittenTensor],
    encodings: Mapping[str, Encoding],
    options: ConvertOptions,
) -> dict[str, Any] | None:
    """What ``--json`` prints of codes whose values are quantized again, with the least SQNR; None without any."""
    found: dict[str, Piece] = {}
    floors = []
    for weight, stored in grouped(tensors, lambda tensor: tensor.weight).items():
        own, layouts = options.of(weight), {tensor.layout for tensor in stored}
        coded = {piece.source: piece for piece in weights[weight] if piece.source in encodings}
        if coded and SOURCE not in layouts and own.quantized and layouts.isdisjoint(PERMUTED_WORDS.values()):
            found |= coded
            floors.append(MX_FLOORS_DB[str(own.precision)][own.rule])
    values = sum(math.prod(piece.shape) for piece in found.values())
    return {"tensors": len(found), "values": values, "sqnr_floor_db": min(floors)} if found else None


def requantized_note(facts: Mapping[str, Any] | None) -> str:
    """Say in one sentence what :func:`requantized` found; empty where it is None."""
    if facts is None:
        return ""
    return (
        f"{facts['tensors']:,} tensors of codes ({facts['values']:,} values) are decoded and quantized again in MX: "
        f"the error of a matrix is at most {10 ** (-facts['sqnr_floor_db'] / 20):.1%} of its norm "
        f"(SQNR {facts['sqnr_floor_db']:g} dB)."
    )


def nonfinite_note(manifest: Manifest) -> str:
    """Say in one sentence how many NaN and infinite values a conversion kept; empty where it kept none."""
    kept = manifest.nonfinite or {}
    if not kept:
        return ""
    effect = "they are in the weights as they were."
    if manifest.options.quantized:
        effect = (
            "in MX such a value spoils its whole block, whose other values become zero or NaN, and an infinity may "
            "turn into the largest finite code under the largest scale."
        )
    found = f"{sum(kept.values()):,} NaN or infinite values in {counted(len(kept), 'tensor')} (first: {min(kept)})"
    return f"{found} were kept: {effect}"
