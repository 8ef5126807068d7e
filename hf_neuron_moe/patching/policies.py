"""Which activation policy each planned block gets, from presets, globs and budgets."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_neuron_moe.activation_policy import (
    ActivationBudget,
    ActivationPolicy,
    Activations,
    BlockActivations,
    canonical_keep,
    keep_strings,
    parse_keep,
    preset_keeps,
)
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules.experts import experts_shape
from hf_neuron_moe.modules.saved_bytes import (
    SavedBlock,
    recomputed_flops,
    saved_bytes,
    saved_bytes_of_call,
    saved_bytes_per_call,
)
from hf_neuron_moe.patching.apply import PlanItem
from hf_neuron_moe.patching.budget import Option, cheapest_plan
from hf_neuron_moe.patching.globs import check_globs
from hf_neuron_moe.patching.report import PatchEntry


@dataclass(frozen=True)
class PlannedBlock:
    """A block that is to get a policy."""

    names: tuple[str, ...]
    shape: SavedBlock


def with_policies(
    plan: Sequence[PlanItem], entries: Sequence[PatchEntry], config: NeuronMoEConfig, known: Sequence[Sequence[str]]
) -> tuple[list[PlanItem], tuple[PatchEntry, ...]]:
    """Give every planned block and its entry the block's own policy; `known` are the names of every block."""
    blocks = [PlannedBlock((item.candidate.name, *item.candidate.aliases), _shape(item)) for item in plan]
    own = resolve(config.activations, blocks, known)
    resolved = []
    policies = {}
    for item, block, policy in zip(plan, blocks, own, strict=True):
        resolved.append(replace(item, config=replace(item.config, activations=policy)))
        policies[block.names[0]] = (block.shape, policy)
    return resolved, with_saved_bytes(entries, policies)


def with_saved_bytes(
    entries: Sequence[PatchEntry], policies: Mapping[str, tuple[SavedBlock, BlockActivations]]
) -> tuple[PatchEntry, ...]:
    """Return the entries, those named in `policies` with their policy and what the block keeps with it."""
    return tuple(_noted(entry, *policies[entry.name]) if entry.name in policies else entry for entry in entries)


def _noted(entry: PatchEntry, shape: SavedBlock, policy: BlockActivations) -> PatchEntry:
    keep = canonical_keep(policy, shape.precision)
    saved, per_call = saved_bytes(shape, keep), saved_bytes_per_call(shape, keep)
    if math.isnan(saved):
        return replace(entry, activations=str(policy), saved_bytes_per_token=None, saved_bytes_per_call=0.0)
    return replace(entry, activations=str(policy), saved_bytes_per_token=saved, saved_bytes_per_call=per_call)


def _shape(item: PlanItem) -> SavedBlock:
    candidate, config = item.candidate, item.config
    if candidate.form is not None:
        return experts_shape(candidate.module, candidate.form, config, candidate.top_k or 0)
    _, hidden, inner = candidate.local_sizes
    assert hidden is not None and inner is not None, "a block of unknown sizes is refused"
    return SavedBlock(config.precision, hidden, inner, None, config.backend, gate=candidate.gate)


def resolve(
    activations: Activations, blocks: Sequence[PlannedBlock], known: Sequence[Sequence[str]]
) -> list[BlockActivations]:
    """Return each block's own policy: a preset's name, or a policy without exceptions.

    `known` are the names of every block of the model, which globs have to match.
    """
    if isinstance(activations, ActivationBudget):
        return _solve(activations, blocks)
    if isinstance(activations, str) or not activations.modules:
        return [activations] * len(blocks)
    exceptions = {glob: _plain(policy) for glob, policy in activations.modules}
    check_globs("activations.modules", list(exceptions), known)
    rest = _plain(ActivationPolicy(keep=activations.keep, storage=activations.storage))
    own = []
    for block in blocks:
        matching = [glob for glob in exceptions if fnmatch.filter(block.names, glob)]
        if len(matching) > 1:
            expected = "made of globs of which at most one matches a block"
            got = f"{' and '.join(map(repr, matching))}, which both match {block.names[0]!r}"
            raise ConfigError.about("activations.modules", expected, got, "Make one of them narrower.")
        own.append(exceptions[matching[0]] if matching else rest)
    return own


def _plain(policy: BlockActivations) -> BlockActivations:
    """A preset by its name, however it was written."""
    return policy.keep if isinstance(policy, ActivationPolicy) and isinstance(policy.keep, str) else policy


def _solve(budget: ActivationBudget, blocks: Sequence[PlannedBlock]) -> list[BlockActivations]:
    for block in blocks:
        if block.shape.top_k == 0:
            expected = "a preset or a policy for a model that does not say how many experts a token has"
            got = f"{budget}, to be divided among blocks such as {block.names[0]!r}"
            fix = "Name the checkpoints instead, for example activations='minimal'."
            raise ConfigError.about("activations", expected, got, fix)
    options = [_options(block.shape, budget) for block in blocks]
    plan = cheapest_plan(options, budget.limit)
    if plan is None:
        floor = sum(min(option.saved for option in choices) for choices in options)
        least = "fp8 or recompute" if budget.allow_fp8 else "recompute"
        raise ConfigError.about(
            "activations",
            f"a budget of at least {floor:.0f} bytes per token ({floor / 1024:.2f}KiB/token), what the "
            f"{len(blocks)} blocks keep when each has the least it can ({least})",
            f"{budget.limit:.0f} bytes per token",
            "Raise the budget, patch fewer blocks (include, exclude), or add gradient checkpointing with "
            "activations='recompute'.",
        )
    return [_as_policy(option.keep, block.shape.precision) for option, block in zip(plan.options, blocks, strict=True)]


def _as_policy(keep: str, precision: str) -> BlockActivations:
    return preset_keeps(precision).get(keep) or ActivationPolicy(keep=keep.split("+"))


def _options(shape: SavedBlock, budget: ActivationBudget) -> list[Option]:
    """Every policy the block could have, presets first, so that they win over equal ones."""

    def saved(keep: str) -> float:
        if budget.tokens is None:
            return saved_bytes(shape, keep)
        return saved_bytes_of_call(shape, keep, budget.tokens) / budget.tokens

    presets = [*preset_keeps(shape.precision)]
    keeps = sorted(keep for keep in keep_strings(shape.precision) if budget.allow_fp8 or not parse_keep(keep).fp8)
    keeps.sort(key=lambda keep: presets.index(keep) if keep in presets else len(presets))
    return [Option(keep, saved(keep), recomputed_flops(shape, keep)) for keep in keeps]
