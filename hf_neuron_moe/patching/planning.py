"""Decides about every candidate of a model: patched, skipped by the caller's choice, or refused with the reason."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.operator_registration import register_again
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec
from hf_neuron_moe.backends.torch.generation import holds_copies
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.modules.engine import stock_class
from hf_neuron_moe.patching.apply import PlanItem, Request, all_slots
from hf_neuron_moe.patching.discovery import EXPERTS, Candidate
from hf_neuron_moe.patching.preconditions import passed_by
from hf_neuron_moe.patching.report import PATCHED, REFUSED, SKIPPED, PatchEntry
from hf_neuron_moe.precision_map import precision_of

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
        if reason is None:
            item = _plan_item(candidate, config)
            reason = next(_reasons(item, around), None)
            if reason is None:
                plan.append(item)
                entries.append(_patched_entry(item))
                continue
        entries.append(replace(_entry(candidate, SKIPPED if skipped else REFUSED), reason=reason))
    return plan, tuple(entries)


def wrapped_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules to which an adapter is attached."""
    return {key for key, slots in all_slots(model).items() if any(attr == "base_layer" for _, attr in slots)}


def _skip_reason(candidate: Candidate, include: tuple[str, ...], exclude: tuple[str, ...]) -> str | None:
    names = (candidate.name, *candidate.aliases)
    for glob in exclude:
        if fnmatch.filter(names, glob):
            return f"excluded by {glob!r}"
    if include and not any(fnmatch.filter(names, glob) for glob in include):
        return f"not matched by include={', '.join(map(repr, include))}"
    return None


def _plan_item(candidate: Candidate, config: NeuronMoEConfig) -> PlanItem:
    """Resolve precision, backend and weight layout for one candidate; its activation policy is still the default.

    Where the backend does not support it, the item says so, or, with ``fallback="torch"``, has PyTorch as its backend.
    """
    backend = resolve_backend(config.backend, _device(candidate))
    kernels = get_backend(backend)
    fixed = candidate.sharded or (candidate.form is not None and candidate.form.stock_only is not None)
    preferred = "stock" if fixed else kernels.default_layout
    layout = preferred if config.weights == "auto" else config.weights
    precision = precision_of(config.precision, (candidate.name, *candidate.aliases))
    resolved = replace(config, precision=precision, backend=backend, weights=layout, activations="minimal")
    spec = BlockSpec(precision, config.block_size, gate=candidate.gate)
    support = kernels.support(block_shape(candidate, layout), spec)
    if config.fallback != "torch":
        return PlanItem(candidate, resolved, support._replace(most_tokens=None))
    if support.reason is not None:
        default = "stock" if fixed else get_backend(config.fallback).default_layout
        layout = default if config.weights == "auto" else config.weights
        return PlanItem(candidate, replace(resolved, backend=config.fallback, weights=layout), fallback=support.reason)
    if support.most_tokens is not None:
        long = f"calls of more than {support.most_tokens:,} tokens run on torch"
        support = support._replace(notes=(long, *support.notes))
    return PlanItem(candidate, resolved, support)


def _device(candidate: Candidate) -> torch.device:
    """Where the block is; a meta module goes to the CPU, where transformers materializes it by default."""
    device = next(iter(candidate.module.parameters())).device
    return torch.device("cpu") if device.type == "meta" else device


def block_shape(candidate: Candidate, layout: str) -> BlockShape:
    """Return what a backend is told of a candidate that can be patched, with its weights in this layout."""
    experts, hidden, inner = candidate.local_sizes
    assert hidden is not None and inner is not None, "a block of unknown sizes is refused before"
    roles = candidate.roles
    form, biased = candidate.form, (False, False)
    if roles is None:
        ordered = (form is not None and form.ordered) or layout == "kernel"
        biased = (form is not None and form.biased,) * 2
    else:
        ordered = roles.gate_first and (len(roles.inputs) == 1 or layout == "kernel")
        biased = (bool({*roles.inputs} & {*roles.biased}), roles.down in roles.biased)
    weights = [getattr(*stock_slot(candidate.module, name)) for rule in candidate.rules for name in rule.stock]
    top_k, frozen = None if experts is None else candidate.top_k, not any(weight.requires_grad for weight in weights)
    return BlockShape(candidate.kind, hidden, inner, experts, top_k, ordered, weights[0].dtype, biased, frozen)


def _reasons(item: PlanItem, around: _Surroundings) -> Iterator[str]:
    """Yield why a block stays stock whose code the kernels could stand in for; the first counts."""
    candidate = item.candidate
    if candidate.module is around.model:
        yield "it is the model itself; pass the module that contains it"
    if item.support.reason is not None:
        yield f"{item.support.reason}; fallback='torch' computes it without the kernels"
    if item.config.weights != "stock":
        yield from _layout_reasons(candidate, around)
    if candidate.kind == EXPERTS and id(candidate.module) in around.left_out:
        yield "a forward put on the module around it does not call it; delete that (`del block.forward`)"


def _layout_reasons(candidate: Candidate, around: _Surroundings) -> Iterator[str]:
    """Yield why its weights cannot have the kernels' layout."""
    if candidate.sharded:
        yield "its weights were sharded while loading, by their stock shapes; use weights='stock'"
    if candidate.form is not None and candidate.form.stock_only is not None:
        yield f"{candidate.form.stock_only}; use weights='stock'"
        return
    if id(candidate.module) in around.wrapped:
        yield "an adapter made for the stock layout is attached to it; patch before attaching, or use weights='stock'"
    for child in candidate.module.modules():
        if any(getattr(child, kind) for kind in _STATE_HOOKS):
            hooked = type(child).__name__
            yield f"{hooked} has state_dict hooks, which would meet the kernel layout; use weights='stock'"
    for rule in candidate.rules:
        slots = [stock_slot(candidate.module, name) for name in rule.stock]
        params: list[nn.Parameter] = [getattr(*slot) for slot in slots]
        layers = [owner for owner, _ in slots if owner is not candidate.module]
        if len({param.requires_grad for param in params}) == 2:
            yield f"{' and '.join(rule.stock)} become one parameter, but only one is frozen; use weights='stock'"
        if rule.keeps_layout:
            continue
        if any(around.uses[id(used)] > 1 for used in (*params, *layers)):
            yield f"{rule.stock[0]} is tied to another module's parameter; use weights='stock'"
        if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params):
            yield f"{rule.stock[0]} has tensor hooks, which another layout cannot keep; use weights='stock'"


def _entry(candidate: Candidate, status: str) -> PatchEntry:
    E, H, I = candidate.sizes  # noqa: E741
    return PatchEntry(
        name=candidate.name,
        aliases=candidate.aliases,
        kind=candidate.kind,
        class_name=stock_class(candidate.module).__name__,
        status=status,
        experts=E,
        hidden_size=H,
        intermediate_size=I,
        gated=candidate.gated,
        one_by_one=candidate.name.rpartition(".")[0] if candidate.listed else "",
    )


def _quantized_bytes(item: PlanItem) -> int:
    """Bytes of one block's weights as bf16 operands, contraction axes padded to whole MX groups."""
    E, H, I = (size or 0 for size in item.candidate.sizes)  # noqa: E741
    return 2 * (E or 1) * (item.candidate.gate.halves * I * padded_size(H) + H * padded_size(I))


def _patched_entry(item: PlanItem) -> PatchEntry:
    config, support, listed = item.config, item.support, item.candidate.listed
    notes = (*item.candidate.part, *support.notes)
    note = (
        f"one of {listed} MLPs of a list: if these are experts, each is computed as a dense block: {listed} calls in "
        "place of one, without the experts kernels and without routing replay"
    )
    device = _device(item.candidate)
    return replace(
        _entry(item.candidate, PATCHED),
        precision=config.precision,
        gate=item.candidate.gate.short,
        weights=config.weights,
        backend=config.backend,
        fallback=item.fallback,
        weight_copy_bytes=support.weight_copy_bytes,
        notes=(*notes, note) if listed else notes,
        kernel_sizes=support.kernel_sizes,
        products=get_backend(config.backend).describe_products(
            config.precision, device, block_shape(item.candidate, config.weights)
        ),
        generation_bytes=_quantized_bytes(item) if holds_copies(config.backend, config.precision, device) else 0,
    )
