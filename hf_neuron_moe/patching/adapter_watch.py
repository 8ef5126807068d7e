"""Adapters that are put on a patched model which transformers' engine sharded while loading.

A hook looks for them in front of every forward. peft would cut factors of experts' parameters by the model's plan as
if these were linear layers: while the model is patched, its plan has no rules for them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.modules.sharded_lora import prepare_adapters, release_adapters


def watch(model: nn.Module, rules: list[tuple[Any, dict[str, str]]]) -> None:
    """Look for adapters from here on; `rules` gets each model with the rules that are taken out of its plan."""
    if not is_sharded_at_loading(model):
        return
    for each in _transformers_models(model):
        each.register_forward_pre_hook(_look)
        plan = getattr(each, "_tp_plan", None) or {}
        names = (f"{name}.{weight}" for name, module in each.named_modules() for weight in _weights(module))
        generic = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        rules.append((each, {name: plan.pop(name) for name in generic & plan.keys()}))
    prepare_adapters(model)


def unwatch(rules: list[tuple[Any, dict[str, str]]]) -> None:
    """Undo :func:`watch`."""
    while rules:
        model, plan = rules.pop()
        (model._tp_plan or {}).update(plan)
        hooks = model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _look]:
            del hooks[key]
        release_adapters(model)


def _transformers_models(model: nn.Module) -> list[Any]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _weights(module: nn.Module) -> list[str]:
    block = block_of(module)
    return [] if block is None or block is module else list(module._parameters)


def _look(model: nn.Module, arguments: Any) -> None:
    if "peft" in sys.modules and not torch.compiler.is_compiling():
        prepare_adapters(model)
