"""Gives a patched model's activation checkpoints the replay of :mod:`hf_neuron_moe.patching.routing_replay`.

transformers hands one checkpoint function to all layers in ``_set_gradient_checkpointing``, whenever checkpointing is
switched on: by the user, by the Trainer, through peft's wrapper. While a model is patched, an attribute of the instance
stands before that method and wraps what the layers were given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_neuron_moe.patching.routing_replay import ReplayingCheckpoint, ReplayStats

_SETTER = "_set_gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"


def unreplaying_models(model: nn.Module) -> list[nn.Module]:
    """Return the transformers models in `model` that can have replay and do not."""
    from transformers import PreTrainedModel

    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [module for module in models if not _installed(module) and not _is_old_format(module)]


def install(models: list[nn.Module]) -> None:
    """Replay routing in the checkpoints of `models`; those that are switched on already are included."""
    for model in models:
        # A partial, not a closure: copying or pickling the model takes it along, bound to the copy.
        setter = functools.partial(_set_and_wrap, model, model.__dict__.get(_SETTER))
        object.__setattr__(model, _SETTER, setter)
        _wrap(model)


def remove(models: list[nn.Module]) -> None:
    """Undo :func:`install`: the layers checkpoint as before, switched on or off as they are now."""
    for model in models:
        if _installed(model):
            original = model.__dict__[_SETTER].args[1]
            if original is None:
                del model.__dict__[_SETTER]
            else:
                object.__setattr__(model, _SETTER, original)
        for module, function in _checkpointing(model):
            if isinstance(function, ReplayingCheckpoint):
                module.__dict__[_FUNCTION] = function.inner


def routing_replay_stats(model: nn.Module, *, reset: bool = False) -> tuple[int, int]:
    """Count the decisions that activation checkpointing recomputed, and those that replay kept from changing.

    Args:
        model: a patched model, or a wrapper around one.
        reset: count from zero afterwards.

    Returns:
        ``(decisions, changed)`` since patching or the last reset. A decision is one row of one ``topk``: a token makes
        one per layer in most families, several in group-limited ones. Reading waits for the device.
    """
    stats = _stats(model)
    counts = sum(each.decisions for each in stats), sum(each.total_changed() for each in stats)
    if reset:
        for each in stats:
            each.clear()
    return counts


def _stats(model: nn.Module) -> list[ReplayStats]:
    found = {id(each): each.stats for _, each in _checkpointing(model) if isinstance(each, ReplayingCheckpoint)}
    return list(found.values())


def _set_and_wrap(model: nn.Module, original: Callable[..., None] | None, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``_set_gradient_checkpointing`` of `model`."""
    if original is None:
        getattr(type(model), _SETTER)(model, *args, **kwargs)
    else:
        original(*args, **kwargs)
    _wrap(model)


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


def _installed(module: nn.Module) -> bool:
    setter = module.__dict__.get(_SETTER)
    return isinstance(setter, functools.partial) and setter.func is _set_and_wrap


def _is_old_format(module: nn.Module) -> bool:
    """Whether the class has its own method from before transformers 4.35, which gives its layers no function."""
    return "value" in inspect.signature(getattr(module, _SETTER)).parameters
