"""What a call of a dense block compares with what was read from the original's forward, whatever holds its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hf_neuron_moe.errors import ShapeError, UnsupportedModelError, with_article
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.dense_roles import DenseRoles, constant_of
from hf_neuron_moe.modules.structure import is_inert


def check_arguments(
    block: NeuronBlock, roles: DenseRoles, unused: Sequence[object], unused_by_name: Mapping[str, object]
) -> None:
    """Raise for arguments that forward does not have, and for other values of those that decide what it does."""
    if not roles.extra_arguments:
        raise TypeError(f"{block.neuron_name}: forward takes hidden_states only")
    for name, place, default in roles.fixed_arguments:
        by_place = unused[place] if place is not None and place < len(unused) else default
        now = unused_by_name.get(name, by_place)
        if now is not default and not (type(now) is type(default) and now == default):
            fix = "The patched block computes the branch of the default: unpatch the model for another one."
            got = repr(now) if type(now) in (int, float, str, bool) else with_article(type(now).__name__)
            raise UnsupportedModelError.about(name, repr(default), got, fix).named(block.neuron_name)


def check_attributes(block: NeuronBlock, roles: DenseRoles, *, layers: bool) -> None:
    """Raise where an attribute is not what it was when it decided what forward computes.

    Without `layers` the block no longer has those that hold the weights.
    """
    for name in roles.inert if block.training else ():
        held = block._modules.get(name, block.__dict__.get(name))
        if not is_inert(held):
            expected = "a dropout of 0 without hooks, as when the block was patched"
            fix = "The kernels have no dropout: unpatch the model before changing it."
            raise UnsupportedModelError.about(name, expected, repr(held), fix).named(block.neuron_name)
    for path, value in roles.constants:
        if not layers and path.partition(".")[0] in roles.roots:
            continue
        now = constant_of(block, path)
        if now != value:
            fix = "The block computes what this said when it was patched: unpatch the model before changing it."
            expected = f"{value!r}, as when the block was patched"
            raise UnsupportedModelError.about(path, expected, repr(now), fix).named(block.neuron_name)


def check_rank(block: NeuronBlock, roles: DenseRoles, hidden_states: Tensor) -> None:
    """Raise for another number of dimensions than the original forward takes."""
    if roles.rank not in (None, hidden_states.dim()):
        fix = "The original forward counts dimensions from the first: pass a tensor with that many, or unpatch it."
        expected, got = f"a tensor with {roles.rank} dimensions", str(hidden_states.dim())
        raise ShapeError.about("hidden_states", expected, got, fix).named(block.neuron_name)
