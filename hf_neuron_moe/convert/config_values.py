"""Checks of what ``config.json`` states, before transformers and torch compute with it.

Their own errors about such values name a line of model code. These name the field. Numbers of layers and experts are
judged by the weights: a model on the meta device needs no memory for them, but time and objects for every layer, and
lists for every expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_neuron_moe.convert.io.source import (
    INDEX_FILE,
    SINGLE_FILE,
    SourceCheckpoint,
    SourceTensor,
    read_header,
    read_index,
)
from hf_neuron_moe.errors import SourceDamageError, nearest, printable

MAX_VALUE = 2**31 - 1
"""Largest size, which keeps the bytes of activations and weights within 63 bits."""

MOST_LABELS = 32_768
"""Largest ``num_labels``: transformers makes two entries of each. Published classifiers have up to 21,843."""

MOST_ENTRIES = 10_000
"""Longest list; transformers walks some of them, such as ``bad_words_ids``, many times."""

SHOWN = 60
"""Characters of a wrong value in a message."""

REASON = 300
"""Characters of transformers' own reason in a message."""

_POSITIVE = re.compile(r"hidden_size|num_attention_heads|num_key_value_heads|head_dim|vocab_size")
_NATURAL = re.compile(
    r"\w*intermediate_size|max_position_embeddings|num_hidden_layers|(?:num_local|num|n_routed|n_shared)_experts"
)
"""Fields of every family that has them; a model without shared experts, say, may give their size as 0."""

_DTYPES = ("dtype", "torch_dtype")

_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks?|depths?)$", re.IGNORECASE)
_EXPERTS = re.compile(r"(?:^|_)(?:experts?(?:_per_tok(?:en)?)?|top_?k)$", re.IGNORECASE)
"""Names under which configurations state such a number, or that of a token's experts, anywhere in them."""

_LAYER_NUMBER = re.compile(r"(?<!experts)\.([0-9]{1,9})(?=\.)")
"""Place of a layer in a tensor's name; an expert's is none."""

MOST_LAYERS, MOST_EXPERTS = 1024, 65536
"""Where there are no weights to compare with. Published models have up to 130 layers."""

ALWAYS_LAYERS, ALWAYS_EXPERTS = 256, 1024
"""Never too many: configurations also keep numbers that the model does not use, and building these takes no time."""


@dataclass(frozen=True)
class Wrong:
    """A value that no model has."""

    field: str  # Its place in ``config.json``, such as ``vision_config.depth``
    expected: str
    got: str  # The value, cut
    remedy: str = "Correct it, or take config.json from where the weights came from."  # What to do


def wrong_value(content: dict[str, Any]) -> Wrong | None:
    """Return the first field of a parsed ``config.json`` that has another type or is out of bounds.

    Checked are the model type, dtypes, ``quantization_config``, the sizes that all families have, the number of labels
    and the length of lists, anywhere in it.
    Fields that are absent or null are transformers' to judge.
    """
    return _wrong_family(content.get("model_type")) or next(_wrong_fields(content), None)


def numbers(content: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield place, key and value of everything in parsed JSON that is no object or list; in lists, the list's key."""
    pending = [("", "", content)]
    while pending:
        place, name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{place}.{key}" if place else key, key, part) for key, part in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(place, name, part) for part in reversed(value)]
        else:
            yield place, name, value


def shown(value: object) -> str:
    """Return a wrong value for a message, cut to :data:`SHOWN` characters."""
    return printable(repr(value), SHOWN)


def reason_of(error: Exception) -> str:
    """Return what transformers or torch says about a configuration, in one line without frames of C++."""
    text = str(error).strip()
    if not isinstance(error, StrictDataclassError):  # whose second line names the rule
        text = text.partition("\n")[0]
    return printable(f"{type(error).__name__}: {' '.join(text.split())}", REASON)


def _wrong_family(family: object) -> Wrong | None:
    if family is None or (isinstance(family, str) and family in CONFIG_MAPPING):
        return None
    hint = nearest(family, list(CONFIG_MAPPING_NAMES)) if isinstance(family, str) else ""
    return Wrong(
        "model_type",
        f"a model type that transformers {transformers_version} knows",
        shown(family),
        f"Custom code from a checkpoint is never run; check the file and the transformers version.{hint}",
    )


def _wrong_fields(content: dict[str, Any]) -> Iterator[Wrong]:
    quantization = content.get("quantization_config")
    if not isinstance(quantization, dict | None):
        yield Wrong("quantization_config", "a JSON object", shown(quantization))
    yield from _long_lists(content)
    for place, name, value in numbers(content):
        if name == "num_labels" and (type(value) is not int or not 0 <= value <= MOST_LABELS):
            yield Wrong(place, f"an integer from 0 to {MOST_LABELS:,}", shown(value))
        if value is None or place.startswith("quantization_config."):
            continue
        least = 1 if _POSITIVE.fullmatch(name) else 0 if _NATURAL.fullmatch(name) else None
        if least is not None and (type(value) is not int or not least <= value <= MAX_VALUE):
            yield Wrong(place, f"an integer from {least} to {MAX_VALUE:,}", shown(value))
        if name in _DTYPES and not _is_dtype(value):
            yield Wrong(place, "a dtype of torch such as bfloat16", shown(value))


def _long_lists(content: Any) -> Iterator[Wrong]:
    pending = [("", content)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{place}.{key}" if place else key, part) for key, part in value.items()]
        elif isinstance(value, list):
            if len(value) > MOST_ENTRIES:
                yield Wrong(place, f"a list of at most {MOST_ENTRIES:,} entries", f"{len(value):,}")
            pending += [(place, part) for part in value]


def _is_dtype(name: object) -> bool:
    return isinstance(name, str) and (
        name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
    )


@dataclass(frozen=True)
class Room:
    """The most layers and experts that a configuration may ask for, and whether weights were asked."""

    layers: int = MOST_LAYERS
    experts: int = MOST_EXPERTS
    by_weights: bool = False


def room_of(source: SourceCheckpoint) -> Room:
    """Return the room that a checkpoint's weights have: numbers in names for layers, tensors or an axis for experts."""
    return Room(_layers_of(source.tensors), _experts_of(source.tensors.values()), by_weights=True)


def room_in(directory: Path) -> Room:
    """Return the room that the weights in a folder have, as far as its index or single file can be read.

    What needs no weights works with an index alone, with damaged weights, and without any: then by fixed limits.
    """
    try:
        if (directory / INDEX_FILE).is_file():
            return Room(_layers_of(read_index(directory / INDEX_FILE)[0]), by_weights=True)
        if (directory / SINGLE_FILE).is_file():
            tensors, _ = read_header(directory / SINGLE_FILE)
            return Room(_layers_of(tensors), _experts_of(tensors.values()), by_weights=True)
    except (SourceDamageError, OSError):  # commands that read the weights refuse them
        pass
    return Room()


def excess(content: Any, room: Room) -> Wrong | None:
    """Return the first number of layers or experts in a configuration that is more than there is room for."""
    for place, name, number in numbers(content):
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        limit = room.layers if _LAYERS.search(name) else room.experts if _EXPERTS.search(name) else None
        if limit is not None and type(number) is int and number > limit:
            told = " with these weights" if room.by_weights else ""
            return Wrong(place, f"at most {limit:,}{told}", str(number))
    return None


def _layers_of(names: Collection[str]) -> int:
    found = max((int(number) for name in names for number in _LAYER_NUMBER.findall(name)), default=0)
    return max(ALWAYS_LAYERS, min(found + 1, len(names), MOST_LAYERS))


def _experts_of(tensors: Collection[SourceTensor]) -> int:
    return max(ALWAYS_EXPERTS, len(tensors), *(max(tensor.shape, default=0) for tensor in tensors))
