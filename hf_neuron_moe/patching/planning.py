"""Decides about every candidate of a model: patched, skipped by the caller's choice, or refused with the reason."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn

from hf_neuron_moe.backends.operator_registration import register_again
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.patching.apply import PlanItem, Request, all_slots
from hf_neuron_moe.patching.discovery import EXPERTS, Candidate
from hf_neuron_moe.patching.preconditions import passed_by
from hf_neuron_moe.patching.report import PATCHED, REFUSED, SKIPPED, PatchEntry
from hf_neuron_moe.patching.support import plan_item, products_of

_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class _Surroundings:
    """What decides about a candidate besides the candidate itself."""

    model: nn.Module
    uses: Counter[int]
    """Of parameters, and of the layers that own them: tied are two blocks that have one of either in common."""
    wrapped: set[int]  # ids of the modules to which an adapter is attached
    left_out: dict[int, nn.Module]  # see :func:`passed_by`


def plan_patch(
    model: nn.Module, candidates: list[Candidate], request: Request
) -> tuple[list[PlanItem], tuple[PatchEntry, ...]]:
    """Return the blocks to be patched and an entry for every candidate; nothing is changed."""
    config, include, exclude = request
    register_again()
    uses = Counter(
        id(used) for module in model.modules() for used in (*module._parameters.values(), *module._modules.values())
    )
    around = _Surroundings(model, uses, wrapped_modules(model), passed_by(model))
    plan: list[PlanItem] = []
    entries: list[PatchEntry] = []
    for candidate in candidates:
        skipped = _skip_reason(candidate, include, exclude)
        reason = skipped or candidate.reason
        item = plan_item(candidate, config) if reason is None else None
        if item is not None:
            reason = _first(reason_of(candidate, item, around) for reason_of in _REASONS)
        if item is not None and reason is None:
            plan.append(item)
            entries.append(_patched_entry(item))
        else:
            entries.append(replace(_entry(candidate, SKIPPED if skipped else REFUSED), reason=reason or ""))
    return plan, tuple(entries)


def wrapped_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules to which an adapter is attached."""
    return {key for key, slots in all_slots(model).items() if any(attr == "base_layer" for _, attr in slots)}


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _skip_reason(candidate: Candidate, include: tuple[str, ...], exclude: tuple[str, ...]) -> str | None:
    names = (candidate.name, *candidate.aliases)
    for glob in exclude:
        if fnmatch.filter(names, glob):
            return f"excluded by {glob!r}"
    if include and not any(fnmatch.filter(names, glob) for glob in include):
        return f"not matched by include={', '.join(map(repr, include))}"
    return None


def _is_model(candidate: Candidate, item: PlanItem, around: _Surroundings) -> str | None:
    whole = candidate.module is around.model
    return "it is the model itself; pass the module that contains it" if whole else None


def _kernels_refuse(candidate: Candidate, item: PlanItem, around: _Surroundings) -> str | None:
    return item.refusal and f"{item.refusal}; fallback='torch' computes it without the kernels"


def _stays_stock(candidate: Candidate, item: PlanItem, around: _Surroundings) -> str | None:
    """Why its weights cannot have the kernels' layout, where that is asked for."""
    if item.config.weights == "stock":
        return None
    if id(candidate.module) in around.wrapped:
        return "an adapter made for the stock layout is attached to it; patch before attaching, or use weights='stock'"
    for child in candidate.module.modules():
        if any(getattr(child, kind) for kind in _STATE_HOOKS):
            hooked = type(child).__name__
            return f"{hooked} has state_dict hooks, which would meet the kernel layout; use weights='stock'"
    return _first(reason_of(rule, candidate, around) for rule in candidate.rules for reason_of in _RULE_REASONS)


def _is_passed_by(candidate: Candidate, item: PlanItem, around: _Surroundings) -> str | None:
    if candidate.kind != EXPERTS or id(candidate.module) not in around.left_out:
        return None
    return "a forward put on the module around it does not call it; delete that (`del block.forward`)"


def _is_frozen_in_part(rule: WeightRule, candidate: Candidate, around: _Surroundings) -> str | None:
    if len({param.requires_grad for param in _stock_parameters(rule, candidate)}) < 2:
        return None
    return f"{' and '.join(rule.stock)} become one parameter, but only one is frozen; use weights='stock'"


def _is_tied(rule: WeightRule, candidate: Candidate, around: _Surroundings) -> str | None:
    owners = [stock_slot(candidate.module, name)[0] for name in rule.stock]
    layers = [layer for layer in owners if layer is not candidate.module]
    shared = any(around.uses[id(used)] > 1 for used in (*_stock_parameters(rule, candidate), *layers))
    if rule.keeps_layout or not shared:
        return None
    return f"{rule.stock[0]} is tied to another module's parameter; use weights='stock'"


def _has_tensor_hooks(rule: WeightRule, candidate: Candidate, around: _Surroundings) -> str | None:
    params = _stock_parameters(rule, candidate)
    hooked = any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params)
    if rule.keeps_layout or not hooked:
        return None
    return f"{rule.stock[0]} has tensor hooks, which another layout cannot keep; use weights='stock'"


def _stock_parameters(rule: WeightRule, candidate: Candidate) -> list[nn.Parameter]:
    return [getattr(*stock_slot(candidate.module, name)) for name in rule.stock]


_REASONS: tuple[Callable[[Candidate, PlanItem, _Surroundings], str | None], ...] = (
    _is_model,
    _kernels_refuse,
    _stays_stock,
    _is_passed_by,
)
"""The first that gives a reason decides."""
_RULE_REASONS = (_is_frozen_in_part, _is_tied, _has_tensor_hooks)
"""The same, of every parameter in the kernels' layout."""


def _entry(candidate: Candidate, status: str) -> PatchEntry:
    E, H, I = candidate.sizes  # noqa: E741
    return PatchEntry(
        name=candidate.name,
        aliases=candidate.aliases,
        kind=candidate.kind,
        class_name=type(candidate.module).__name__,
        status=status,
        experts=E,
        hidden_size=H,
        intermediate_size=I,
        gated=candidate.gated,
    )


def _patched_entry(item: PlanItem) -> PatchEntry:
    listed = item.candidate.listed
    note = (
        f"one of {listed} MLPs of a ModuleList: if these are experts, each is computed as a dense block, "
        "without the experts kernels and without routing replay"
    )
    return replace(
        _entry(item.candidate, PATCHED),
        weights=item.config.weights,
        backend=item.config.backend,
        fallback=item.fallback,
        weight_copy_bytes=item.weight_copy_bytes,
        notes=(*item.notes, note) if listed else item.notes,
        kernel_sizes=item.kernel_sizes,
        products=products_of(item.candidate, item.config),
    )
