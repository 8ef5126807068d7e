"""How many layers and experts ``config.json`` may ask for, judged by the weights before a model is built.

A model on the meta device needs no memory for its weights, but time and objects for every layer, and lists for every
expert. Both are a stranger's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.config_values import Wrong, numbers
from hf_neuron_moe.convert.io.source import (
    INDEX_FILE,
    SINGLE_FILE,
    SourceCheckpoint,
    SourceTensor,
    read_header,
    read_index,
)
from hf_neuron_moe.errors import SourceDamageError

_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks?|depths?)$", re.IGNORECASE)
_EXPERTS = re.compile(r"(?:^|_)(?:experts?(?:_per_tok(?:en)?)?|top_?k)$", re.IGNORECASE)
"""Names under which configurations state such a number, or that of a token's experts, anywhere in them."""

_NUMBER = re.compile(r"(?<!experts)\.([0-9]{1,9})(?=\.)")
"""Place of a layer in a tensor's name; an expert's is none."""

MOST_LAYERS, MOST_EXPERTS = 1024, 65536
"""Where there are no weights to compare with. Published models have up to 130 layers."""

ALWAYS_LAYERS, ALWAYS_EXPERTS = 256, 1024
"""Never too many: configurations also keep numbers that the model does not use, and building these takes no time."""


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
    found = max((int(number) for name in names for number in _NUMBER.findall(name)), default=0)
    return max(ALWAYS_LAYERS, min(found + 1, len(names), MOST_LAYERS))


def _experts_of(tensors: Collection[SourceTensor]) -> int:
    return max(ALWAYS_EXPERTS, len(tensors), *(max(tensor.shape, default=0) for tensor in tensors))
