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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_neuron_moe.convert.config_values import MAX_VALUE, excess, reason_of, room_in, room_of, wrong_value
from hf_neuron_moe.convert.io.bounded import MAX_CONFIG_BYTES, read_json
from hf_neuron_moe.convert.io.folder import CONFIG_FILE, check_checkpoint, check_model
from hf_neuron_moe.convert.io.source import SourceCheckpoint, SourceTensor, damaged, inside
from hf_neuron_moe.errors import ConversionError, nearest

_BUILDING = threading.Lock()
"""transformers sets the default dtype of the whole process while it builds a model, and restores what it found."""

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
"""What transformers and torch raise for a configuration with values they cannot make a model of: where there is no
check, it is whatever the first line of model code that meets the value raises."""


_NUMBER = re.compile(r"[0-9]+")


@dataclass
class Assignment:
    """The on-disk tensors that make up one in-memory tensor."""

    target: str  # Name in the model's ``state_dict``
    converter: WeightConverter | None
    """transformers' converter, or None where one on-disk tensor is the parameter itself."""
    sources: dict[str, list[SourceTensor]] = field(default_factory=dict)
    """On-disk tensors by the converter's source pattern (``""`` without a converter), in natural order."""


def build_meta_model(
    directory: Path, source: SourceCheckpoint | None = None, attention: str | None = "eager"
) -> PreTrainedModel:
    """Build the checkpoint's model without memory for its weights.

    Whatever ``config.json`` names, it is built with `attention` (None is the one that transformers would train with)
    and with transformers' own choice for experts: a name such as ``org/name`` would be fetched and run. More layers or
    experts than the weights of `source` have are refused before they are built; without it, the names in the folder's
    index or single file are asked.
    """
    check_checkpoint(directory)
    return meta_model(directory, source, attention)


def meta_model(
    directory: Path, source: SourceCheckpoint | None = None, attention: str | None = "eager"
) -> PreTrainedModel:
    """Do what :func:`build_meta_model` does for a folder that was found to be a checkpoint's."""
    config, content = _read_config(directory, source)
    path = directory / CONFIG_FILE
    if "quantization_config" in content:
        expected = "absent (weights in bf16, fp16 or fp32)"
        fix = "Take the original checkpoint: quantising twice loses accuracy."
        raise ConversionError.about(f"{path}: quantization_config", expected, "an already quantised checkpoint", fix)
    return _on_meta(path, config, content, attention)


def build_converted_model(directory: Path) -> PreTrainedModel:
    """Build a conversion's model as its source's was, without memory for its weights."""
    check_model(directory)
    config, content = _read_config(directory)
    return _on_meta(directory / CONFIG_FILE, config, content)


def _read_config(directory: Path, source: SourceCheckpoint | None = None) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration as transformers reads it, and the file's content."""
    path = directory / CONFIG_FILE
    try:
        content = read_json(inside(directory, CONFIG_FILE), MAX_CONFIG_BYTES)
    except ValueError as error:
        raise damaged(str(path), "JSON in UTF-8", f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise damaged(str(path), "a JSON object", type(content).__name__)
    room = room_of(source) if source is not None else room_in(directory)
    if wrong := wrong_value(content) or excess(content, room):
        raise ConversionError.about(f"{path}: {wrong.field}", wrong.expected, wrong.got, wrong.remedy)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except _REFUSALS as error:
        raise _bad_config(path, reason_of(error)) from error
    return config, content


def _on_meta(
    path: Path, config: PreTrainedConfig, content: dict[str, Any], attention: str | None = "eager"
) -> PreTrainedModel:
    try:
        with _BUILDING, torch.device("meta"):
            model = _model_of(config, content, attention)
    except _REFUSALS as error:
        raise _bad_config(path, reason_of(error)) from error
    for name, param in model.named_parameters():
        if max(param.shape, default=0) > MAX_VALUE:
            raise _bad_config(path, f"{name} of shape {list(param.shape)}")
    return model


def _model_of(config: PreTrainedConfig, content: dict[str, Any], attention: str | None) -> PreTrainedModel:
    """Build the class that the checkpoint names, or the one for causal language modelling."""
    plain = {"attn_implementation": attention, "experts_implementation": None}
    name = (content.get("architectures") or [""])[0]
    architecture = getattr(transformers, str(name), None)
    if isinstance(architecture, type) and issubclass(architecture, PreTrainedModel):
        return architecture._from_config(config, **plain)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **plain)


def assign_sources(model: PreTrainedModel, source: SourceCheckpoint) -> tuple[dict[str, Assignment], list[str]]:
    """Assign every on-disk tensor to a parameter or buffer of the model.

    Returns:
        Assignments by in-memory name, and the on-disk names that transformers knows and ignores.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    assignments: dict[str, Assignment] = {}
    ignored: list[str] = []
    filled: set[str] = set()
    for name in sorted(source.tensors, key=natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        converter = by_pattern[pattern] if pattern is not None else None
        targets = _all_targets(target, converter)
        if not targets & state.keys():
            if _matches(name, model._keys_to_ignore_on_load_unexpected):
                ignored.append(name)
                continue
            expected = "part of the model that config.json describes"
            fix = f"Check that config.json belongs to these weights.{nearest(target, list(state))}"
            raise ConversionError.about(f"tensor {name}", expected, f"no parameter {target!r} there", fix)
        assignment = assignments.setdefault(target, Assignment(target, converter))
        assignment.sources.setdefault(pattern or "", []).append(source.tensors[name])
        filled |= targets
        if assignment.converter is not converter or (converter is None and len(assignment.sources[""]) > 1):
            first = next(iter(assignment.sources.values()))[0].name
            fix = "Remove the tensor that does not belong to the checkpoint."
            raise ConversionError.about(f"parameter {target}", "stored once", f"both {first} and {name}", fix)
    tied = model.all_tied_weights_keys
    for name in state.keys() - filled:
        is_tied = name in tied or name in tied.values()
        if not is_tied and not _matches(name, model._keys_to_ignore_on_load_missing):
            fix = "Check that config.json belongs to these weights and that no shard is missing."
            raise ConversionError.about(f"parameter {name}", "stored in the checkpoint", "no tensor for it", fix)
    return assignments, ignored


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which ``experts.2`` comes before ``experts.10``."""
    return [(0, int(part)) if _NUMBER.fullmatch(part) else (1, part) for part in name.split(".")]


def _all_targets(target: str, converter: WeightConverter | None) -> set[str]:
    """In-memory names one group produces; a converter may split its input over several."""
    if converter is None:
        return {target}
    first = converter.target_patterns[0]
    return {target.replace(first, pattern) for pattern in converter.target_patterns}


def _matches(name: str, patterns: object) -> bool:
    return isinstance(patterns, (list, tuple, set)) and any(re.search(pattern, name) for pattern in patterns)


def _bad_config(path: Path, reason: str) -> ConversionError:
    expected = "the configuration of a model, with values that transformers can build it from"
    fix = "Correct the values in that file, or take it from where the weights came from."
    return ConversionError.about(str(path), expected, reason, fix)
