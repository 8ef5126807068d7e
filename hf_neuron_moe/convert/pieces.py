"""Where each source tensor lies in the fused weights of a module, by transformers' conversions of the family.

E experts, F rows and K columns of a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, Transpose, WeightConverter

from hf_neuron_moe.convert.assign import Assignment
from hf_neuron_moe.convert.io.source import TORCH_DTYPES, SourceTensor, misfit
from hf_neuron_moe.convert.layout.relayout import WEIGHT_DTYPES
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight
from hf_neuron_moe.convert.manifest import Piece
from hf_neuron_moe.errors import ConversionError
from hf_neuron_moe.patching.discovery import Candidate

SAVE_IN_ONE_DTYPE = "Load the model with a dtype, such as dtype=torch.bfloat16, save it, and convert the result."


def prefix_of(module: str) -> str:
    """What the names of a module's parameters begin with; the model itself has no name."""
    return f"{module}." if module else ""


def weights_of(candidate: Candidate, assignments: dict[str, Assignment], model: PreTrainedModel) -> list[FusedWeight]:
    """The fused gate_up and down weights of one module that can be patched; of one without a gate, up and down."""
    prefix, roles, form = prefix_of(candidate.name), candidate.roles, candidate.form
    stacked = candidate.sizes[0] if form is not None and form.stacked else 0
    if form is not None:  # and how the matrices of its parameters lie
        suffix, inputs, down = "", form.inputs, form.down
        first_lie: dict[str, Any] = {"transposed": form.transposed, "interleaved": form.interleaved, "stacked": stacked}
        down_lie: dict[str, Any] = {"transposed": form.transposed or form.stacked, "stacked": stacked}
    else:
        assert roles is not None, "a module that can be patched has roles or a form"
        suffix, inputs, down = ".weight", tuple(f"{name}.weight" for name in roles.inputs), f"{roles.down}.weight"
        first_lie, down_lie = {"up_first": roles.up_first}, {}
    first = "gate_up_proj" if candidate.gate.gated else "up_proj"
    weights = []
    for role, names, form_of in ((first, inputs, first_lie), ("down_proj", (down,), down_lie)):
        pieces: list[Piece] = []
        both = in_one_source([prefix + name for name in names], assignments) if form is None else None
        if both is not None:
            rows, columns = model.get_parameter(prefix + names[0]).shape
            pieces, names = [_piece(both[0], (2 * rows, columns), up_first=both[1])], ()
        for name in names:
            start = pieces[-1].rows.stop if pieces else 0  # the parameter's first row in the fused weight
            shape = tuple(model.get_parameter(prefix + name).shape)
            pieces += _pieces(prefix + name, assignments.get(prefix + name), shape, start, form_of)
        experts = () if form is None else (stacked or shape[0],)
        rows, columns = pieces[-1].rows.stop, pieces[-1].matrix[0 if pieces[-1].transposed else 1]
        weight = FusedWeight(prefix + role + suffix, (*experts, rows, columns), tuple(pieces))
        dtypes = sorted({piece.dtype for piece in pieces})
        if len(dtypes) > 1 or dtypes[0] not in WEIGHT_DTYPES:
            expected = f"one of {', '.join(WEIGHT_DTYPES)} for all its tensors"
            fix = "Convert the original, unquantized checkpoint."
            if all(TORCH_DTYPES[dtype].is_floating_point and TORCH_DTYPES[dtype].itemsize > 1 for dtype in dtypes):
                fix = SAVE_IN_ONE_DTYPE
            raise ConversionError.about(f"dtype of {weight.name}", expected, ", ".join(dtypes), fix)
        weights.append(weight)
    return weights


def in_one_source(names: Sequence[str], assignments: Mapping[str, Assignment]) -> tuple[SourceTensor, bool] | None:
    """Return the tensor that holds these two parameters below one another, and whether the second one's rows are first.

    None where they are tensors of their own.
    """
    for assignment in map(assignments.get, names):
        if assignment is None or assignment.converter is None or sorted(assignment.targets) != sorted(names):
            continue
        kinds = [(type(operation), getattr(operation, "dim", None)) for operation in assignment.converter.operations]
        sources = [tensor for tensors in assignment.sources.values() for tensor in tensors]
        if kinds == [(Chunk, 0)] and len(names) == 2 and len(sources) == 1:
            return sources[0], assignment.targets[0] != names[0]
    return None


def _pieces(
    name: str, assignment: Assignment | None, shape: tuple[int, ...], start: int, form_of: Mapping[str, Any]
) -> list[Piece]:
    """Pieces of one in-memory parameter; `start` is its first row in the fused weight."""
    if assignment is None:
        fix = "Save the model again with transformers, all parameters included."
        raise ConversionError.about(f"parameter {name}", "stored in the checkpoint", "no tensor for it", fix)
    if assignment.converter is None:
        (tensor,) = assignment.sources[""]
        return [_piece(tensor, shape, start=start, **form_of)]
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in assignment.converter.operations]
    if kinds == [(Transpose, None)] and len(shape) == 3 and not any(form_of.values()):
        return [_transposed_piece(assignment.converter, assignment.sources, shape, start)]
    if kinds == [(Interleave, 1)] and len(shape) == 3 and not any(form_of.values()):
        return [_piece(next(iter(assignment.sources.values()))[0], shape, start=start, interleaved=True)]
    merged = kinds[:1] == [(MergeModulelist, 0)]
    known = kinds[merged:] in ([], [(Concatenate, 1)]) and len(shape) == 3 and kinds
    if not known or any(form_of.values()):
        expected = "the parameter itself, or one matrix per expert and projection"
        got = " then ".join(kind.__name__ for kind, _ in kinds)
        fix = "Load the model and save it with save_original_format=False; that form can be converted."
        raise ConversionError.about(f"on-disk form of {name}", expected, got, fix)
    E, F, K = shape
    rows = F // len(assignment.converter.source_patterns)
    pieces = []
    for pattern in assignment.converter.source_patterns:
        tensors = assignment.sources.get(pattern, [])
        experts = [_expert_index(tensor.name, pattern, name) for tensor in tensors] if merged else [None] * len(tensors)
        if experts != (list(range(E)) if merged else [None]):
            expected = f"one tensor for each of experts 0 to {E - 1}" if merged else "one tensor"
            fix = "Check that config.json belongs to these weights and that no shard is missing."
            raise ConversionError.about(f"experts of {name} ({pattern})", expected, experts, fix)
        matrix = (rows, K) if merged else (E, rows, K)
        pieces += [_piece(tensor, matrix, expert=expert, start=start) for expert, tensor in zip(experts, tensors)]
        start += rows
    return pieces


def _transposed_piece(
    converter: WeightConverter, sources: Mapping[str, list[SourceTensor]], shape: tuple[int, ...], start: int
) -> Piece:
    """The piece of a parameter ``[E, F, K]`` that files hold as ``[E, K, F]``, or as it is where that is allowed."""
    tensor = next(iter(sources.values()))[0]
    if tensor.shape == shape and getattr(converter.operations[0], "check_dims", False):
        return _piece(tensor, shape, start=start)
    E, F, K = shape
    return _piece(tensor, (E, K, F), start=start, transposed=True)


def _expert_index(name: str, pattern: str, target: str) -> int:
    """The number that stands for ``*`` in transformers' source pattern."""
    before, _, after = pattern.partition("*")
    found = re.search(rf"([0-9]+){re.escape(after)}$", name)
    if found is None or not before:
        fix = f"It would become part of {target}; check where the checkpoint comes from."
        got = "one without an expert number"
        raise ConversionError.about(f"tensor {name}", f"a name of the form {pattern}", got, fix)
    return int(found.group(1))


def _piece(tensor: SourceTensor, shape: tuple[int, ...], **place: Any) -> Piece:
    if tensor.shape != shape:
        raise misfit(tensor, f"of shape {list(shape)}, as config.json says", list(tensor.shape))
    return Piece(tensor.name, tensor.file, tensor.dtype, tensor.shape, **place)
