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
from hf_neuron_moe.modules.sharded_lora import (
    prepare_adapters,
    release_adapters,
    release_sizes,
    size_by_layers,
)

Rules = list[tuple[Any, dict[str, str]]]
"""Models, and what was taken out of their plans."""


def watch(model: nn.Module, rules: Rules) -> None:
    """Look for adapters from here on; `rules` gets what :func:`unwatch` puts back."""
    from transformers import PreTrainedModel

    if not is_sharded_at_loading(model):
        return
    for each in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        each.register_forward_pre_hook(_look)
        plan = each._tp_plan or {}
        stay = ((name, module) for name, module in each.named_modules() if block_of(module) not in (None, module))
        names = {re.sub(r"\.\d+\.", ".*.", f"{name}.{key}") for name, module in stay for key in module._parameters}
        rules.append((each, {name: plan.pop(name) for name in names & plan.keys()}))
        size_by_layers(each)
    prepare_adapters(model)


def unwatch(rules: Rules) -> None:
    """Undo :func:`watch`."""
    while rules:
        model, plan = rules.pop()
        (model._tp_plan or {}).update(plan)
        hooks = model._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _look]:
            del hooks[key]
        release_adapters(model)
        release_sizes(model)


def _look(model: nn.Module, arguments: Any) -> None:
    if "peft" in sys.modules and not torch.compiler.is_compiling():
        prepare_adapters(model)
