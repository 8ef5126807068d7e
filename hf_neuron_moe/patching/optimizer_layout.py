"""Notices an optimizer, or a state of one, that was made for another layout of the weights than the model has now.

An optimizer finds its state again by position alone. While a model is patched, a hook in front of every optimizer step
writes into each parameter group which of its parameters are in kernel layout. The entry travels with
``optimizer.state_dict()`` and is compared at the next step; checkpoints of stock runs have none. (Dense blocks own
fewer parameters in kernel layout than in stock layout: torch itself raises when such states are loaded.) An optimizer
that was made before the model was patched holds parameters with a mark.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.block import REPLACED
from hf_neuron_moe.modules.state_dict import kernel_layout_parameters

GROUP_KEY = "neuron_kernel_layout"
"""Entry of a parameter group: positions of its parameters that are in kernel layout."""

_watched: WeakSet[nn.Module] = WeakSet()
_handles: list[RemovableHandle] = []


def watch(model: nn.Module) -> None:
    """Check the optimizers of a patched `model` from now on."""
    _watched.add(model)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(check_before_step))


def unwatch(model: nn.Module) -> None:
    """Undo :func:`watch`; the hook goes with the last model."""
    _watched.discard(model)
    if not _watched:
        while _handles:
            _handles.pop().remove()


def check_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare what the groups say about their state with the parameters as they are, and bring it up to date."""
    if torch.compiler.is_compiling():
        return
    replaced = [
        param.__dict__[REPLACED]
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and REPLACED in param.__dict__
    ]
    if replaced:
        raise UnsupportedModelError.about(
            "the optimizer",
            "made after patch_model(..., weights='kernel'), of the patched model's parameters",
            f"one with {len(replaced)} that the patch replaced, such as {replaced[0]}, which would never be trained",
            "Patch the model before the optimizer (or the Trainer) is made, or use weights='stock'. This step "
            "changed no parameter.",
        ).named("optimizer.step")
    kernel = {id(param): (name, rule.same_shape(param.shape)) for name, param, rule in kernel_layout_parameters()}
    for group in optimizer.param_groups:
        now = [index for index, param in enumerate(group["params"]) if id(param) in kernel]
        before = group.get(GROUP_KEY)
        if now == (before or []):
            continue
        for index in sorted(set(now) ^ set(before or [])):
            param = group["params"][index] if index < len(group["params"]) else None
            name, same_shape = kernel.get(id(param), (None, False))
            sure = before is not None or same_shape
            if param is not None and _is_of_other_layout(param, optimizer.state.get(param), sure=sure):
                raise _other_layout(param, name)
        group.pop(GROUP_KEY, None)
        if now:
            group[GROUP_KEY] = now


def _is_of_other_layout(param: Tensor, state: Any, *, sure: bool) -> bool:
    """Whether `state`, whose group says another layout or says nothing, holds values per element in another one.

    A group that says nothing may come from a release that wrote nothing. Then shapes tell; `sure` is that they cannot,
    or that the group says something.
    """
    tensors = [value for value in (state or {}).values() if isinstance(value, Tensor) and value.numel() > 1]
    # Nothing to mix up: a fresh optimizer, one without moments, or one that makes them (Adagrad) before its first step.
    if not tensors or not int(state.get("step", 1)):
        return False
    return sure or any(value.shape != param.shape for value in tensors)


def _other_layout(param: Tensor, kernel_name: str | None) -> UnsupportedModelError:
    now, then = ("stock", "kernel") if kernel_name is None else ("kernel", "stock")
    names = (name for model in _watched for name, other in model.named_parameters() if other is param)
    name = kernel_name or next(names, "a parameter that is not in a patched model")
    return UnsupportedModelError.about(
        f"optimizer state of {name}",
        f"in the layout of its parameter, which is the {now} one",
        f"a loaded state in {then} layout, whose moments belong to other elements",
        f"Patch with weights={then!r}, as in the run that saved it, or resume with a new optimizer (without the "
        "checkpoint's optimizer.pt and scheduler.pt). This step changed no parameter.",
    ).named("optimizer.step")
