"""Notices a forward that was put on a patched block and does not lead to the block's own.

``block.forward = ...`` takes a block over without a trace: ``use_liger_kernel=True`` does it inside ``train()``.
Wrappers that call what they found (accelerate's hooks, a timer, ``torch.compile``) are fine.
"""

from __future__ import annotations

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError, refuse
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin


def is_taken_over(block: nn.Module) -> bool:
    """Return whether a forward on the instance `block` does not call the forward of its class, as far as one can see.

    Looked through are bound methods, partials, closures, defaults, attributes of callable objects, and what
    ``functools.wraps`` and ``torch.compile`` note about the function they wrap.
    """
    return "forward" in block.__dict__ and not _leads_to(type(block).forward, block.__dict__["forward"])


def _leads_to(own: Any, found: Any) -> bool:
    pending, seen = [found], set[int]()
    while pending:
        here = pending.pop()
        if here is own:
            return True
        if id(here) not in seen:
            seen.add(id(here))
            pending.extend(_behind(here))
    return False


def _behind(function: Any) -> list[Any]:
    """What `function` may call; modules are not entered, whose forward may be anything."""
    match function:
        case MethodType():
            return [function.__func__]
        case functools.partial():
            return [function.func, *function.args, *function.keywords.values(), *vars(function).values()]
        case CellType():
            return [function.cell_contents] if function != CellType() else []
        case FunctionType():
            return [*vars(function).values(), *(function.__closure__ or ()), *(function.__defaults__ or ())]
        case _ if callable(function) and not isinstance(function, nn.Module | type):
            return list(getattr(function, "__dict__", {}).values())
        case _:
            return []


@torch.compiler.assume_constant_result  # a forward is put on a block once, not by what it computes
def check_own_forward(block: nn.Module, name: str) -> bool:
    """Refuse to call a `block` that was taken over, or whose weights accelerate offloads by their stock names.

    Args:
        block: a patched block.
        name: its name in the model.

    Raises:
        UnsupportedModelError: as :func:`is_taken_over` says, or the block's weights are offloaded and in kernel layout.
    """
    if isinstance(block, KernelLayoutMixin) and _is_offloaded(block):
        raise refuse(
            UnsupportedModelError,
            where=name,
            argument="weights",
            expected="in memory while they are in kernel layout",
            got="weights that accelerate offloads, which finds them by their stock names and shapes",
            remedy="Load the model again and patch it with weights='stock', or do not offload it.",
        )
    if is_taken_over(block):
        forward = block.__dict__["forward"]
        raise refuse(
            UnsupportedModelError,
            where=name,
            argument="forward",
            expected="the patched block's own",
            got=described(forward) + ", put on the block later",
            remedy="use_liger_kernel=True does this: leave it out, or keep Liger's other kernels with "
            "liger_kernel_config={'swiglu': False}. Otherwise `del block.forward`, or name the block in exclude=... .",
        )
    return True


def _is_offloaded(block: nn.Module) -> bool:
    hook = block.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def described(forward: Any) -> str:
    """Return module and name of a function."""
    function = getattr(forward, "__func__", forward)
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}.{getattr(function, '__qualname__', kind.__qualname__)}"
