"""``patch_model`` and ``unpatch_model``: discover, plan, apply, report, undo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

from torch import nn

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, known_names, public, with_article
from hf_neuron_moe.modules.engine import has_stages, is_sharded_at_loading
from hf_neuron_moe.patching.apply import PatchState, PlanItem, Request, apply_plan, report_of, states, undo_patch
from hf_neuron_moe.patching.discovery import Candidate, discover
from hf_neuron_moe.patching.globs import check_globs
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.planning import plan_patch, wrapped_modules
from hf_neuron_moe.patching.policies import with_policies
from hf_neuron_moe.patching.preconditions import (
    changed,
    check_called,
    check_model,
    check_no_global_hooks,
    check_not_patched_elsewhere,
    check_outcome,
    inner_model,
    not_patched_here,
    warn_of_lost_forwards,
)
from hf_neuron_moe.patching.ranks import APART_SECONDS, OneAnswer, facts_of, stand_apart
from hf_neuron_moe.patching.report import PATCHED, REFUSED, PatchReport
from hf_neuron_moe.precision_map import PrecisionMap


@known_names("patch_model", options=[field.name for field in fields(NeuronMoEConfig)])
@one_at_a_time
@public
def patch_model(
    model: nn.Module,
    config: NeuronMoEConfig | Mapping[str, Any] | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
) -> PatchReport:
    """Replace the SwiGLU MLPs and experts of `model` by blocks with the Neuron kernels' numerics, in place.

    The rest of the model is not touched. Parameters, hooks, train/eval mode, tied and frozen weights survive;
    ``state_dict``, ``save_pretrained`` and ``Trainer`` see the original names and layouts. Patch before the optimizer
    is created if the weights move to the kernel layout. Calling it again with the same arguments changes nothing.
    Calls from several threads wait for each other.

    Args:
        model: a model with whole, unquantized weights. A model inside peft's wrapper is fine.
        config: a :class:`NeuronMoEConfig`, a mapping of its options, or None for the defaults.
        include: glob or globs over module names; only these are patched.
        exclude: glob or globs over module names that are left alone; none of them leave none alone.
        strict: raise UnsupportedModelError if a gated block that is not excluded cannot be patched. With False, such
            blocks stay stock and the report says why. Blocks without a gate (the MLPs of most vision encoders) stay
            stock in either case. A model none of whose blocks can be patched is a NothingToPatchError in either case.

    Returns:
        The report: every candidate as patched, skipped or refused with the reason.
    """
    together = isinstance(model, nn.Module) and is_sharded_at_loading(model)
    if together:  # whose collectives would wait for a rank that patches otherwise
        with OneAnswer(apart=APART_SECONDS) as facts:
            home, plan, state = _planned(model, config, include, exclude, strict)
            facts |= facts_of(state.report, sharded=True, same_blocks=not has_stages(home))
    else:
        stand_apart()
        home, plan, state = _planned(model, config, include, exclude, strict)
    if plan:
        apply_plan(home, plan, state, OneAnswer() if together else nullcontext())
    return state.report


def _planned(
    model: Any, config: object, include: object, exclude: object, strict: object
) -> tuple[nn.Module, list[PlanItem], PatchState]:
    """Decide about every block, changing nothing; the plan is empty where the model is as asked for already."""
    request = (as_config(config), _globs("include", include), _globs("exclude", exclude))
    if not isinstance(strict, bool):
        raise _bad_option("strict", "a bool", strict)
    check_model(model)
    home, prefix = inner_model(model)
    for holder, state in states(home):
        if holder is home:
            _check_repeated(home, state, request, strict)
            return home, [], state
    check_not_patched_elsewhere(model, home)
    check_no_global_hooks()
    config_asked, include_globs, exclude_globs = request
    candidates = discover(home, prefix)
    blocks = [(candidate.name, *candidate.aliases) for candidate in candidates]
    check_globs("include", include_globs, blocks)
    check_globs("exclude", exclude_globs, blocks)
    if isinstance(config_asked.precision, PrecisionMap):
        check_globs("precision", config_asked.precision.globs, blocks)
    plan, entries = plan_patch(home, candidates, request)
    plan, entries = with_policies(plan, entries, config_asked, blocks)
    report = PatchReport(config_asked, entries)
    check_outcome(model, report, strict)
    return home, plan, PatchState(report, request, prefix)


@one_at_a_time
@public
def unpatch_model(model: nn.Module) -> PatchReport:
    """Put the original modules back, with the weights' present values, in place.

    Module objects, parameter objects, hooks and layouts are the original ones; after an untouched patch they are bit
    for bit what they were. A forward that was put on a patched block is dropped with a warning. A second call raises.

    `model` is a patched model, an adapter's wrapper around one, or a module that holds several. Returned is the report
    that ``patch_model`` returned; of several models, one report with the entries of all, named as `model` names them,
    whose ``parts`` hold the single reports.
    """
    found = list(states(model)) if isinstance(model, nn.Module) else []
    if not found:
        raise not_patched_here(model)
    for holder, state in found:
        wrapped = wrapped_modules(holder)
        for swap in state.swaps:
            if id(swap.replacement) in wrapped and swap.replacement.neuron_config.weights == "kernel":
                expected = "free of adapters while its weights are in kernel layout"
                fix = "Call merge_and_unload() or unload() on the peft model first."
                raise UnsupportedModelError.about(swap.name, expected, "a block that an adapter is attached to", fix)
    report = report_of(model)
    assert report is not None
    warn_of_lost_forwards([swap for _, state in found for swap in state.swaps])
    for holder, state in found:
        undo_patch(holder, state)
    return report


def as_config(config: object) -> NeuronMoEConfig:
    """Return the options that were given in one of the ways that patch_model takes them."""
    if isinstance(config, NeuronMoEConfig):
        return config
    if config is None or isinstance(config, Mapping):
        return NeuronMoEConfig.from_dict(config or {})
    raise _bad_option("config", "a NeuronMoEConfig, a mapping of its options or None", config)


def _globs(argument: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, Sequence | set | frozenset) or not all(isinstance(glob, str) for glob in globs):
        raise _bad_option(argument, "a glob over module names or a list of them", value)
    if not globs and argument == "include":  # only what matches is patched, which would be nothing
        raise _bad_option(argument, "None or at least one glob", value)
    return tuple(sorted(set(globs)))


def _bad_option(argument: str, expected: str, value: object) -> ConfigError:
    is_model = isinstance(value, nn.Module)  # whose text is one line per layer
    got = with_article(type(value).__name__) if is_model else f"{value!r} ({type(value).__name__})"
    fix = "See help(hf_neuron_moe.patch_model)."
    if is_model and argument == "config":
        fix = "The model comes first: patch_model(model, config)."
    return ConfigError.about(argument, expected, got, fix)


def _check_repeated(home: nn.Module, state: PatchState, request: Request, strict: bool) -> None:
    """Raise for a second call unless the first one's report is still the truth about the model."""
    if request[0].weights == "auto":  # which leaves the layout open: that of the model
        request = (replace(request[0], weights=state.request[0].weights), *request[1:])
    if state.request != request:
        first, second = (
            vars(config) | {"include": inc, "exclude": exc} for config, inc, exc in (state.request, request)
        )
        differing = [
            f"{name}={second[name]!r} instead of {first[name]!r}" for name in first if first[name] != second[name]
        ]
        got = f"one that was patched before, or loaded as a conversion, and {'; '.join(differing)}"
        raise changed("unpatched, or patched with the same arguments", got)
    present = Counter(id(child) for module in home.modules() for child in module._modules.values())
    lost = [swap.name for swap in state.swaps if present[id(swap.replacement)] < swap.places or not swap.is_there]
    if lost:
        raise changed("as patch_model left it", f"a model whose patched blocks were exchanged: {', '.join(lost)}")
    check_called(home, ((swap.name, swap.replacement) for swap in state.swaps))
    candidates = [_without_adapters(candidate) for candidate in discover(home, state.prefix)]
    known = {name for entry in state.report.entries for name in (entry.name, *entry.aliases)}
    _, entries = plan_patch(home, candidates, request)
    added = [e.name for e in entries if e.status == PATCHED or (e.status == REFUSED and e.name not in known)]
    if added:
        raise changed("as patch_model left it", f"a patched model with further blocks: {', '.join(added)}")
    check_outcome(home, state.report, strict)


def _without_adapters(candidate: Candidate) -> Candidate:
    """Leave out the levels that adapters put into names, between a module and its parent."""
    name, *aliases = (name.replace(".base_layer", "") for name in (candidate.name, *candidate.aliases))
    return replace(candidate, name=name, aliases=tuple(aliases))
