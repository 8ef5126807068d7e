"""Changes to blocks that are in place already: activation policy, backend of quantized blocks, weights read anew."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from hf_neuron_moe.activation_policy import ActivationBudget, as_activations, canonical_keep
from hf_neuron_moe.backends import drop_weight_copies, get_backend, resolve_backend
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.apply import PatchState, states
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.policies import PlannedBlock, noted_policy, resolve
from hf_neuron_moe.patching.preconditions import check_called, unsupported
from hf_neuron_moe.patching.report import PatchEntry


@one_at_a_time
@public
def set_activations(model: nn.Module, activations: Any) -> dict[str, str]:
    """Change what the blocks of a patched or loaded model keep for backward; weights and forward are not touched.

    The way to choose a policy for blocks with frozen MX weights, which come patched. The report that ``patch_model``
    gave remains what it was; a second ``patch_model`` call with the new policy returns the present one. Where the
    policy does not fit the blocks, none is changed.

    Args:
        model: a model with patched blocks.
        activations: everything that ``NeuronMoEConfig(activations=...)`` takes. Globs match the names that `model` has
            for its blocks; a budget is divided among all of them.

    Returns:
        The policy of each block by the block's name.
    """
    names: dict[int, list[str]] = {}
    blocks: dict[int, NeuronBlock] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NeuronBlock):
            names.setdefault(id(module), []).append(name)
            blocks[id(module)] = module
    if not blocks:
        fix = "Call patch_model(model, NeuronMoEConfig(activations=...))."
        raise unsupported("a model with patched blocks", f"a {type(model).__name__} without any", fix)
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


@one_at_a_time
@public
def set_backend(model: nn.Module, backend: str, *, fallback: str = "refuse") -> dict[str, str | None]:
    """Choose what computes the frozen MX blocks of a loaded conversion; their weights are not touched.

    ``from_pretrained`` makes them with ``backend="torch"``. Trainable blocks have the backend that ``patch_model`` was
    given, and keep it. An error changes nothing.

    Args:
        model: what ``from_pretrained`` made of a checkpoint that ``hf-neuron-moe convert`` wrote in MX; wrappers such
            as PEFT's around it are fine.
        backend: as in ``NeuronMoEConfig``.
        fallback: as in ``NeuronMoEConfig``: ``"refuse"`` or ``"torch"``. The Neuron backend has no backward for frozen
            weights, so that training through such blocks needs ``"torch"`` there.

    Returns:
        By block name, why the backend's kernels cannot compute the block's inference, or None where they can.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedBlock)}
    if not blocks:
        fix = (
            "For other models the backend is chosen when they are patched: "
            "unpatch_model(model), then patch_model(model, NeuronMoEConfig(backend=...))."
        )
        raise unsupported("a model with frozen MX blocks", f"a {type(model).__name__} without any", fix)
    configs = {name: replace(block.neuron_config, backend=backend, fallback=fallback) for name, block in blocks.items()}
    reasons = {name: _unsupported_reason(block, backend) for name, block in blocks.items()}
    refused = [(name, reason) for name, reason in reasons.items() if reason is not None]
    if refused and fallback != "torch":
        name, reason = refused[0]
        raise ConfigError.about(
            "backend",
            "one whose kernels compute every frozen block",
            f"{backend!r}, which cannot compute {len(refused)} of {len(blocks)}; {name}: {reason}",
            "Use fallback='torch' to compute those with PyTorch on the same device.",
        )
    for name, block in blocks.items():
        block.neuron_config = configs[name]
        block.neuron_fallbacks_warned.clear()
    return reasons


def _unsupported_reason(block: QuantizedBlock, backend: str) -> str | None:
    stack = block.neuron_stack
    name = resolve_backend(backend, stack.gate_up_codes.device)
    return get_backend(name).quantized_support(stack, training=False).reason


@public
def refresh_weights(model: nn.Module) -> int:
    """Make the next call of every block read its weights anew, after they were written through ``.data``.

    The Neuron backend keeps copies of weights in its kernels' orientation from a training forward to the optimizer's
    step. They are made again after in-place operations, ``load_state_dict``, an assignment of another tensor to
    ``.data``, a change between training and evaluation mode, merging of adapters, and in every call without a backward.
    A write *into* ``parameter.data`` between two training calls, with no optimizer step in between, advances no version
    counter: exchanging weights with their running average, clipping them, and the like. Call this after such a write.
    It costs one copying of the weights at most. The torch backend keeps quantized copies for generation in mxfp8. It
    notices writes that change a weight everywhere; after a write to single values call this.

    Args:
        model: patched or not, wrapped or not: what counts is whose parameters and buffers are below it.

    Returns:
        Bytes of the copies that were dropped.
    """
    if not isinstance(model, nn.Module):
        raise unsupported("a torch.nn.Module", type(model).__name__, "Pass the model that was patched.")
    return drop_weight_copies(chain(model.parameters(), model.buffers()))
