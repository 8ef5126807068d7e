"""In which order the MXFP8 experts' kernels have the checkpoint of gate and up, read off what is installed.

Letters: N blocks of B slots, I intermediate.

The documented order is ``[N, 2, I, B]`` (nki-library 2.31 and 2.32). A candidate of 2.33 names an order in its
checkpoint record, whose default is ``DIRECT``, ``[N, 2, B, I]``; only the default works there, so the record is left
alone and its default is read. Where neither an option nor a record that can be found names an order, the documented one
holds. Shapes say nothing: at I = B both orders have the same one.

Source: nki-library ``experimental.moe_mxfp8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hf_neuron_moe.backends.neuron.nkilib_objects import find_object
from hf_neuron_moe.backends.neuron.signatures import UNKNOWN, field_defaults

TRANSPOSED, DIRECT = _ORDERS = "TRANSPOSED", "DIRECT"
"""``[N, 2, I, B]`` and ``[N, 2, B, I]``."""

_RECORD, _ARGUMENT = "MXFP8MOECheckpointConfig", "checkpoint_config"
_ORIENTATION = "gate_up_proj_act_td"
"""A field by which another generation is asked for ``TRANSPOSED``."""


def gate_up_layout(defaults: Mapping[str, Any], config: Any | None) -> tuple[str, str | None]:
    """Return the order of the checkpoint of gate and up in an installed kernel, or any order and why it is not known.

    `defaults` are its arguments with their defaults, `config` is the record of options that it takes, if there is one.
    """
    known = field_defaults(config)
    options = {**defaults, **(known if known is not None else {_ARGUMENT: UNKNOWN})}
    found = _layouts(options)
    if _ARGUMENT in options:
        record = options[_ARGUMENT]
        fields = field_defaults(find_object(_RECORD) if record is None or record is UNKNOWN else record)
        if fields is None:
            return TRANSPOSED, f"{_ARGUMENT} is of a record whose fields cannot be read"
        found |= _layouts(fields)
    named = {name: value.name if isinstance(value, Enum) else value for name, value in found.items()}
    unknown = [f"{name} defaults to {found[name]!r}" for name, order in named.items() if order not in _ORDERS]
    if unknown:
        return TRANSPOSED, "; ".join(unknown)
    if _ORIENTATION in options:
        named[_ORIENTATION] = TRANSPOSED
    if len(set(named.values())) > 1:
        return TRANSPOSED, f"{', '.join(named)} contradict each other"
    return next(iter(named.values()), TRANSPOSED), None


def _layouts(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("gate_up") and name.endswith("_layout")}
