"""Methods of transformers models that an attribute of the instance stands before while a model is patched.

``_init_weights`` is asked for every module: patched blocks are initialised as the stock ones. By
``_set_gradient_checkpointing`` all layers get one checkpoint function whenever checkpointing is switched on (by the
user, the Trainer, peft's wrapper): it gets the replay of :mod:`hf_neuron_moe.patching.routing_replay`. A model that was
sharded while loading cannot be copied: the engine's forwards would compute with the weights of the first model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.modules.stock_init import init_as_stock
from hf_neuron_moe.patching.routing_replay import ReplayingCheckpoint

_INIT = "_init_weights"
_SETTER = "_set_gradient_checkpointing"
_COPY = "__deepcopy__"
_FUNCTION = "_gradient_checkpointing_func"


def cover(model: nn.Module, *, experts: bool, covered: list[tuple[nn.Module, str]]) -> None:
    """Put attributes in front of the methods of the transformers models in `model`, `model` itself included.

    `covered` gets each model and method before that is done, for :func:`uncover`; what is covered already is left out.
    Checkpointing is covered where there are `experts`, and changes where it is switched on already.
    """
    from transformers import PreTrainedModel

    methods = [_INIT, *([_SETTER] if experts else []), *([_COPY] if is_sharded_at_loading(model) else [])]
    for each in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        for method in methods:
            # A setter from before transformers 4.35 takes a value, and gives its layers no function.
            old = method == _SETTER and "value" in inspect.signature(getattr(each, method)).parameters
            if old or _is_covered(each, method):
                continue
            covered.append((each, method))
            # A partial, not a closure: copying or pickling the model takes it along, bound to the copy.
            object.__setattr__(each, method, functools.partial(_COVERS[method], each, each.__dict__.get(method)))
            if method == _SETTER:
                _wrap(each)


def uncover(covered: list[tuple[nn.Module, str]]) -> None:
    """Undo :func:`cover`: layers checkpoint as before, switched on or off as they are now."""
    for model, method in covered:
        if _is_covered(model, method):
            original = model.__dict__[method].args[1]
            if original is None:
                del model.__dict__[method]
            else:
                object.__setattr__(model, method, original)
        for module, function in _checkpointing(model) if method == _SETTER else ():
            if isinstance(function, ReplayingCheckpoint):
                module.__dict__[_FUNCTION] = function.inner


def _is_covered(model: nn.Module, method: str) -> bool:
    found = model.__dict__.get(method)
    return isinstance(found, functools.partial) and found.func is _COVERS[method]


def _init_weights(model: nn.Module, original: Callable[[nn.Module], None] | None, module: nn.Module) -> None:
    init = functools.partial(getattr(type(model), _INIT), model) if original is None else original
    if isinstance(module, NeuronBlock) and not isinstance(module, QuantizedBlock):
        init_as_stock(module, init)
    else:
        init(module)


def _set_and_wrap(model: nn.Module, original: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
    if original is None:
        getattr(type(model), _SETTER)(model, *args, **kwargs)
    else:
        original(*args, **kwargs)
    _wrap(model)


def _refuse_copy(model: nn.Module, original: object, memo: object) -> NoReturn:
    expected, got = "whole, to be copied", "one that transformers sharded while loading it"
    fix = "Call save_pretrained on all ranks, load that folder with the same distributed_config, and patch it."
    raise UnsupportedModelError.about("model", expected, got, fix).named("copy.deepcopy")


_COVERS: dict[str, Callable[..., None]] = {_INIT: _init_weights, _SETTER: _set_and_wrap, _COPY: _refuse_copy}


def routing_replay_stats(model: nn.Module, *, reset: bool = False) -> tuple[int, int]:
    """Count the decisions that activation checkpointing recomputed, and those that replay kept from changing.

    Returned are ``(decisions, changed)`` of a patched `model`, or a wrapper around one, since patching or the last
    `reset`. A decision is one row of one ``topk``: a token makes one per layer in most families, several in
    group-limited ones. Reading waits for the device.
    """
    found = (function for _, function in _checkpointing(model) if isinstance(function, ReplayingCheckpoint))
    stats = list({id(function): function.stats for function in found}.values())
    counts = sum(each.decisions for each in stats), sum(each.total_changed() for each in stats)
    if reset:
        for each in stats:
            each.clear()
    return counts


def _wrap(model: nn.Module) -> None:
    wrappers: dict[int, ReplayingCheckpoint] = {}
    for module, function in _checkpointing(model):
        if not isinstance(function, ReplayingCheckpoint):
            # One for all layers that share a function, as the function itself is one.
            module.__dict__[_FUNCTION] = wrappers.setdefault(id(function), ReplayingCheckpoint(function))


def _checkpointing(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for module in model.modules():
        function = module.__dict__.get(_FUNCTION)
        if function is not None:
            yield module, function
