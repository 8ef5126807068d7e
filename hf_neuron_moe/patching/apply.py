"""Puts replacement modules in place and takes them out again, all or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.backends import drop_weight_copies
from hf_neuron_moe.backends.spec import Support
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules import in_place
from hf_neuron_moe.modules.backend_choice import LongCalls
from hf_neuron_moe.modules.block import NeuronBlock, give_back, release_layout, restore_layout
from hf_neuron_moe.modules.experts import (
    ExpertsBlock,
    KernelLayoutExperts,
    NeuronExperts,
    SelfRoutedExperts,
    SharedExperts,
)
from hf_neuron_moe.modules.experts_calls import BY_EXPERT, SHARED, SORTED
from hf_neuron_moe.modules.in_place import computes_for
from hf_neuron_moe.modules.sharded_mlp import ShardedSwiGLUMLP, is_parallel
from hf_neuron_moe.modules.swiglu_mlp import KernelLayoutSwiGLUMLP, NeuronSwiGLUMLP
from hf_neuron_moe.patching import adapter_watch, checkpoint_names, model_methods, optimizer_layout
from hf_neuron_moe.patching.discovery import Candidate
from hf_neuron_moe.patching.report import PatchReport, merged

Slot = tuple[nn.Module, str]
"""A parent and the attribute under which it has a module registered."""

Request = tuple[NeuronMoEConfig, tuple[str, ...], tuple[str, ...]]
"""Config, include and exclude as asked for."""

STATE = "_hf_neuron_moe_state"
"""Attribute of the patched model that holds its :class:`PatchState`; it is neither a submodule nor a parameter."""


@dataclass
class Swap:
    """An original module and what stands in its place."""

    name: str
    original: nn.Module
    replacement: NeuronBlock
    places: int = 0  # number of slots in which the replacement was registered
    stays: bool = False  # the original stays where it is, and the replacement computes for it

    @property
    def is_there(self) -> bool:
        """Whether the replacement, in place of a module that stays, still computes."""
        return not self.stays or computes_for(self.replacement, self.original)


@dataclass
class PatchState:
    """What is needed to answer a second call and to undo the first."""

    report: PatchReport
    request: Request
    prefix: str = ""
    """What came before the names within the patched model (``"base_model.model"`` for an adapter's wrapper)."""
    swaps: list[Swap] = field(default_factory=list)
    resumable: list[nn.Module] = field(default_factory=list)  # models that got the conversion of checkpoint names
    covered: list[tuple[nn.Module, str]] = field(default_factory=list)  # models and methods that patching stands before
    rules: adapter_watch.Rules = field(default_factory=list)


@dataclass(frozen=True)
class PlanItem:
    """A candidate to be patched and its resolved configuration."""

    candidate: Candidate
    config: NeuronMoEConfig  # backend and layout of the weights are not ``"auto"``
    support: Support = field(default_factory=Support)
    """What the backend's kernels say; where PyTorch computes it in their place, what they say of nothing."""
    fallback: str = ""  # why PyTorch computes it instead of the kernels that were asked for; else empty


def apply_plan(
    model: nn.Module, plan: Sequence[PlanItem], state: PatchState, everyone: AbstractContextManager[Any]
) -> None:
    """Replace every module of `plan` and attach `state`; on any exception the model is as it was before.

    `everyone` raises at its end where another process of the job could not do the same.
    """
    # Tensors made in inference mode could not be trained; that holds for undoing too.
    with torch.inference_mode(False), ExitStack() as undo:
        with everyone:
            long_calls: dict[int, LongCalls] = {}
            slots = all_slots(model)
            for item in plan:
                swap = build(item)
                most = item.support.most_tokens
                if most is not None:
                    swap.replacement.neuron_long_calls = long_calls.setdefault(most, LongCalls(most))
                undo.callback(take_out, model, swap)
                put_in(model, swap, slots)
                release_layout(swap.replacement, swap.original)
                state.swaps.append(swap)
            undo.callback(checkpoint_names.remember, checkpoint_names.forget_decoding(model))
            undo.callback(checkpoint_names.remove, state.resumable)
            checkpoint_names.install(model, state.resumable)
            undo.callback(model_methods.uncover, state.covered)
            has_experts = any(entry.kind == "experts" for entry in state.report.entries)
            model_methods.cover(model, experts=has_experts, covered=state.covered)
            undo.callback(optimizer_layout.unwatch, model)
            optimizer_layout.watch(model)
            undo.callback(adapter_watch.unwatch, state.rules)
            adapter_watch.watch(model, state.rules)
            undo.callback(model.__dict__.pop, STATE, None)
            object.__setattr__(model, STATE, state)
        undo.pop_all()


def build(item: PlanItem) -> Swap:
    """Make the replacement for one candidate; the model and the original are not changed."""
    candidate, config = item.candidate, item.config
    kernel = config.weights == "kernel"
    replacement: NeuronBlock
    if candidate.roles is not None:
        dense = KernelLayoutSwiGLUMLP if kernel else NeuronSwiGLUMLP
        if candidate.sharded and is_parallel(candidate.module, candidate.roles):
            dense = ShardedSwiGLUMLP
        replacement = dense(candidate.module, candidate.name, config, candidate.roles)
    else:
        assert candidate.form is not None
        experts: type[ExpertsBlock] = KernelLayoutExperts if kernel else NeuronExperts
        if candidate.form.call in (BY_EXPERT, SORTED):
            experts = SelfRoutedExperts
        elif candidate.form.call == SHARED:
            experts = SharedExperts
        replacement = experts(candidate.module, candidate.name, config)
        replacement.neuron_top_k = candidate.top_k
    return Swap(candidate.name, candidate.module, replacement, stays=candidate.stays)


def put_in(model: nn.Module, swap: Swap, slots: Mapping[int, Sequence[Slot]]) -> None:
    """Register the replacement wherever the original is registered; `slots` are the model's, or those of the swap."""
    if swap.stays:
        in_place.install(swap.replacement, swap.original)
        return
    places = slots.get(id(swap.original), ())
    for parent, attr in places:
        parent._modules[attr] = swap.replacement
    swap.places = len(places)


def take_out(model: nn.Module, swap: Swap, slots: Mapping[int, Sequence[Slot]] | None = None) -> None:
    """Register the original, with the replacement's present state, wherever the replacement is registered."""
    if swap.stays:
        in_place.remove(swap.replacement, swap.original)
        return
    restore_layout(swap.replacement, swap.original)
    give_back(swap.replacement, swap.original)
    places = (all_slots(model) if slots is None else slots).get(id(swap.replacement), ())
    for parent, attr in places:
        parent._modules[attr] = swap.original


def all_slots(model: nn.Module) -> dict[int, list[Slot]]:
    """Return where each module of `model` is registered, by id: for loops over modules, which then take linear time."""
    slots: defaultdict[int, list[Slot]] = defaultdict(list)
    for parent in model.modules():
        for attr, child in parent._modules.items():
            if child is not None:
                slots[id(child)].append((parent, attr))
    return dict(slots)


def states(model: nn.Module) -> Iterator[tuple[nn.Module, PatchState]]:
    """Yield the patched models within `model` (itself, one inside a wrapper, parts of it) and their states."""
    for module in model.modules():
        state = module.__dict__.get(STATE)
        if state is not None:
            yield module, state


def report_of(model: nn.Module) -> PatchReport | None:
    """Return the report of a patched model, or all of its parts' under the names that `model` has for them."""
    found = list(states(model))
    if len(found) < 2:
        return found[0][1].report if found else None
    names = {id(module): name for name, module in model.named_modules()}
    # The entries' own names begin with the way from an adapter's wrapper to the patched model inside.
    return merged({names[id(part)].removesuffix(state.prefix).removesuffix("."): state.report for part, state in found})


def undo_patch(model: nn.Module, state: PatchState) -> None:
    """Take every replacement out of `model`. If it is interrupted, calling it again finishes the work."""
    drop_weight_copies(model.parameters())
    checkpoint_names.remove(state.resumable)
    model_methods.uncover(state.covered)
    optimizer_layout.unwatch(model)
    adapter_watch.unwatch(state.rules)
    with torch.inference_mode(False):  # the original parameters get new tensors, to be trained again
        slots = all_slots(model)
        while state.swaps:
            take_out(model, state.swaps[-1], slots)
            state.swaps.pop()
    del model.__dict__[STATE]
