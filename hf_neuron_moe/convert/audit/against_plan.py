"""Does a manifest say of its source what this package says of it? A plan needs only ``config.json`` and headers.

A manifest that agrees with itself and with every byte may still have another gate, or its experts in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.io.tensors import TORCH_DTYPES, open_tensors
from hf_neuron_moe.convert.layout.orientations import SOURCE
from hf_neuron_moe.convert.layout.relayout import rounded_values
from hf_neuron_moe.convert.manifest import Manifest, Network
from hf_neuron_moe.convert.plan import ConversionPlan, plan_of
from hf_neuron_moe.errors import ConversionError, naming

Found = list[tuple[str, str]]


def check_plan(source: Path, manifest: Manifest) -> tuple[Found, Found]:
    """Plan the conversion of `source` once more and compare: what is wrong, and what other versions do otherwise."""
    try:
        with naming("verify"):
            plan = plan_of(source, manifest.options)
    except ConversionError as error:
        return [("source", f"no conversion of it can be planned: {error}")], []
    converted = {tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE}
    found = list(_wrong(plan, manifest, converted))
    newer = [(name, "in its source form, and would be converted") for name in sorted(plan.weights.keys() - converted)]
    if manifest.left is not None:
        both = [{name: (m.tensors, m.nbytes) for name, m in left.items()} for left in (manifest.left, plan.left)]
        differing = sorted(name for name in {*both[0], *both[1]} if both[0].get(name) != both[1].get(name))
        message = "what stays in its source form differs from what the source's configuration says"
        newer += [(name, message) for name in differing]
    return (found + newer, []) if manifest.tool_version == __version__ else (found, newer)


def _wrong(plan: ConversionPlan, manifest: Manifest, converted: set[str]) -> Iterator[tuple[str, str]]:
    """What no version of this package makes of the source."""
    if plan.source.format != manifest.source_format:
        yield "source", "its quantized tensors are not stored as the manifest says"
    for name in sorted(converted):
        if name not in plan.weights:
            yield name, "converted, and the source has no such weight of an MLP or of experts that can be"
        elif set(plan.pieces[name]) != set(manifest.weights[name]):
            yield name, "made of other tensors, or in another order, than the source's configuration says"
    silent = Network({})
    for module in sorted(plan.networks.keys() | manifest.networks.keys()):
        said, right = (each.get(module, silent) for each in (manifest.networks, plan.networks))
        if said != right and any(name.startswith(f"{module}." if module else "") for name in converted):
            yield module, f"said to compute {_words(said)}, and the source's configuration says {_words(right)}"


def _words(network: Network) -> str:
    gate = ", ".join(f"{name} {value}" for name, value in sorted(network.gate.items())) or "silu(gate) * up"
    biases = ", ".join(filter(None, network.biases))
    return gate + (f" with {biases}" if biases else "")


def check_rounded(source: Path, manifest: Manifest, step: Callable[[int], None]) -> Found:
    """Count the values of wider dtypes that bf16 does not hold once more."""
    if manifest.rounded is None:
        return []
    found = []
    converted = {tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE}
    pieces = [piece for name in sorted(converted) for piece in manifest.weights[name]]
    with open_tensors(source, manifest.encodings) as reader:
        for piece in pieces:
            said, count = manifest.rounded.get(piece.source, 0), 0
            if piece.dtype != "BF16":
                for part in reader.chunks(piece.file, piece.source):
                    count += rounded_values(part.view(TORCH_DTYPES[piece.dtype]))
                    step(part.numel())
            if said != count:
                found.append((piece.source, f"{said:,} values said to be rounded to bf16, {count:,} are"))
    others = manifest.rounded.keys() - {piece.source for piece in pieces}
    return found + [(name, "values said to be rounded, and no weight is made of it") for name in sorted(others)]
