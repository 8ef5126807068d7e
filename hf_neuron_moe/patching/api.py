"""``patch_model`` and ``unpatch_model``: discover, plan, apply, report, undo."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hf_neuron_moe.backends.operator_registration import register_again
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, public
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.patching.apply import PatchState, PlanItem, all_slots, apply_plan, states, undo_patch
from hf_neuron_moe.patching.discovery import EXPERTS, Candidate, discover
from hf_neuron_moe.patching.globs import check_globs
from hf_neuron_moe.patching.guards import check_model
from hf_neuron_moe.patching.kernels import plan_item, products_of
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.option_names import with_checked_names
from hf_neuron_moe.patching.outcome import check_outcome
from hf_neuron_moe.patching.policies import with_policies
from hf_neuron_moe.patching.present import (
    changed,
    check_called,
    check_not_patched_elsewhere,
    check_patched_here,
    displaced,
    inner_model,
    original_name,
    passed_by,
    warn_of_lost_forwards,
)
from hf_neuron_moe.patching.report import PATCHED, REFUSED, SKIPPED, PatchEntry, PatchReport, merged

_WHERE = "patch_model"

_Request = tuple[NeuronMoEConfig, tuple[str, ...], tuple[str, ...]]
"""Config, include and exclude as asked for."""


@with_checked_names
@one_at_a_time
@public(_WHERE)
def patch_model(
    model: nn.Module,
    config: NeuronMoEConfig | Mapping[str, Any] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
) -> PatchReport:
    """Replace the SwiGLU MLPs and experts of `model` by blocks with the Neuron kernels' numbers, in place.

    The rest of the model is not touched. Parameters, hooks, train/eval mode, tied and frozen weights survive;
    ``state_dict``, ``save_pretrained`` and ``Trainer`` see the original names and layouts. Patch before the optimizer
    is created if the weights move to the kernel layout. Calling it again with the same arguments changes nothing.
    Calls from several threads wait for each other.

    Args:
        model: a model with whole, unquantized weights. A model inside peft's wrapper is fine.
        config: a :class:`NeuronMoEConfig`, a mapping of its options, or None for the defaults.
        include: glob or globs over module names; only these are patched.
        exclude: glob or globs over module names that are left alone; none of them leave none alone.
        strict: raise an error if a gated block that is not excluded cannot be patched. With False, such blocks stay
            stock and the report says why. Blocks without a gate (the MLPs of most vision encoders) stay stock in either
            case. So does a model none of whose blocks can be patched: it is an error.

    Returns:
        The report: every candidate as patched, skipped or refused with the reason.

    Raises:
        ConfigError: an argument, option or glob is unknown or of the wrong type.
        UnsupportedModelError: the model as a whole cannot be patched, `strict` meets a refused block, or the model is
            already patched with other arguments, in part, through another object, or had patched blocks exchanged.
        NothingToPatchError: no block can be patched.
        BackendUnavailableError: the backend cannot run here.
    """
    request = (_as_config(config), _globs("include", include), _globs("exclude", exclude))
    if not isinstance(strict, bool):
        raise _bad_option("strict", "a bool", strict)
    check_model(model)
    home, prefix = inner_model(model)
    for holder, state in states(home):
        if holder is home:
            return _repeated(home, state, request, strict)
    check_not_patched_elsewhere(model, home)
    config_asked, include_globs, exclude_globs = request
    candidates = discover(home, prefix)
    blocks = [(candidate.name, *candidate.aliases) for candidate in candidates]
    check_globs("include", include_globs, blocks)
    check_globs("exclude", exclude_globs, blocks)
    plan, entries = _plan(home, candidates, request)
    plan, entries = with_policies(plan, entries, config_asked, blocks)
    report = PatchReport(config_asked, entries)
    check_outcome(model, report, strict)
    apply_plan(home, plan, PatchState(report, request, prefix))
    return report


@one_at_a_time
@public
def unpatch_model(model: nn.Module) -> PatchReport:
    """Put the original modules back, with the weights' present values, in place.

    Module objects, parameter objects, hooks and layouts are the original ones; after an untouched patch they are bit
    for bit what they were. A forward that was put on a patched block is dropped with a warning. A second call is
    refused, since nothing is patched any more; it changes nothing.

    Args:
        model: a patched model, an adapter's wrapper around one, or a module that holds several.

    Returns:
        The report of the patch that was undone: the one that ``patch_model`` returned. Where `model` holds several
        separately patched models, one report with the entries of all, named as `model` names them; its ``parts`` hold
        the single reports.

    Raises:
        UnsupportedModelError: the model is not patched (any more), was patched through an outer or another object, or
            an adapter holds on to a block in kernel layout.
    """
    found = list(states(model)) if isinstance(model, nn.Module) else []
    if not found:
        check_patched_here(model)
    for holder, state in found:
        wrapped = _wrapped(holder)
        for swap in state.swaps:
            if id(swap.replacement) in wrapped and swap.replacement.neuron_config.weights == "kernel":
                raise UnsupportedModelError.about(
                    swap.name,
                    "free of adapters while its weights are in kernel layout",
                    "a block that an adapter is attached to",
                    "Call merge_and_unload() or unload() on the peft model first.",
                )
    report = _report_of(model, found)
    warn_of_lost_forwards([swap for _, state in found for swap in state.swaps])
    for holder, state in found:
        undo_patch(holder, state)
    return report


def _report_of(model: nn.Module, found: list[tuple[nn.Module, PatchState]]) -> PatchReport:
    """The one report, or all of them under the names that `model` has for their parts."""
    if len(found) == 1:
        return found[0][1].report
    names = {id(module): name for name, module in model.named_modules()}
    parts = {}
    for holder, state in found:
        # The entries' own names begin with the way from an adapter's wrapper to the patched model inside.
        part = names[id(holder)].removesuffix(state.prefix).removesuffix(".")
        parts[part] = state.report
    return merged(parts)


def _plan(
    model: nn.Module, candidates: list[Candidate], request: _Request
) -> tuple[list[PlanItem], tuple[PatchEntry, ...]]:
    """Decide about every candidate; nothing is changed."""
    config, include, exclude = request
    register_again()
    # Of parameters, and of the layers that own them: tied are two blocks that have one of either in common.
    uses = Counter(
        id(used) for module in model.modules() for used in (*module._parameters.values(), *module._modules.values())
    )
    left_out, wrapped = passed_by(model), _wrapped(model)
    plan: list[PlanItem] = []
    entries: list[PatchEntry] = []
    for candidate in candidates:
        skipped = _skip_reason(candidate, include, exclude)
        item = None if skipped or candidate.reason else plan_item(candidate, config)
        reason = skipped or candidate.reason or _why_not_home(model, candidate, item, uses, wrapped)
        if reason is None and candidate.kind == EXPERTS and id(candidate.module) in left_out:
            reason = "a forward put on the module around it does not call it; delete that (`del block.forward`)"
        if item is not None and reason is None:
            plan.append(item)
        entries.append(_entry(candidate, SKIPPED if skipped else REFUSED, reason, item))
    return plan, tuple(entries)


def _as_config(config: Any) -> NeuronMoEConfig:
    if config is None:
        return NeuronMoEConfig()
    if isinstance(config, NeuronMoEConfig):
        return config
    if isinstance(config, Mapping):
        return NeuronMoEConfig.from_dict(config)
    raise _bad_option("config", "a NeuronMoEConfig, a mapping of its options or None", config)


def _globs(argument: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, Sequence | set | frozenset) or not all(isinstance(glob, str) for glob in globs):
        raise _bad_option(argument, "a glob over module names or a list of them", value)
    if not globs and argument == "include":  # only what matches is patched, which would be nothing
        raise _bad_option(argument, "None or at least one glob", value)
    return tuple(sorted(set(globs)))


@public(_WHERE)
def _bad_option(argument: str, expected: str, value: object) -> ConfigError:
    is_model = isinstance(value, nn.Module)  # whose text is one line per layer
    error = ConfigError.about(
        argument,
        expected,
        f"a {type(value).__name__}" if is_model else f"{value!r} ({type(value).__name__})",
        "The model comes first: patch_model(model, config)."
        if is_model and argument == "config"
        else "See help(hf_neuron_moe.patch_model).",
    )
    assert isinstance(error, ConfigError)
    return error


def _skip_reason(candidate: Candidate, include: tuple[str, ...], exclude: tuple[str, ...]) -> str | None:
    names = (candidate.name, *candidate.aliases)
    for glob in exclude:
        if fnmatch.filter(names, glob):
            return f"excluded by {glob!r}"
    if include and not any(fnmatch.filter(names, glob) for glob in include):
        return f"not matched by include={', '.join(map(repr, include))}"
    return None


def _wrapped(model: nn.Module) -> set[int]:
    """Return the ids of the modules to which an adapter is attached."""
    return {key for key, slots in all_slots(model).items() if any(attr == "base_layer" for _, attr in slots)}


def _why_not_home(
    model: nn.Module, candidate: Candidate, item: PlanItem | None, uses: Counter[int], wrapped: set[int]
) -> str | None:
    """Why the candidate cannot be replaced in this model, or cannot have its weights in the wanted layout."""
    if candidate.module is model:
        return "it is the model itself; pass the module that contains it"
    if item is not None and item.refusal is not None:
        return f"{item.refusal}; fallback='torch' computes it without the kernels"
    if item is None or item.config.weights == "stock":
        return None
    if id(candidate.module) in wrapped:
        return "an adapter made for the stock layout is attached to it; patch before attaching, or use weights='stock'"
    hooked = [child for child in candidate.module.modules() if _has_state_hooks(child)]
    if hooked:
        return (
            f"{type(hooked[0]).__name__} has state_dict hooks, which would meet the kernel layout; use weights='stock'"
        )
    for rule in candidate.rules:
        slots = [stock_slot(candidate.module, name) for name in rule.stock]
        params = [getattr(*slot) for slot in slots]
        if len({param.requires_grad for param in params}) > 1:
            return f"{' and '.join(rule.stock)} become one parameter, but only one is frozen; use weights='stock'"
        if rule.keeps_layout:
            continue
        layers = [layer for layer, _ in slots if layer is not candidate.module]
        if any(uses[id(used)] > 1 for used in (*params, *layers)):
            return f"{rule.stock[0]} is tied to another module's parameter; use weights='stock'"
        if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params):
            return f"{rule.stock[0]} has tensor hooks, which another layout cannot keep; use weights='stock'"
    return None


def _has_state_hooks(module: nn.Module) -> bool:
    kinds = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _entry(candidate: Candidate, otherwise: str, reason: str | None, item: PlanItem | None) -> PatchEntry:
    E, H, I = candidate.sizes  # noqa: E741
    patched = reason is None and item is not None
    return PatchEntry(
        name=candidate.name,
        aliases=candidate.aliases,
        kind=candidate.kind,
        class_name=type(candidate.module).__name__,
        status=PATCHED if patched else otherwise,
        reason=reason or "",
        experts=E,
        hidden_size=H,
        intermediate_size=I,
        weights=item.config.weights if item is not None and patched else None,
        backend=item.config.backend if item is not None and patched else None,
        fallback=item.fallback if item is not None and patched else "",
        weight_copy_bytes=item.weight_copy_bytes if item is not None and patched else 0,
        notes=(*item.notes, *_list_note(candidate)) if item is not None and patched else (),
        kernel_sizes=item.kernel_sizes if item is not None and patched else None,
        gated=candidate.gated,
        products=products_of(candidate, item.config) if item is not None and patched else "",
    )


def _list_note(candidate: Candidate) -> tuple[str, ...]:
    if not candidate.listed:
        return ()
    return (
        f"one of {candidate.listed} MLPs of a ModuleList: if these are experts, each is computed as a dense block, "
        "without the experts kernels and without routing replay",
    )


@public(_WHERE)
def _repeated(home: nn.Module, state: PatchState, request: _Request, strict: bool) -> PatchReport:
    """Answer a second call: the first one's report, if it is still the truth about the model."""
    if state.request != request:
        differing = [
            f"{name}={theirs!r} instead of {ours!r}"
            for name, ours, theirs in zip(("config", "include", "exclude"), state.request, request)
            if ours != theirs
        ]
        raise changed("unpatched, or patched with the same arguments", f"a patched model and {'; '.join(differing)}")
    lost = displaced(home, state)
    if lost:
        raise changed("as patch_model left it", f"a model whose patched blocks were exchanged: {', '.join(lost)}")
    check_called(home, ((swap.name, swap.replacement) for swap in state.swaps))
    candidates = [
        replace(found, name=original_name(found.name), aliases=tuple(map(original_name, found.aliases)))
        for found in discover(home, state.prefix)
    ]
    known = {name for entry in state.report.entries for name in (entry.name, *entry.aliases)}
    _, entries = _plan(home, candidates, request)
    added = [e.name for e in entries if e.status == PATCHED or (e.status == REFUSED and e.name not in known)]
    if added:
        raise changed("as patch_model left it", f"a patched model with further blocks: {', '.join(added)}")
    check_outcome(home, state.report, strict)
    return state.report
