"""Whether a manifest agrees with itself: what a weight is stored as follows from its pieces and from the options.

A manifest whose checksum is right may still have been made by somebody else. Whatever reads tensors by it relies on
shapes and layouts that belong together, so they are derived once more and compared before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_neuron_moe.convert.layout.orientations import SOURCE, stored_forms
from hf_neuron_moe.convert.layout.relayout import WEIGHT_DTYPES
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, is_gate_up
from hf_neuron_moe.convert.manifest import Manifest, Piece, WrittenTensor
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.errors import NeuronMoEError

Found = list[tuple[str, str]]


def disagreements(manifest: Manifest) -> Found:
    """Compare every weight's stored tensors with those that its pieces and the options make.

    Returns:
        Pairs of a weight and what is wrong with it.
    """
    known = {weight: tensors for weight, tensors in manifest.by_weight().items() if weight in manifest.weights}
    wrong = {weight: _wrong(weight, manifest.weights[weight], tensors, manifest) for weight, tensors in known.items()}
    return [(weight, message) for weight, message in wrong.items() if message]


def fills(pieces: Sequence[Piece]) -> list[str]:
    """Say where pieces do not fill a fused weight: every expert, every row, once; and where they are no matrices."""
    for piece in pieces:
        if len(piece.shape) not in (2, 3) or 0 in piece.shape or (piece.holds_experts and piece.expert is not None):
            return [f"made of {piece.source}, which has the shape {list(piece.shape)}"]
    if len({piece.shape[0] for piece in pieces if piece.holds_experts}) > 1:
        return ["made of tensors of different numbers of experts"]
    return _gaps(pieces)


def _wrong(weight: str, pieces: Sequence[Piece], tensors: list[WrittenTensor], manifest: Manifest) -> str | None:
    if any(tensor.layout == SOURCE for tensor in tensors):
        if len(tensors) > 1 or len(pieces) != 1 or tensors[0].name != weight:
            return "copied, but not as one tensor of one source tensor"
        same = (tensors[0].dtype, tensors[0].shape) == (pieces[0].dtype, pieces[0].shape)
        return None if same else "copied, but with another dtype or shape than its source"
    if not pieces or fills(pieces):
        return "its source tensors do not fill it"
    fused = _fused(weight, pieces)
    if {piece.dtype for piece in pieces} - WEIGHT_DTYPES.keys() or (is_gate_up(weight) and fused.shape[-2] % 2):
        return "made of tensors that no weight is made of"
    told, options = [_facts(tensor) for tensor in tensors], manifest.options
    if not any(told == _expected(fused, choice, options.orientations, len(tensors)) for choice in _possible(options)):
        return "stored as tensors that these options do not make of it"
    return None


def _fused(weight: str, pieces: Sequence[Piece]) -> FusedWeight:
    first = pieces[0]
    columns = first.shape[-2 if first.transposed else -1]
    experts: tuple[int, ...] = ()
    if first.holds_experts:
        experts = (first.shape[0],)
    elif first.expert is not None:
        experts = (1 + max(piece.expert or 0 for piece in pieces),)
    return FusedWeight(weight, (*experts, max(piece.rows.stop for piece in pieces), columns), tuple(pieces))


def _possible(options: ConvertOptions) -> list[ConvertOptions]:
    """The options, and for format version 1, which made no words for experts, those whose forward operands it wrote."""
    first = ConvertOptions(options.precision, options.layout, options.max_shard_bytes, purpose="inference")
    older = options == first and options.precision == "mxfp8"
    return [options, replace(options, purpose="training")] if older else [options]


def _expected(
    weight: FusedWeight, options: ConvertOptions, orientations: tuple[str, ...], most: int
) -> list[WrittenTensor]:
    """What the options make of a weight; nothing where that is more than `most` ranks, or cannot be."""
    if options.tp_degree > most:
        return []
    ranks = [None] if options.tp_degree == 1 else range(options.tp_degree)
    try:
        forms = [form for rank in ranks for form in stored_forms(weight, options, rank)]
    except NeuronMoEError:
        return []
    return [_facts(form.written(weight.name)) for form in forms if form.orientation in orientations]


def _facts(tensor: WrittenTensor) -> WrittenTensor:
    """A tensor without its file and checksum, which the options do not decide."""
    return replace(tensor, file="", checksum="")


def _gaps(pieces: Sequence[Piece]) -> list[str]:
    """Whether pieces fill a fused weight: every expert, every row, once."""
    rows: dict[int | None, list[tuple[int, int]]] = {}
    columns = set()
    for piece in pieces:
        rows.setdefault(piece.expert, []).append((piece.rows.start, piece.rows.stop))
        columns.add(piece.shape[-2 if piece.transposed else -1])
    messages = []
    experts = sorted(expert for expert in rows if expert is not None)
    if experts and (experts != list(range(len(experts))) or None in rows):
        messages.append(f"made of experts {experts}")
    if len(columns) > 1:
        messages.append(f"made of matrices with {sorted(columns)} columns")
    ends = set()
    for expert, spans in rows.items():
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                place = "" if expert is None else f" of expert {expert}"
                messages.append(
                    f"rows {min(start, end)} to {max(start, end)}{place} have {'no' if start > end else 'two'} sources"
                )
            end = stop
        ends.add(end)
    if len(ends) > 1:
        messages.append(f"experts with {sorted(ends)} rows")
    return messages
