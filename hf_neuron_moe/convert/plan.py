"""What a conversion will write, decided from ``config.json`` and the safetensors headers before anything is written."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from hf_neuron_moe.convert.assign import Assignment, assign_values, meta_model, natural_key, read_checkpoint
from hf_neuron_moe.convert.io.encoded import codes_kept
from hf_neuron_moe.convert.io.folder import check_checkpoint, check_folder
from hf_neuron_moe.convert.io.source import SourceCheckpoint, SourceTensor
from hf_neuron_moe.convert.layout.orientations import SOURCE, StoredForm, stored_forms
from hf_neuron_moe.convert.layout.relayout import WEIGHT_DTYPES
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight
from hf_neuron_moe.convert.manifest import LeftModule, Piece, WrittenTensor, grouped, grouped_names
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.errors import ConversionError, public
from hf_neuron_moe.patching.discovery import EXPERTS, MLP, Candidate, discover
from hf_neuron_moe.patching.globs import check_globs
from hf_neuron_moe.precision_map import PrecisionMap


@dataclass(frozen=True)
class ConversionPlan:
    """Everything a conversion will do."""

    source: SourceCheckpoint
    options: ConvertOptions  # What to make of it
    weights: dict[str, FusedWeight]
    copied: dict[str, SourceTensor]  # Tensors copied unchanged, by name
    tensors: tuple[WrittenTensor, ...]  # Every tensor to write, with its shard; no checksums yet
    left: dict[str, LeftModule]  # Modules that stay in their source form although they look like MLPs or experts

    def source_files(self, weight: str) -> set[str]:
        """The files that a weight, or a copied tensor, is read from."""
        encodings, pieces = self.source.encodings, self.pieces[weight]
        scales = {encodings[piece.source].scales.file for piece in pieces if piece.source in encodings}
        return scales | {piece.file for piece in pieces}

    def source_bytes(self, weight: str) -> int:
        """Bytes that are read for a weight, or a copied tensor."""
        encodings = self.source.encodings
        return sum((encodings.get(piece.source) or piece).nbytes for piece in self.pieces[weight])

    @property
    def output_bytes(self) -> int:
        """Bytes of tensor data that will be written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def shards(self) -> dict[str, list[WrittenTensor]]:
        """The tensors of each shard, in their order."""
        return grouped(self.tensors, lambda tensor: tensor.file)

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """What every weight is made of, by its name; a copied tensor is one piece."""
        copied = {t.name: (Piece(t.name, t.file, t.dtype, t.shape),) for t in self.copied.values()}
        return {name: weight.pieces for name, weight in self.weights.items()} | copied

    def forms(self, group: tuple[str, int | None]) -> tuple[StoredForm, ...]:
        """How the tensors of one ``WrittenTensor.group`` are filled, in their order."""
        weight, rank = group
        return stored_forms(self.weights[weight], self.options, rank)


@public("convert")
def plan_conversion(directory: Path, options: ConvertOptions) -> ConversionPlan:
    """Plan the conversion of a local checkpoint folder."""
    check_folder(directory, "directory")
    check_checkpoint(directory)
    return plan_of(directory, options)


@public("convert")
def plan_of(directory: Path, options: ConvertOptions) -> ConversionPlan:
    """Plan the conversion of a folder that was found to be a checkpoint's."""
    source = read_checkpoint(directory)
    model = meta_model(directory, source)
    source, assignments = assign_values(model, source)
    candidates = [_convertible(candidate) for candidate in discover(model)]
    refused = {candidate.name: candidate.reason for candidate in candidates if candidate.reason is not None}
    weights = {
        weight.name: weight
        for candidate in candidates
        if candidate.reason is None
        for weight in _with_codes(_weights_of(candidate, assignments, model), source)
    }
    if not weights:
        reasons = _reasons(refused)
        expected = "a model with SwiGLU MLPs or experts that the kernels can compute"
        fix = "`hf-neuron-moe plan` lists every candidate with its reason."
        raise ConversionError.about(str(directory), expected, f"none ({reasons})" if reasons else "none", fix)
    _check_precisions(options, candidates, weights)
    used = {piece.source for weight in weights.values() for piece in weight.pieces}
    copied = {name: tensor for name, tensor in source.tensors.items() if name not in used}
    left = _left(refused, assignments, copied)
    return ConversionPlan(source, options, weights, copied, _lay_out(weights, copied, options), left)


def _check_precisions(options: ConvertOptions, candidates: list[Candidate], weights: dict[str, FusedWeight]) -> None:
    """Refuse globs that match no block or disagree about one, and precisions that no block can have."""
    if isinstance(options.precision, PrecisionMap):
        check_globs("precision", options.precision.globs, [(candidate.name,) for candidate in candidates])
    own = {name: options.of(name).precision for name in weights}
    if options.quantized and set(own.values()) == {"bf16"}:
        fix = "Use --precision bf16, or narrow the globs."
        raise ConversionError.about("precision", "MX for at least one block", f"bf16 for all {len(own)} weights", fix)
    with_fp4 = [weights[name] for name, precision in own.items() if precision == "mxfp4"]
    if with_fp4 and not any(weight.has_experts for weight in with_fp4):
        reasons = _reasons({c.name: c.reason for c in candidates if c.kind == EXPERTS and c.reason is not None})
        expected = "used for a model with experts: no kernel computes dense MLPs with FP4 weights"
        got = f"a model whose experts no kernel computes ({reasons})" if reasons else "a model without any"
        if isinstance(options.precision, PrecisionMap):
            got = f"for blocks without experts, such as {with_fp4[0].name}"
        raise ConversionError.about("precision mxfp4", expected, got, "Use --precision mxfp8 or bf16.")


def _as_convertible_mlp(candidate: Candidate) -> Candidate:
    """Refuse a dense MLP that can be patched but whose weights have no converted layout."""
    roles = candidate.roles
    if roles is None or roles.is_plain:
        return candidate
    parts = {
        "biases": roles.biased,
        "up rows in front of gate rows": not roles.gate_first,
        "layers in classes of their own": roles.roots != roles.linears,
        "layers in front of it": roles.before,
        "dropout after it": roles.after,
    }
    has = [f"the gate {candidate.gate.title}", *(part for part, there in parts.items() if there)]
    return replace(candidate, reason=f"no converted layout is known for an MLP with {' and '.join(has)}")


def _reasons(refused: dict[str, str]) -> str:
    """Names and reasons, modules of one kind together."""
    return "; ".join(f"{spelled}: {reason}" for spelled, _, reason in grouped_names(refused))


def _left(
    refused: dict[str, str], assignments: dict[str, Assignment], copied: dict[str, SourceTensor]
) -> dict[str, LeftModule]:
    """The modules that keep source tensors, with what they keep."""
    left = {}
    for module, reason in refused.items():
        entries = [entry for target, entry in assignments.items() if target.startswith(_prefix(module))]
        tensors = [tensor for entry in entries for group in entry.sources.values() for tensor in group]
        kept = [tensor for tensor in tensors if tensor.name in copied]
        if kept:
            left[module] = LeftModule(reason, len(kept), sum(tensor.nbytes for tensor in kept))
    return left


def _convertible(candidate: Candidate) -> Candidate:
    """The candidate, refused where its converted weights could not be loaded."""
    form = candidate.form
    if candidate.reason is not None:
        return candidate
    if form is None:
        return _as_convertible_mlp(candidate)
    reason = None
    if not form.routed:
        reason = "its class is not decorated with transformers' use_experts_implementation, which convert asks for"
    elif form.post_norm is not None or not form.gate.gated:
        reason = "convert has no layout for experts without a gate or with a norm after them"
    return candidate if reason is None else replace(candidate, reason=reason)


def _prefix(module: str) -> str:
    """What the names of a module's parameters begin with; the model itself has no name."""
    return f"{module}." if module else ""


def _weights_of(candidate: Candidate, assignments: dict[str, Assignment], model: PreTrainedModel) -> list[FusedWeight]:
    """The fused gate_up and down weights of one module that the kernels can compute."""
    prefix = _prefix(candidate.name)
    if candidate.kind == MLP:
        assert candidate.roles is not None
        inputs = [f"{prefix}{name}.weight" for name in candidate.roles.inputs]
        down = [f"{prefix}{candidate.roles.down}.weight"]
        members, suffix, transposed = {"gate_up_proj": inputs, "down_proj": down}, ".weight", False
    else:
        members = {name: [prefix + name] for name in ("gate_up_proj", "down_proj")}
        suffix, transposed = "", bool(candidate.module.is_transposed)
    interleaved = candidate.kind == EXPERTS and not getattr(candidate.module, "is_concatenated", True)
    weights = []
    for role, names in members.items():
        pieces: list[Piece] = []
        start = 0  # the parameter's first row in the fused weight
        for name in names:
            shape = tuple(model.get_parameter(name).shape)
            pieces += _pieces(name, assignments.get(name), shape, start, transposed)
            start += shape[-1 if transposed else -2]
        if interleaved and role == "gate_up_proj":
            pieces = [replace(piece, interleaved=True) for piece in pieces]
        contraction = shape[-2 if transposed else -1]
        dtypes = sorted({piece.dtype for piece in pieces})
        weight = FusedWeight(prefix + role + suffix, (*shape[:-2], start, contraction), tuple(pieces))
        if len(dtypes) > 1 or dtypes[0] not in WEIGHT_DTYPES:
            expected = f"one of {', '.join(WEIGHT_DTYPES)} for all its tensors"
            fix = "Convert the original, unquantized checkpoint."
            raise ConversionError.about(f"dtype of {weight.name}", expected, ", ".join(dtypes), fix)
        weights.append(weight)
    return weights


def _with_codes(weights: list[FusedWeight], source: SourceCheckpoint) -> list[FusedWeight]:
    """Note whether the words of one module's weights can be the source's codes: of all of them, as they share I."""
    codes = codes_kept([piece.source for weight in weights for piece in weight.pieces], source.encodings)
    return [replace(weight, codes=codes) for weight in weights]


def _pieces(
    name: str, assignment: Assignment | None, shape: tuple[int, ...], start: int, transposed: bool
) -> list[Piece]:
    """Pieces of one in-memory parameter; `start` is its first row in the fused weight."""
    if assignment is None:
        got = "no tensor for it, because another parameter shares its memory"
        fix = "Save the model again with transformers, which stores a shared module once under its first name."
        raise ConversionError.about(f"parameter {name}", "stored in the checkpoint under a name of its own", got, fix)
    if assignment.converter is None:
        (tensor,) = assignment.sources[""]
        return [_piece(tensor, shape, None, start, transposed)]
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in assignment.converter.operations]
    if kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]) or len(shape) != 3 or transposed:
        expected = "the parameter itself, or one matrix per expert and projection"
        got = " then ".join(kind.__name__ for kind, _ in kinds)
        fix = "Load the model and save it with save_original_format=False; that form can be converted."
        raise ConversionError.about(f"on-disk form of {name}", expected, got, fix)
    E, F, K = shape
    rows = F // len(assignment.converter.source_patterns)
    pieces = []
    for pattern in assignment.converter.source_patterns:
        tensors = assignment.sources.get(pattern, [])
        experts = [_expert_index(tensor.name, pattern, name) for tensor in tensors]
        if experts != list(range(E)):
            expected = f"one tensor for each of experts 0 to {E - 1}"
            fix = "Check that config.json belongs to these weights and that no shard is missing."
            raise ConversionError.about(f"experts of {name} ({pattern})", expected, experts, fix)
        pieces += [_piece(tensor, (rows, K), expert, start) for expert, tensor in enumerate(tensors)]
        start += rows
    return pieces


def _expert_index(name: str, pattern: str, target: str) -> int:
    """The number that stands for ``*`` in transformers' source pattern."""
    before, _, after = pattern.partition("*")
    found = re.search(rf"([0-9]+){re.escape(after)}$", name)
    if found is None or not before:
        fix = f"It would become part of {target}; check where the checkpoint comes from."
        got = "one without an expert number"
        raise ConversionError.about(f"tensor {name}", f"a name of the form {pattern}", got, fix)
    return int(found.group(1))


def _piece(
    tensor: SourceTensor, shape: tuple[int, ...], expert: int | None, start: int, transposed: bool = False
) -> Piece:
    if tensor.shape != shape:
        expected, fix = (
            f"of shape {list(shape)}, as config.json says",
            "Check that config.json belongs to these weights.",
        )
        raise ConversionError.about(f"{tensor.file}: {tensor.name}", expected, list(tensor.shape), fix)
    return Piece(tensor.name, tensor.file, tensor.dtype, tensor.shape, expert, start, transposed)


def _lay_out(
    weights: dict[str, FusedWeight], copied: dict[str, SourceTensor], options: ConvertOptions
) -> tuple[WrittenTensor, ...]:
    """Name the tensors to write and deal them out to shards, in natural order of the weights' names.

    With tensor parallelism each rank has shards of its own, behind those of the tensors that are not split.
    """
    groups: dict[int | None, dict[str, list[WrittenTensor]]] = {None: {}}
    for rank in [None] if options.tp_degree == 1 else range(options.tp_degree):
        groups[rank] = {
            name: [form.written(name) for form in stored_forms(weight, options, rank)]
            for name, weight in weights.items()
        }
    for name, tensor in copied.items():
        groups[None].setdefault(name, []).append(WrittenTensor(name, "", tensor.dtype, tensor.shape, SOURCE, name))
    files = []
    for rank, tensors in groups.items():
        stem = "neuron" if rank is None else f"neuron-tp-{rank:02d}-of-{options.tp_degree:02d}"
        files += _shards(tensors, options.max_shard_bytes, stem)
    names = Counter(tensor.name for tensor in files)
    for name in sorted(name for name, count in names.items() if count > 1):
        got = "a source tensor and a converted weight of this name"
        raise ConversionError.about(f"tensor {name}", "written once", got, "Rename or remove the source tensor.")
    return tuple(files)


def _shards(groups: dict[str, list[WrittenTensor]], max_bytes: int, stem: str) -> list[WrittenTensor]:
    """Fill shards with whole groups; a group larger than `max_bytes` has a shard to itself."""
    shards: list[list[WrittenTensor]] = [[]]
    size = 0
    for name in sorted(groups, key=natural_key):
        group_bytes = sum(tensor.nbytes for tensor in groups[name])
        if shards[-1] and size + group_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1] += groups[name]
        size += group_bytes
    return [
        replace(tensor, file=f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors")
        for index, shard in enumerate(shards, start=1)
        for tensor in shard
    ]
