"""Changes to blocks that are in place already: activation policy, backend of quantized blocks, weights read anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from hf_neuron_moe.activation_policy import Activations, as_activations, canonical_keep
from hf_neuron_moe.backends import drop_weight_copies, get_backend, resolve_backend
from hf_neuron_moe.errors import ConfigError, public, with_article
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.in_place import named_blocks
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.apply import states
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.policies import PlannedBlock, resolve, with_saved_bytes
from hf_neuron_moe.patching.preconditions import check_called, unsupported


@one_at_a_time
@public
def set_activations(model: nn.Module, activations: Activations | Mapping[str, Any]) -> dict[str, str]:
    """Change what the blocks of a patched or loaded model keep for backward; return each block's policy by its name.

    The way to choose a policy for blocks with frozen MX weights, which come patched. The report that ``patch_model``
    gave remains what it was; a second ``patch_model`` call with the new policy returns the present one. `activations`
    is everything that ``NeuronMoEConfig(activations=...)`` takes. Globs match the names that `model` has for its
    blocks; a budget is divided among all of them. Where the policy does not fit the blocks, none is changed.
    """
    names: dict[int, list[str]] = {}
    blocks: dict[int, NeuronBlock] = {}
    for name, block in named_blocks(model, remove_duplicate=False):
        names.setdefault(id(block), []).append(name)
        blocks[id(block)] = block
    if not blocks:
        fix = "Call patch_model(model, NeuronMoEConfig(activations=...))."
        raise unsupported("a model with patched blocks", f"{with_article(type(model).__name__)} without any", fix)
    check_called(model, ((names[key][0], block) for key, block in blocks.items()))
    asked = as_activations(activations)
    planned = [PlannedBlock(tuple(names[key]), block.neuron_shape) for key, block in blocks.items()]
    own = dict(zip(blocks, resolve(asked, planned, list(names.values())), strict=True))
    changes = [
        (block, replace(block.neuron_config, activations=own[key]), canonical_keep(own[key], item.shape.precision))
        for (key, block), item in zip(blocks.items(), planned, strict=True)
    ]
    requests = [(state, replace(state.request[0], activations=asked)) for _, state in states(model)]
    for block, config, keep in changes:
        block.neuron_config, block.neuron_keep = config, keep
    for state, config in requests:
        swapped = [(swap.name, swap.replacement) for swap in state.swaps if id(swap.replacement) in own]
        policies = {name: (block.neuron_shape, own[id(block)]) for name, block in swapped}
        state.report = replace(state.report, config=config, entries=with_saved_bytes(state.report.entries, policies))
        state.request = (config, *state.request[1:])
    return {item.names[0]: str(policy) for item, policy in zip(planned, own.values(), strict=True)}


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
        fallback: ``"refuse"`` or ``"torch"``. The Neuron backend has no backward for frozen weights, so that training
            through such blocks needs ``"torch"`` there.

    Returns:
        By block name, why the backend's kernels cannot compute the block's inference, or None where they can.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedBlock)}
    if not blocks:
        fix = (
            "For other models the backend is chosen when they are patched: "
            "unpatch_model(model), then patch_model(model, NeuronMoEConfig(backend=...))."
        )
        raise unsupported("a model with frozen MX blocks", f"{with_article(type(model).__name__)} without any", fix)
    configs = {name: replace(block.neuron_config, backend=backend, fallback=fallback) for name, block in blocks.items()}
    reasons = {}
    for name, block in blocks.items():
        kernels = get_backend(resolve_backend(backend, block.neuron_stack.gate_up_codes.device))
        reasons[name] = kernels.quantized_support(block.neuron_stack, training=False).reason
    refused = [(name, reason) for name, reason in reasons.items() if reason is not None]
    if refused and fallback != "torch":
        name, reason = refused[0]
        got = f"{backend!r}, which cannot compute {len(refused)} of {len(blocks)}; {name}: {reason}"
        fix = "Use fallback='torch' to compute those with PyTorch on the same device."
        raise ConfigError.about("backend", "one whose kernels compute every frozen block", got, fix)
    for name, block in blocks.items():
        block.neuron_config = configs[name]
        block.neuron_fallbacks_warned.clear()
    return reasons


@public
def refresh_weights(model: nn.Module) -> int:
    """Make the next call of every block read its weights anew, after they were written through ``.data``.

    The Neuron backend keeps copies of weights in its kernels' orientation from a training forward to the optimizer's
    step. They are made again after in-place operations, ``load_state_dict``, an assignment of another tensor to
    ``.data``, a change between training and evaluation mode, and merging of adapters. Every call without a backward
    makes its own. A write *into* ``parameter.data`` between two training calls, with no optimizer step in between,
    advances no version counter: exchanging weights with their running average, clipping them, and the like. Call this
    after such a write. The torch backend keeps quantized copies for generation in mxfp8. It notices writes that change
    a weight everywhere; after a write to single values call this.

    What counts is whose parameters and buffers are below `model`, patched or not, wrapped or not. Returned are the
    bytes of the copies that were dropped; making them again costs one copying of the weights at most.
    """
    if not isinstance(model, nn.Module):
        raise unsupported("a torch.nn.Module", type(model).__name__, "Pass the model that was patched.")
    return drop_weight_copies(chain(model.parameters(), model.buffers()))
