"""What both MXFP8 kernels of experts are given, and in which order they have the checkpoint of gate and up.

Both are read off what is installed: nki-library's ``experimental.moe_mxfp8``. Letters: N blocks of B slots, I
intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, nkilib_object
from hf_neuron_moe.backends.neuron.signatures import UNKNOWN, field_defaults, keywords, signature_of

TRANSPOSED, DIRECT = _ORDERS = "TRANSPOSED", "DIRECT"
"""``[N, 2, I, B]`` and ``[N, 2, B, I]``."""

_RECORD, _ARGUMENT = "MXFP8MOECheckpointConfig", "checkpoint_config"
_ORIENTATION = "gate_up_proj_act_td"
"""A field by which another generation is asked for ``TRANSPOSED``."""


def pair_options(
    function: object, record: object, shard_option: str, **for_one_expert: Any
) -> tuple[Any | None, dict[str, Any]]:
    """Return the record in which an installed kernel takes its options, and those that it has.

    There is no record where they are arguments of `function`, as in 2.31 and 2.32. `shard_option` is a member of
    ``ShardOption``, which differs between the two kernels. Defaults of the options `for_one_expert`, which only some
    records name, may be those of a single dense expert.
    """
    signature = signature_of(function)
    if signature is None or "config" not in signature.parameters:
        record = None
    known = keywords(function if record is None else record)
    options = {
        "shard_option": getattr(nkilib_object("ShardOption"), shard_option),
        "affinity_option": nkilib_object("AffinityOption").AFFINITY_ON_I,
        "skip_dma": nkilib_object("BackwardSkipMode")(skip_token=True),
        "is_tensor_update_accumulating": True,
        "accumulate_hidden_states_grad": True,
        "no_indirect_load": False,
        "single_expert_dense": False,
    }
    given = {name: value for name, value in options.items() if known is None or name in known}
    named = frozenset() if record is None else known or frozenset()
    return record, given | {name: value for name, value in for_one_expert.items() if name in named}


def gate_up_layout(defaults: Mapping[str, Any], config: Any | None) -> tuple[str, str | None]:
    """Return the order of the checkpoint of gate and up in an installed kernel, or any order and why it is not known.

    `defaults` are its arguments with their defaults, `config` is the record of options that it takes, if there is one.

    The documented order is ``TRANSPOSED`` (2.31 and 2.32); it holds where neither an option nor a record that can be
    found names one. A candidate of 2.33 names an order in its checkpoint record; only the default, ``DIRECT``, works
    there, so the record is left alone and its default is read. Shapes say nothing: at I = B both orders have the same.
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
