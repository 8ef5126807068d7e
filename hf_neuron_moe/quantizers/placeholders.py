"""Puts stand-ins for the converted weights into a model on the meta device, and finishes them once they are filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.convert.plan import no_codes
from hf_neuron_moe.errors import ConversionError, public
from hf_neuron_moe.modules.engine import sizes_asked
from hf_neuron_moe.modules.quantized_blocks import (
    DOWN,
    GATE_UP,
    QuantizedBlock,
    QuantizedExperts,
    QuantizedSwiGLUMLP,
)
from hf_neuron_moe.patching.apply import Swap, all_slots
from hf_neuron_moe.patching.discovery import Candidate, discover
from hf_neuron_moe.quantizers.bf16_loader import Bf16Loader
from hf_neuron_moe.quantizers.shard_layouts import FORWARD, WHERE, StoredTensor, joined
from hf_neuron_moe.quantizers.sharded import Reading
from hf_neuron_moe.quantizers.sharded_codes import CodeReading, local_codes

_CONFIG = NeuronMoEConfig(precision="mxfp8", backend="torch", weights="stock")


@dataclass
class Placement:
    """Stand-ins in a model."""

    quantized: list[tuple[QuantizedBlock, Candidate]] = field(
        default_factory=list
    )  # those that stay; what they replace
    loaders: list[Bf16Loader] = field(default_factory=list)  # those that make way for the original modules again
    readings: list[Reading] = field(default_factory=list)  # modules that stay, of a model that is sharded while loading
    codes: list[CodeReading] = field(default_factory=list)  # of the stand-ins that stay, of such a model
    swaps: list[Swap] = field(default_factory=list)  # bf16 blocks, patched because they lie beside quantized ones
    names: set[str] = field(default_factory=set)  # in-memory names of all converted tensors
    homes: dict[str, str] = field(default_factory=dict)  # name in the file to name in memory, of those read whole


@public(WHERE)
def place(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> Placement:
    """Replace every module whose weights are stored converted, or note it where the engine will shard the model."""
    placement, placed, slots = Placement(), set(), all_slots(model)
    sizes, stored = sizes_asked(model), joined(stored)
    warned: set[str] = set()
    named = _by_own_names(model, stored)
    for candidate in discover(model):
        kind = QuantizedSwiGLUMLP if candidate.roles is not None else QuantizedExperts
        names = kind.tensor_names(candidate.gate.gated)
        tensors = _tensors_of(candidate.name, names, model, named)
        if not tensors:
            continue
        stand_in = _stand_in(candidate, kind, tensors, names, sizes)
        placed |= {tensor.name for tensor in tensors.values()}
        within = f"{candidate.name}." if candidate.name else ""
        placement.homes |= {tensor.name: within + name for name, tensor in tensors.items()}
        if isinstance(stand_in, Reading):
            placement.readings.append(stand_in)
            placement.names |= {tensor.name for tensor in tensors.values()}
            continue
        if isinstance(stand_in, CodeReading):
            placement.codes.append(stand_in)
            stand_in = stand_in.block
        for parent, attribute in slots.get(id(candidate.module), ()):
            parent._modules[attribute] = stand_in
        if isinstance(stand_in, Bf16Loader):
            placement.loaders.append(stand_in)
        else:
            stand_in.neuron_fallbacks_warned = warned
            placement.quantized.append((stand_in, candidate))
        placement.names |= {within + name for name in stand_in.state_dict()}
    lost = sorted(name for name, tensor in stored.items() if name not in placed and tensor.orientation == FORWARD)
    if lost:
        got = f"no such module in {type(model).__name__}"
        fix = (
            "Load the folder with the class that config.json names under architectures: another one may be a part of "
            "it. If that is the class, convert the original again: config.json and the shards do not belong together, "
            "or this version of transformers builds the family differently."
        )
        expected = "the weight of an MLP or experts module of this model"
        raise ConversionError.about(f"tensor {lost[0]}", expected, got, fix)
    return placement


def _by_own_names(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by their names, and by those that transformers gives them: a text model alone has other ones."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, rename_source_key

    changes: list[Any] = [each for each in get_model_conversion_mapping(model) if isinstance(each, PrefixChange)]
    return {rename_source_key(name, changes, [])[0]: tensor for name, tensor in stored.items()} | dict(stored)


def _tensors_of(
    module: str, names: tuple[str, ...], model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """A module's converted tensors by their names in it; empty where it was left in source form."""
    base = f"{model.base_model_prefix}."
    found: dict[str, StoredTensor] = {}
    for name in names:
        full = f"{module}.{name}" if module else name
        # A headless model's names have no prefix where the file's have one, and the other way round.
        for known in (full, base + full, full.removeprefix(base)):
            if known in stored:
                found.setdefault(name, stored[known])
    return found


def _stand_in(
    candidate: Candidate,
    kind: type[QuantizedBlock],
    tensors: Mapping[str, StoredTensor],
    names: tuple[str, ...],
    engine: Mapping[str, int],
) -> Bf16Loader | QuantizedBlock | Reading | CodeReading:
    whole = {role: tensors[name] for role, name in zip((GATE_UP, DOWN), names[::2]) if name in tensors}
    plain = all(tensor.bf16_layout is not None for tensor in whole.values())
    if candidate.reason is not None or len(whole) < 2 or any((name in tensors) is plain for name in names[1::2]):
        expected = "gate_up and down of a module that the kernels can compute, with scales if they are quantized"
        got = f"{', '.join(sorted(tensors))}{f' ({candidate.reason})' if candidate.reason else ''}"
        fix = "The checkpoint is damaged, or this version of transformers builds the module differently."
        raise ConversionError.about(f"converted weights of {candidate.name}", expected, got, fix)
    form = candidate.form
    for role, tensor in whole.items():
        sizes, stored = candidate.sizes, (None if form is None else tensor.experts, *tensor.sizes)
        if form is not None and role == GATE_UP and not form.stacked:  # which may have rows for experts without down
            sizes = (candidate.module.get_parameter(form.gate_up).shape[0], *sizes[1:])
        if stored != sizes:
            expected = f"made of {_named(*sizes)}, as config.json says"
            fix = "config.json and the shards do not belong together."
            raise ConversionError.about(f"tensor {tensor.name}", expected, _named(*stored), fix)
    if plain:
        apart = engine or any(tensor.parts for tensor in whole.values())
        return Reading(candidate, whole) if apart else Bf16Loader(candidate, whole)
    if (reason := no_codes(candidate)) is not None:
        fix = "Load the original checkpoint and patch it with precision='mxfp8'."
        expected = "of a module that is computed with MX codes"
        raise ConversionError.about(f"converted weights of {candidate.name}", expected, reason, fix)
    layouts = {role: tensor.mx_layout(gate_up=role == GATE_UP) for role, tensor in whole.items()}
    if len({layout.order for layout in layouts.values()}) > 1:
        got, fix = f"{whole[GATE_UP].layout} and {whole[DOWN].layout}", "The shards do not belong together."
        expected = "permuted both or neither"
        raise ConversionError.about(f"converted weights of {candidate.name}", expected, got, fix)
    held, experts = local_codes(candidate, tensors, engine)
    parts = form or candidate.roles
    for name in () if parts is None else parts.biases:
        held[name] = torch.empty_like(candidate.module.get_parameter(name), device="meta")
    block = kind(candidate.module, candidate.name, _CONFIG, layouts, held, candidate.roles)
    if candidate.roles is None:
        block.neuron_top_k = candidate.top_k
    return CodeReading(block, tensors, experts) if experts or any(each.parts for each in tensors.values()) else block


def _named(experts: int | None, hidden: int | None, inner: int | None) -> str:
    network = f"hidden size {hidden} and intermediate size {inner}"
    return network if experts is None else f"{experts} experts of {network}"
