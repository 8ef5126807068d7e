"""How many layers and experts ``config.json`` may ask for, judged by the weights before a model is built.

A model on the meta device needs no memory for its weights, but time and objects for every layer, and lists for every
expert. Both are a stranger's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hf_neuron_moe.convert.source import SourceCheckpoint

_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks?|depths?)$", re.IGNORECASE)
_EXPERTS = re.compile(r"(?:^|_)(?:experts?(?:_per_tok(?:en)?)?|top_?k)$", re.IGNORECASE)
"""Names under which configurations state such a number, or that of a token's experts, anywhere in them."""

MOST_LAYERS, MOST_EXPERTS = 4096, 65536
"""Where there are no weights to compare with."""

ALWAYS_LAYERS, ALWAYS_EXPERTS = 256, 1024
"""Never too many: configurations also keep numbers that the model does not use, and building these takes no time."""


def excess(content: Any, source: SourceCheckpoint | None) -> str | None:
    """Name the first number of layers or experts in a configuration that the weights cannot fill.

    Args:
        content: ``config.json``, parsed.
        source: the weights: every layer has a tensor, and experts have tensors or an axis. None: fixed limits.

    Returns:
        ``"num_hidden_layers 1000000, the weights have 21 tensors"``, or None where there is none.
    """
    layers, experts = MOST_LAYERS, MOST_EXPERTS
    if source is not None:
        layers = max(ALWAYS_LAYERS, len(source.tensors))
        axes = (max(tensor.shape, default=0) for tensor in source.tensors.values())
        experts = max(ALWAYS_EXPERTS, len(source.tensors), *axes)
    told = "at most" if source is None else "the weights have room for at most"
    for name, value in _numbers(content):
        limit = layers if _LAYERS.search(name) else experts if _EXPERTS.search(name) else value
        if value > limit:
            return f"{name} {value}, {told} {limit:,}"
    return None


def _numbers(content: Any) -> Iterator[tuple[str, int]]:
    """Every integer of a configuration with its key; those in lists with the list's."""
    pending = [("", content)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, part) for part in value]
        elif type(value) is int:
            yield name, value
        elif isinstance(value, float) and value.is_integer():
            yield name, int(value)
