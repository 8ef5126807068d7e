"""Checks of what ``config.json`` states, before transformers and torch compute with it; errors name the field.

Numbers of layers and experts are judged by the weights. A model on the meta device needs no memory for them, but time
and objects for every layer, and lists for every expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_neuron_moe.convert.io.source import (
    INDEX_FILE,
    SINGLE_FILE,
    SourceCheckpoint,
    SourceTensor,
    read_header,
    read_index,
)
from hf_neuron_moe.errors import SourceDamageError, nearest, printable

MAX_VALUE = 2**31 - 1  # Largest size, which keeps the bytes of activations and weights within 63 bits
MOST_LABELS = 32_768  # transformers makes two entries of each. Published classifiers have up to 21,843
MOST_ENTRIES = 10_000  # Of a list; transformers walks some of them, such as ``bad_words_ids``, many times
SHOWN, REASON = 60, 300  # Characters of a wrong value, and of transformers' own reason, in a message

_BOUNDS = {
    re.compile(r"num_labels"): (0, MOST_LABELS),
    re.compile(r"hidden_size|num_attention_heads|num_key_value_heads|vocab_size"): (1, MAX_VALUE),
    re.compile(
        r"\w*intermediate_size|max_position_embeddings|num_hidden_layers|(?:num_local|num|n_routed|n_shared)_experts"
        r"|head_dim"
    ): (0, MAX_VALUE),
}
"""Least and largest value of the fields that every family has; a model without shared experts, say, may give their
size as 0, and GLM-5-Next its head_dim, which is that of rotary embeddings."""

_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks?|depths?)$", re.IGNORECASE)
_EXPERTS = re.compile(r"(?:^|_)(?:experts?(?:_per_tok(?:en)?)?|top_?k)$", re.IGNORECASE)
"""Names under which configurations state such a number, or that of a token's experts, anywhere in them."""

_LAYER_NUMBER = re.compile(r"(?<!experts)\.([0-9]{1,9})(?=\.)")  # Place of a layer in a tensor's name, not an expert's

MOST_LAYERS, MOST_EXPERTS = 1024, 65536  # Where there are no weights. Published models have up to 130 layers
ALWAYS_LAYERS, ALWAYS_EXPERTS = 256, 1024
"""Never too many: configurations also keep numbers that the model does not use, and building these takes no time."""


class Wrong(NamedTuple):
    """A value that no model has."""

    field: str  # Its place in ``config.json``, such as ``vision_config.depth``
    expected: str
    got: str  # The value, cut
    remedy: str = "Correct it, or take config.json from where the weights came from."


class Room(NamedTuple):
    """The most layers and experts that a configuration may ask for."""

    layers: int = MOST_LAYERS
    experts: int = MOST_EXPERTS
    reason: str = ""  # What that follows from


def wrong_values(content: dict[str, Any], room: Room) -> Iterator[Wrong]:
    """Yield the fields of a parsed ``config.json`` that have another type or are out of bounds.

    Checked are the model type, dtypes, ``quantization_config``, the sizes that all families have, the number of labels,
    the length of lists, and numbers of layers and experts, anywhere in it. Fields that are absent or null are
    transformers' to judge.
    """
    family, quantization = content.get("model_type"), content.get("quantization_config")
    if family is not None and not (isinstance(family, str) and family in CONFIG_MAPPING):
        hint = _own_family(content.get("architectures"))
        hint = hint or (nearest(family, list(CONFIG_MAPPING_NAMES)) if isinstance(family, str) else "")
        remedy = f"Custom code from a checkpoint is never run; check the file and the transformers version.{hint}"
        yield Wrong("model_type", f"a model type that transformers {transformers_version} knows", _cut(family), remedy)
    if not isinstance(quantization, dict | None):
        yield Wrong("quantization_config", "a JSON object", _cut(quantization))
    for place, name, value in _values(content):
        if isinstance(value, list) and len(value) > MOST_ENTRIES:
            yield Wrong(place, f"a list of at most {MOST_ENTRIES:,} entries", f"{len(value):,}")
        if not (value is None or isinstance(value, list) or place.startswith("quantization_config.")):
            if name == "max_position_embeddings" and isinstance(value, float) and value.is_integer():
                value = int(value)  # Music Flamingo's is its rope_theta, 1200.0
            least, most = next((bounds for known, bounds in _BOUNDS.items() if known.fullmatch(name)), (None, 0))
            if least is not None and not (type(value) is int and least <= value <= most):
                yield Wrong(place, f"an integer from {least} to {most:,}", _cut(value))
            names_dtype = name in ("dtype", "torch_dtype") and value != "auto"
            if names_dtype and not isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype):
                yield Wrong(place, "a dtype of torch such as bfloat16", _cut(value))
        limit = room.layers if _LAYERS.search(name) else room.experts if _EXPERTS.search(name) else None
        whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        if limit is not None and whole and value > limit:
            yield Wrong(place, f"at most {limit:,}{room.reason}", str(int(value)))


def _own_family(architectures: object) -> str:
    """Say which model type has the class that a checkpoint of another type names, as Kimi-K2 names DeepSeek-V3's."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    families = [family for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == named]
    fix = f" If the model is transformers' own {named}, set model_type to {families[0]!r}." if families else ""
    return fix if len(families) == 1 else ""


def _values(content: object, place: str = "", name: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield place, key and value of everything in parsed JSON that is no object; entries of a list have its key."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _values(value, f"{place}.{key}" if place else key, key)
        return
    yield place, name, content
    if isinstance(content, list):
        for value in content:
            yield from _values(value, place, name)


def _cut(value: object) -> str:
    return printable(repr(value), SHOWN)


def reason_of(error: Exception) -> str:
    """Return what transformers or torch says about a configuration, in one line without frames of C++."""
    text = str(error).strip()
    if not isinstance(error, StrictDataclassError):  # whose second line names the rule
        text = text.partition("\n")[0]
    return printable(f"{type(error).__name__}: {' '.join(text.split())}", REASON)


def room_in(directory: Path, source: SourceCheckpoint | None) -> Room:
    """Return the room that weights have: numbers in names for layers, tensors or an axis for experts.

    Without `source`, as far as the folder's index or single file can be read. What needs no weights works with an index
    alone, with damaged weights, and without any. Then fixed limits hold.
    """
    try:
        if source is not None:
            return _room(source.tensors, source.tensors)
        if (directory / INDEX_FILE).is_file():
            return _room(read_index(directory / INDEX_FILE)[0], None)
        if (directory / SINGLE_FILE).is_file():
            tensors, _ = read_header(directory / SINGLE_FILE)
            return _room(tensors, tensors)
    except (SourceDamageError, OSError):  # commands that read the weights refuse them
        pass
    return Room()


def _room(names: Collection[str], tensors: Mapping[str, SourceTensor] | None) -> Room:
    last = max((int(number) for name in names for number in _LAYER_NUMBER.findall(name)), default=0)
    experts = MOST_EXPERTS
    if tensors is not None:
        experts = max(ALWAYS_EXPERTS, len(tensors), *(max(t.shape, default=0) for t in tensors.values()))
    return Room(max(ALWAYS_LAYERS, min(last + 1, len(names), MOST_LAYERS)), experts, " with these weights")
