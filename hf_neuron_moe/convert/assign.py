"""Which parameter of the model each on-disk tensor belongs to, as transformers itself would load it.

transformers keeps, per family, a list of renamings and converters from on-disk to in-memory names; using it means that
a family needs no code here. Only the model's shapes are needed, so it is built on the meta device from ``config.json``.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_neuron_moe.convert.config_values import MAX_VALUE, reason_of, room_in, wrong_values
from hf_neuron_moe.convert.io.bounded import MAX_CONFIG_BYTES, read_json
from hf_neuron_moe.convert.io.folder import CONFIG_FILE, check_checkpoint, check_model
from hf_neuron_moe.convert.io.source import SourceCheckpoint, SourceTensor, damaged, inside, read_source
from hf_neuron_moe.convert.source_formats import QUANTIZATION_CONFIG, check_method, decoded_source, with_transposed
from hf_neuron_moe.errors import ConversionError, nearest

# transformers sets the default dtype of the whole process while it builds a model, and restores what it found.
_BUILDING = threading.Lock()

_REFUSALS = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers and torch raise for values they cannot make a model of: without a check, the first line of model
code that meets the value raises whatever it does."""

_NUMBER = re.compile(r"[0-9]+")


@dataclass
class Assignment:
    """The on-disk tensors that make up one in-memory tensor."""

    target: str  # Name in the model's ``state_dict``
    converter: WeightConverter | None  # None where one on-disk tensor is the parameter itself
    targets: tuple[str, ...] = ()  # Names of all tensors that the converter makes of them, in its order
    sources: dict[str, list[SourceTensor]] = field(default_factory=dict)
    """On-disk tensors by the converter's source pattern (``""`` without a converter), in natural order."""


def build_meta_model(
    directory: Path, source: SourceCheckpoint | None = None, attention: str | None = "eager"
) -> PreTrainedModel:
    """Return the checkpoint's model without memory for its weights.

    Whatever ``config.json`` names, it is built with `attention` (None is the one that transformers would train with)
    and with transformers' own choice for experts. A name such as ``org/name`` would be fetched and run. More layers or
    experts than the weights of `source` have are refused before they are built; without it, the names in the folder's
    index or single file are asked.
    """
    check_checkpoint(directory)
    return meta_model(directory, source, attention)


def meta_model(
    directory: Path, source: SourceCheckpoint | None = None, attention: str | None = "eager"
) -> PreTrainedModel:
    """Do what :func:`build_meta_model` does for a folder that was found to be a checkpoint's."""
    content = _read_config(directory, source)
    check_method(directory / CONFIG_FILE, content)
    return _on_meta(directory, content, attention)


def read_checkpoint(directory: Path) -> SourceCheckpoint:
    """Describe the checkpoint in `directory` without reading a weight: of a quantized one, its tensors of values."""
    source = read_source(directory)
    return decoded_source(source, directory / CONFIG_FILE, _read_config(directory, source))


def build_converted_model(directory: Path) -> PreTrainedModel:
    """Return a conversion's model as its source's was built, without memory for its weights."""
    check_model(directory)
    return _on_meta(directory, _read_config(directory), "eager")


def _read_config(directory: Path, source: SourceCheckpoint | None = None) -> dict[str, Any]:
    """The configuration, whose values can be those of a model with the weights that are there."""
    path = directory / CONFIG_FILE
    try:
        content = read_json(inside(directory, CONFIG_FILE), MAX_CONFIG_BYTES)
    except ValueError as error:
        raise damaged(str(path), "JSON in UTF-8", f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise damaged(str(path), "a JSON object", type(content).__name__)
    for wrong in wrong_values(content, room_in(directory, source)):
        raise ConversionError.about(f"{path}: {wrong.field}", wrong.expected, wrong.got, wrong.remedy)
    return content


def _on_meta(directory: Path, content: dict[str, Any], attention: str | None) -> PreTrainedModel:
    """The class that the checkpoint names, or the one for causal language modelling."""
    options = {"attn_implementation": attention, "experts_implementation": None}
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config.__dict__.pop(QUANTIZATION_CONFIG, None)  # the model is the unquantized one
        name = (content.get("architectures") or [""])[0]
        named = getattr(transformers, str(name), None)
        with _BUILDING, torch.device("meta"):
            if isinstance(named, type) and issubclass(named, PreTrainedModel):
                model = named._from_config(config, **options)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except _REFUSALS as error:
        raise _bad_config(directory, reason_of(error)) from error
    for name, param in model.named_parameters():
        if max(param.shape, default=0) > MAX_VALUE:
            raise _bad_config(directory, f"{name} of shape {list(param.shape)}")
    return model


def _bad_config(directory: Path, reason: str) -> ConversionError:
    expected = "the configuration of a model, with values that transformers can build it from"
    fix = "Correct the values in that file, or take it from where the weights came from."
    return ConversionError.about(str(directory / CONFIG_FILE), expected, reason, fix)


def assign_sources(model: PreTrainedModel, source: SourceCheckpoint) -> dict[str, Assignment]:
    """Return what makes up each in-memory tensor, by its name: all on-disk tensors but those transformers ignores."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    assignments: dict[str, Assignment] = {}
    filled: set[str] = set()
    ignored = _ignored(model)
    for name in sorted(source.tensors, key=natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # then it is no name to change
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        converter = by_pattern[pattern] if pattern is not None else None
        targets: tuple[str, ...] = (target,)
        if converter is not None:  # which may split its input over several
            first = converter.target_patterns[0]
            targets = tuple(target.replace(first, other) for other in converter.target_patterns)
        if state.keys().isdisjoint(targets):
            if _matches(name, ignored):
                continue
            expected = "part of the model that config.json describes"
            fix = f"Check that config.json belongs to these weights.{nearest(target, list(state))}"
            raise ConversionError.about(f"tensor {name}", expected, f"no parameter {target!r} there", fix)
        assignment = assignments.setdefault(target, Assignment(target, converter, targets))
        assignment.sources.setdefault(pattern or "", []).append(source.tensors[name])
        filled.update(targets)
        if assignment.converter is not converter or (converter is None and len(assignment.sources[""]) > 1):
            got = f"both {next(iter(assignment.sources.values()))[0].name} and {name}"
            fix = "Remove the tensor that does not belong to the checkpoint."
            raise ConversionError.about(f"parameter {target}", "stored once", got, fix)
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    for name in state.keys() - filled - tied:
        if not _matches(name, model._keys_to_ignore_on_load_missing):
            fix = "Check that config.json belongs to these weights and that no shard is missing."
            raise ConversionError.about(f"parameter {name}", "stored in the checkpoint", "no tensor for it", fix)
    return assignments


def _ignored(model: PreTrainedModel) -> set[str]:
    """Return patterns of the tensors that transformers leaves out of a checkpoint that holds them.

    Of every family these are buffers that were stored once and are computed today.
    """
    buffers = [name for name, _ in model.named_buffers()]
    computed = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    found = {pattern for end, pattern in computed.items() if any(name.endswith(end) for name in buffers)}
    return found | set(model._keys_to_ignore_on_load_unexpected or ())


def assign_values(model: PreTrainedModel, source: SourceCheckpoint) -> tuple[SourceCheckpoint, dict[str, Assignment]]:
    """Do what :func:`assign_sources` does, and return the checkpoint too, with values as the parameters hold them."""
    assignments = assign_sources(model, source)
    turned = [
        tensor.name
        for target, assignment in assignments.items()
        if getattr(model.get_submodule(target.rpartition(".")[0]), "is_transposed", False)
        for tensors in assignment.sources.values()
        for tensor in tensors
        if tensor.name in source.encodings
    ]
    if turned:
        source = with_transposed(source, turned)
        assignments = assign_sources(model, source)
    return source, assignments


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which ``experts.2`` comes before ``experts.10``."""
    return [(0, int(part)) if _NUMBER.fullmatch(part) else (1, part) for part in name.split(".")]


def _matches(name: str, patterns: object) -> bool:
    return isinstance(patterns, (list, tuple, set)) and any(re.search(pattern, name) for pattern in patterns)
