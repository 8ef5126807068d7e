"""What a conversion will write, decided from ``config.json`` and the safetensors headers before anything is written."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel

from hf_neuron_moe.convert.assign import Assignment, assign_values, meta_model, natural_key, read_checkpoint
from hf_neuron_moe.convert.io.folder import check_checkpoint, check_folder
from hf_neuron_moe.convert.io.source import TORCH_DTYPES, SourceCheckpoint, SourceTensor, misfit
from hf_neuron_moe.convert.layout.orientations import SOURCE, StoredForm, ranks_of, stored_forms
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, codes_kept
from hf_neuron_moe.convert.manifest import LeftModule, Network, Piece, WrittenTensor, grouped, grouped_names
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.pieces import SAVE_IN_ONE_DTYPE, in_one_source, prefix_of, weights_of
from hf_neuron_moe.errors import ConversionError, pattern_of, public
from hf_neuron_moe.patching.discovery import EXPERTS, MLP, Candidate, DenseRoles, discover
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
    networks: dict[str, Network]  # What the converted modules compute, where that is not a SwiGLU without biases
    allowed: frozenset[str] = frozenset()  # Names in `left` that strict allows: without a gate, or bf16 by a glob

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
    candidates = [_convertible(candidate, model) for candidate in discover(model)]
    refused = {candidate.name: candidate.reason for candidate in candidates if candidate.reason is not None}
    taken = [candidate for candidate in candidates if candidate.reason is None]
    _check_mx(options, taken)
    found = [_with_codes(weights_of(each, assignments, model), source, options) for each in taken]
    weights = {weight.name: weight for group in found for weight in group}
    if not weights:
        reasons = _reasons(refused)
        expected = "a model with MLPs or experts that patch_model takes"
        fix = "Use its weights as they are: there is nothing to convert."
        raise ConversionError.about(str(directory), expected, f"none ({reasons})" if reasons else "none", fix)
    _check_precisions(options, candidates, weights)
    used = {piece.source for weight in weights.values() for piece in weight.pieces}
    copied = {name: tensor for name, tensor in source.tensors.items() if name not in used}
    _check_copied(copied, assignments, model)
    left = _left(refused, assignments, copied)
    kept = {c.name for c in candidates if options.quantized and _precision(c, options) == "bf16"}  # by the caller
    allowed = frozenset(c.name for c in candidates if not c.gated or c.name in kept)
    networks = {each.name: network for each in taken if (network := _network(each, assignments)) is not None}
    tensors = _lay_out(weights, copied, options)
    return ConversionPlan(source, options, weights, copied, tensors, left, networks, allowed)


def _precision(candidate: Candidate, options: ConvertOptions) -> str:
    return str(options.of(f"{prefix_of(candidate.name)}down_proj").precision)


def _check_precisions(options: ConvertOptions, candidates: list[Candidate], weights: dict[str, FusedWeight]) -> None:
    """Refuse globs that match no block or disagree about one, and precisions that no block can have."""
    if isinstance(options.precision, PrecisionMap):
        check_globs("precision", options.precision.globs, [(candidate.name,) for candidate in candidates])
        products = [(name,) for name, weight in weights.items() if weight.has_experts]
        check_globs("precision", options.precision.product_globs, products, "a product of experts")
    own = {name: options.of(name).precision for name in weights}
    for names in grouped(weights, lambda name: name.removesuffix(".weight").rpartition(".")[0]).values():
        kinds = [own[name] for name in names]
        if len({*kinds}) > 1 and not (weights[names[0]].has_experts and "bf16" not in kinds):
            expected = "one for both products of a block; only those of experts may be mxfp8 and mxfp4"
            got = " and ".join(f"{kind} for {name}" for name, kind in zip(names, kinds, strict=True))
            fix = "Name the block, or narrow the glob."
            if weights[names[0]].has_experts:
                fix = "Name the block, or give that product mxfp8: kernels read both weights of a block as codes."
            raise ConversionError.about("precision", expected, got, fix)
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


def _check_mx(options: ConvertOptions, candidates: list[Candidate]) -> None:
    """Refuse MX for blocks whose weights could not be loaded as codes, before anything is written."""
    kinds = {"mxfp8": (MLP, EXPERTS), "mxfp4": (EXPERTS,), "bf16": ()}
    asked = {each.name: no_codes(each) for each in candidates if each.kind in kinds[_precision(each, options)]}
    reasons = {name: reason for name, reason in asked.items() if reason is not None}
    if reasons:
        globs = sorted(set(map(pattern_of, reasons)))
        some_left = any(not any(fnmatch.filter([name], glob) for glob in globs) for name in asked)
        keep = " ".join(f"--keep-bf16 {glob!r}" for glob in globs)
        got, fix = _reasons(reasons), f"Use --precision bf16{f', or {keep}' if some_left else ''}."
        raise ConversionError.about("precision", "bf16 for blocks that are not computed with MX codes", got, fix)


def _reasons(refused: dict[str, str]) -> str:
    """Names and reasons, modules of one kind together."""
    return "; ".join(f"{spelled}: {reason}" for spelled, _, reason in grouped_names(refused))


def _left(
    refused: dict[str, str], assignments: dict[str, Assignment], copied: dict[str, SourceTensor]
) -> dict[str, LeftModule]:
    """The modules that keep source tensors, with what they keep."""
    left = {}
    for module, reason in refused.items():
        entries = [entry for target, entry in assignments.items() if target.startswith(prefix_of(module))]
        tensors = [tensor for entry in entries for group in entry.sources.values() for tensor in group]
        kept = [tensor for tensor in tensors if tensor.name in copied]
        if kept:
            left[module] = LeftModule(reason, len(kept), sum(tensor.nbytes for tensor in kept))
    return left


def _convertible(candidate: Candidate, model: PreTrainedModel) -> Candidate:
    """The candidate, refused where no piece describes its rows' order, or where others use its weights too."""
    roles, form = candidate.roles, candidate.form
    alternate = roles.interleaved if roles is not None else form is not None and form.interleaved > form.transposed
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    names = {prefix_of(candidate.name) + name for name, _ in candidate.module.named_parameters()}
    reason = "no converted layout is known for alternating rows of gate and up" if alternate else None
    if candidate.aliases or names & tied:
        reason = "several modules of the model share its weights, and converted weights belong to one"
    return replace(candidate, reason=candidate.reason or reason)


def no_codes(candidate: Candidate) -> str | None:
    """Why a module that can be patched cannot be loaded with MX codes; None where it can."""
    roles = candidate.roles
    if roles is None:
        return None
    has = {
        "layers in classes of their own": roles.roots != roles.linears,
        "layers in front of it": roles.before,
        "dropout after it": roles.after,
    }
    found = [what for what, there in has.items() if there]
    return f"an MLP with {' and '.join(found)}" if found else None


def _network(candidate: Candidate, assignments: dict[str, Assignment]) -> Network | None:
    """What a module computes with its weights; None for a SwiGLU without biases."""
    gate, parts = candidate.gate, candidate.roles or candidate.form
    changed = {name: value for name, value in gate._asdict().items() if value != gate._field_defaults[name]}
    names: list[str] = []
    if isinstance(parts, DenseRoles):
        names = [f"{name}.bias" if name in parts.biased else "" for name in parts.linears]
    elif parts is not None:
        names = [*parts.biases]
    full = [prefix_of(candidate.name) + name if name else "" for name in names]
    both, found = in_one_source(full[:-1], assignments), [assignments.get(name) for name in full]
    biases = tuple("" if each is None or each.converter else each.sources[""][0].name for each in found)
    biases = biases if both is None else (both[0].name, biases[-1])
    return Network(changed, biases if any(biases) else ()) if changed or any(biases) else None


def _with_codes(weights: list[FusedWeight], source: SourceCheckpoint, options: ConvertOptions) -> list[FusedWeight]:
    """Note whether the words of one module's weights can be the source's codes: of all of them, as they share I."""
    own = {options.of(weight.name).precision for weight in weights}
    pieces = [piece for weight in weights for piece in weight.pieces]
    coded = [piece for piece in pieces if codes_kept([piece], source.encodings)]
    codes = codes_kept(pieces, source.encodings) if len(own) == 1 else ""
    if coded and not codes and "mxfp4" in own and not options.allow_inexact:
        expected, fix = "kept, as it is in words", "Use --allow-inexact to quantize the decoded values again."
        other = next((f"no such codes in {p.source}" for p in pieces if p not in coded), "mxfp8 for the other product")
        got = f"{other}, which shares its intermediate axis"
        raise ConversionError.about(f"codes of {coded[0].source}", expected, got, fix)
    return [replace(weight, codes=codes) for weight in weights]


def _check_copied(
    copied: Mapping[str, SourceTensor], assignments: Mapping[str, Assignment], model: PreTrainedModel
) -> None:
    """Compare copied tensors that are parameters themselves, such as biases and routers, with the model's."""
    state = model.state_dict()
    for target, assignment in assignments.items():
        whole = assignment.converter is None or in_one_source(assignment.targets, assignments) is not None
        if not whole or target not in state:
            continue
        (tensor,), param = next(iter(assignment.sources.values())), state[target]
        shape = (len(assignment.targets) * param.shape[0], *param.shape[1:]) if param.dim() else ()
        if tensor.name in copied and tensor.shape != shape:
            raise misfit(tensor, f"of shape {list(shape)}, as config.json says", list(tensor.shape))
        dtype = TORCH_DTYPES[tensor.dtype]
        if tensor.name in copied and param.is_floating_point() and not (dtype.is_floating_point and dtype.itemsize > 1):
            subject, fix = f"{tensor.file}: {tensor.name}", "Check that config.json belongs to these weights."
            fix = SAVE_IN_ONE_DTYPE if dtype.is_floating_point else fix
            expected = "of a floating-point dtype of 16 bits or more, as it has no scales"
            raise ConversionError.about(subject, expected, tensor.dtype, fix)


def _lay_out(
    weights: dict[str, FusedWeight], copied: dict[str, SourceTensor], options: ConvertOptions
) -> tuple[WrittenTensor, ...]:
    """Name the tensors to write and deal them out to shards, in natural order of the weights' names.

    With tensor or expert parallelism each rank has shards of its own, behind those of the tensors that are not split.
    """
    if options.ep_degree > 1 and not any(weight.has_experts for weight in weights.values()):
        fix = "Leave --ep-degree out."
        raise ConversionError.about("ep_degree", "1 for a model without experts", options.ep_degree, fix)
    groups: dict[str, dict[str, list[WrittenTensor]]] = {"neuron": {}}
    for name, weight in weights.items():
        for rank in ranks_of(weight, options):
            written = [form.written(name) for form in stored_forms(weight, options, rank)]
            stem = "neuron"
            if rank is not None and written[0].ep_rank is None:
                stem = f"neuron-tp-{rank:02d}-of-{options.tp_degree:02d}"
            elif rank is not None:
                stem = f"neuron-ep-{rank:02d}-of-{options.ep_degree:02d}"
            groups.setdefault(stem, {})[name] = written
    for name, tensor in copied.items():
        groups["neuron"].setdefault(name, []).append(WrittenTensor(name, "", tensor.dtype, tensor.shape, SOURCE, name))
    files = []
    for stem, tensors in groups.items():
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
