"""Lets ``init_weights`` of a patched transformers model initialise its blocks.

A model may be patched on the meta device and get its memory and its weights later. transformers asks the model's
``_init_weights`` for every module; while a model is patched, an attribute of the instance stands before that method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.modules.stock_init import init_as_stock

_INIT = "_init_weights"


def uninstalled_models(model: nn.Module) -> list[nn.Module]:
    """Return the transformers models in `model` (itself included) that do not have the attribute."""
    from transformers import PreTrainedModel

    return [each for each in model.modules() if isinstance(each, PreTrainedModel) and not _installed(each)]


def install(models: list[nn.Module]) -> None:
    """Initialise the blocks of `models` too."""
    for model in models:
        # A partial, not a closure: copying or pickling the model takes it along, bound to the copy.
        object.__setattr__(model, _INIT, functools.partial(_init_any, model, model.__dict__.get(_INIT)))


def remove(models: list[nn.Module]) -> None:
    """Undo :func:`install`; a model that does not have the attribute is left as it is."""
    for model in models:
        if _installed(model):
            original = model.__dict__[_INIT].args[1]
            if original is None:
                del model.__dict__[_INIT]
            else:
                object.__setattr__(model, _INIT, original)


def _init_any(model: nn.Module, original: Callable[[nn.Module], None] | None, module: nn.Module) -> None:
    """Stand in for ``_init_weights`` of `model`."""
    init = functools.partial(getattr(type(model), _INIT), model) if original is None else original
    if isinstance(module, NeuronBlock) and not isinstance(module, QuantizedBlock):
        init_as_stock(module, init)
    else:
        init(module)


def _installed(model: nn.Module) -> bool:
    found = model.__dict__.get(_INIT)
    return isinstance(found, functools.partial) and found.func is _init_any
