"""Whether a manifest agrees with itself: what a weight is stored as follows from its pieces and from the options.

Its checksum may be right and somebody else its author, so that is derived once more before anything is read by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hf_neuron_moe.convert.audit.networks import is_gate
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, SOURCE, ranks_of, stored_forms
from hf_neuron_moe.convert.layout.relayout import WEIGHT_DTYPES
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, codes_kept, experts_in, is_gate_up
from hf_neuron_moe.convert.manifest import Manifest, Piece, WrittenTensor, grouped
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.errors import NeuronMoEError


def disagreements(manifest: Manifest) -> list[tuple[str, str]]:
    """Find weights whose stored tensors are not what their pieces and the options make, and say what is wrong."""
    found = [
        (weight, message)
        for weight, tensors in manifest.by_weight().items()
        if weight in manifest.weights
        for message in _wrong(weight, manifest.weights[weight], tensors, manifest)
    ]
    return found or [(module, message) for module in manifest.networks for message in _wrong_network(module, manifest)]


def _wrong_network(module: str, manifest: Manifest) -> Iterator[str]:
    """What a module is said to compute that no block of its weights computes."""
    prefix, network = f"{module}." if module else "", manifest.networks[module]
    roles = ("gate_up_proj", "up_proj", "down_proj")
    names = [prefix + role + suffix for suffix in ("", ".weight") for role in roles]
    weights = [manifest.weights[name] for name in names if name in manifest.weights]
    if len(weights) != 2:
        yield "said to compute something, without the weights of a converted block"
        return
    gated = is_gate_up(next(name for name in names if name in manifest.weights))
    if not is_gate(network.gate, gated):
        yield f"said to have the gate {network.gate}, which no block of its weights has"
    sizes = [max(piece.rows.stop for piece in pieces) for pieces in weights]
    inputs = max(1, len(network.biases) - 1)
    rows = [*[sizes[0] // inputs] * inputs, sizes[1]]
    shapes = [manifest.weights[name][0].shape[-1:] if name else () for name in network.biases]
    counts = (0, 2, 3) if gated else (0, 2)
    if len(shapes) not in counts or any(shape not in ((), (size,)) for shape, size in zip(shapes, rows)):
        yield f"said to have the biases {', '.join(network.biases)}, which do not fit its weights"


def _wrong(weight: str, pieces: Sequence[Piece], tensors: list[WrittenTensor], manifest: Manifest) -> list[str]:
    options, permuted = manifest.options, tensors[0].layout in PERMUTED_WORDS.values()
    if any(tensor.layout == SOURCE for tensor in tensors):
        if len(tensors) > 1 or len(pieces) != 1 or tensors[0].name != weight:
            return ["copied, but not as one tensor of one source tensor"]
        same = (tensors[0].dtype, tensors[0].shape) == (pieces[0].dtype, pieces[0].shape)
        return [] if same else ["copied, but with another dtype or shape than its source"]
    if messages := list(_gaps(pieces)):
        return messages
    experts = experts_in(pieces)
    shape = (max(piece.rows.stop for piece in pieces), _columns(pieces[0]))
    # Codes that could be kept may have been quantized again: versions before 6 did that.
    codes = codes_kept(_both(weight, manifest), manifest.encodings) if permuted else ""
    fused = FusedWeight(weight, shape if experts is None else (experts, *shape), tuple(pieces), codes)
    reordered = [piece for piece in pieces if piece.interleaved or piece.up_first]
    alone = is_gate_up(weight) and len(pieces) == 1 and pieces[0].transposed <= pieces[0].interleaved
    if reordered and (not alone or pieces[0].up_first is pieces[0].interleaved):
        return ["made of interleaved tensors that are no gate_up weight"]
    if {piece.dtype for piece in pieces} - WEIGHT_DTYPES.keys() or (is_gate_up(weight) and shape[0] % 2):
        return ["made of tensors that no weight is made of"]
    facts = [replace(tensor, file="", checksum="") for tensor in tensors]  # which the options do not decide
    if not any(facts == _expected(fused, choice, options.orientations, len(tensors)) for choice in _possible(options)):
        return ["stored as tensors that these options do not make of it"]
    return []


def _both(weight: str, manifest: Manifest) -> list[Piece]:
    """The pieces of a block's two weights, which are permuted together; none where one is missing or is not."""
    prefix = weight[: weight.rfind(".") + 1]
    first = "up_proj" if f"{prefix}up_proj" in manifest.weights else "gate_up_proj"
    names = [prefix + role for role in (first, "down_proj")]
    values = (tensor for tensor in manifest.tensors if tensor.weight in names and tensor.layout not in SCALES)
    if {(tensor.weight, tensor.layout in PERMUTED_WORDS.values()) for tensor in values} != {(n, True) for n in names}:
        return []
    return [piece for name in names for piece in manifest.weights.get(name, ())]


def _gaps(pieces: Sequence[Piece]) -> Iterator[str]:
    """Say where pieces do not fill a fused weight: every expert, every row, once; and where they are no matrices."""
    if not pieces:
        yield "made of nothing"
        return
    for piece in pieces:
        fits = not piece.stacked or (len(piece.shape) == 2 and piece.shape[0] % piece.stacked == 0)
        fits = fits and len(piece.shape) in (2, 3) and 0 not in piece.shape
        if not fits or (piece.holds_experts and piece.expert is not None):
            yield f"made of {piece.source}, which has the shape {list(piece.shape)}"
            return
    if len({piece.experts for piece in pieces if piece.holds_experts}) > 1:
        yield "made of tensors of different numbers of experts"
        return
    rows = grouped(pieces, lambda piece: piece.expert)
    experts = sorted(expert for expert in rows if expert is not None)
    if experts and (experts != list(range(len(experts))) or None in rows):
        yield f"made of experts {experts}"
    columns = sorted(set(map(_columns, pieces)))
    if len(columns) > 1:
        yield f"made of matrices with {columns} columns"
    ends = set()
    for expert, parts in rows.items():
        end = 0
        for start, stop in sorted((piece.rows.start, piece.rows.stop) for piece in parts):
            if start != end:
                place = "" if expert is None else f" of expert {expert}"
                several = "no" if start > end else "two"
                yield f"rows {min(start, end)} to {max(start, end)}{place} have {several} sources"
            end = stop
        ends.add(end)
    if len(ends) > 1:
        yield f"experts with {sorted(ends)} rows"


def _columns(piece: Piece) -> int:
    return piece.matrix[0 if piece.transposed else 1]


def _possible(options: ConvertOptions) -> list[ConvertOptions]:
    """The options, and for format version 1, which made no words for experts, those whose forward operands it wrote."""
    first = ConvertOptions(options.precision, options.layout, options.max_shard_bytes, purpose="inference")
    older = options == first and options.precision == "mxfp8"
    return [options, replace(options, purpose="training")] if older else [options]


def _expected(
    weight: FusedWeight, options: ConvertOptions, orientations: tuple[str, ...], most: int
) -> list[WrittenTensor]:
    """What the options make of a weight; nothing where that is more than `most` ranks, or cannot be."""
    ranks = ranks_of(weight, options)
    if len(ranks) > most:
        return []
    try:
        forms = [form for rank in ranks for form in stored_forms(weight, options, rank)]
    except NeuronMoEError:
        return []
    return [form.written(weight.name) for form in forms if form.orientation in orientations]
