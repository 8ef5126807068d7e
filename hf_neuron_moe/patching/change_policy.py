"""Another activation policy for blocks that are in place already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hf_neuron_moe.activation_policy import ActivationBudget, as_activations, canonical_keep
from hf_neuron_moe.errors import UnsupportedModelError, public
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching.apply import PatchState, states
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.policies import PlannedBlock, noted_policy, resolve
from hf_neuron_moe.patching.present import check_called
from hf_neuron_moe.patching.report import PatchEntry

_WHERE = "set_activations"


@one_at_a_time
@public(_WHERE)
def set_activations(model: nn.Module, activations: Any) -> dict[str, str]:
    """Change what the blocks of a patched or loaded model keep for backward; weights and forward are not touched.

    The way to choose a policy for blocks with frozen MX weights, which come patched. The report that ``patch_model``
    gave remains what it was; a second ``patch_model`` call with the new policy returns the present one.

    Args:
        model: a model with patched blocks.
        activations: everything that ``NeuronMoEConfig(activations=...)`` takes. Globs match the names that `model` has
            for its blocks; a budget is divided among all of them.

    Returns:
        The policy of each block by the block's name.

    Raises:
        UnsupportedModelError: the model has no such block, or a forward that was put on the model goes past one.
        ConfigError: the policy does not fit the blocks; none is changed.
    """
    names: dict[int, list[str]] = {}
    blocks: dict[int, NeuronBlock] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NeuronBlock):
            names.setdefault(id(module), []).append(name)
            blocks[id(module)] = module
    if not blocks:
        raise UnsupportedModelError.about(
            "model",
            "a model with patched blocks",
            f"a {type(model).__name__} without any",
            "Call patch_model(model, NeuronMoEConfig(activations=...)).",
        )
    check_called(model, ((names[key][0], block) for key, block in blocks.items()))
    asked = as_activations(activations)
    planned = [PlannedBlock(tuple(names[key]), block.neuron_shape) for key, block in blocks.items()]
    own = resolve(asked, planned, list(names.values()))
    keeps = [canonical_keep(policy, item.shape.precision) for item, policy in zip(planned, own, strict=True)]
    configs = [
        replace(block.neuron_config, activations=policy) for block, policy in zip(blocks.values(), own, strict=True)
    ]
    requests = [(state, replace(state.request[0], activations=asked)) for _, state in states(model)]
    for block, config, keep in zip(blocks.values(), configs, keeps, strict=True):
        block.neuron_config, block.neuron_keep = config, keep
    for state, request in requests:
        _bring_up_to_date(state, request)
    return {item.names[0]: str(policy) for item, policy in zip(planned, own, strict=True)}


def _bring_up_to_date(state: PatchState, config: Any) -> None:
    present = {swap.name: swap.replacement for swap in state.swaps}

    def entry_now(entry: PatchEntry) -> PatchEntry:
        block = present.get(entry.name)
        if block is None:
            return entry
        policy = block.neuron_config.activations
        assert not isinstance(policy, ActivationBudget), "a block has a policy of its own"
        return noted_policy(entry, block.neuron_shape, policy)

    state.report = replace(state.report, config=config, entries=tuple(map(entry_now, state.report.entries)))
    state.request = (config, *state.request[1:])
