"""Checks of what ``config.json`` states, before transformers and torch compute with it.

Their own errors about such values name a line of model code. These name the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_neuron_moe.errors import nearest, printable

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
