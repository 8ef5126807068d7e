"""Notices a forward that was put on a patched block and does not lead to the block's own.

``block.forward = ...`` takes a block over without a trace: ``use_liger_kernel=True`` does it inside ``train()``.
Wrappers that call what they found (accelerate's hooks, a timer, ``torch.compile``) are fine.
"""

from __future__ import annotations

import functools
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin


def is_taken_over(block: nn.Module) -> bool:
    """Return whether a forward on the instance `block` does not call the forward of its class, as far as one can see.

    Looked through are bound methods, also those that a function names as global variables (a notebook's), partials,
    closures, defaults, attributes of callable objects, and what ``functools.wraps`` and ``torch.compile`` note about
    the function they wrap.
    """
    return "forward" in block.__dict__ and not _leads_to(type(block).forward, block.__dict__["forward"])


def passes_by(parent: nn.Module, block: nn.Module) -> bool:
    """Return whether a forward on the instance `parent` leaves its child `block` out, as far as one can see.

    It does not if it leads to the forward of the class or to the block, or its code, or that of a function that it
    names, has the block's attribute name in it.
    """
    if "forward" not in parent.__dict__:
        return False
    kind, names = type(parent), {attr for attr, child in parent._modules.items() if child is block}
    pending, seen = [parent.__dict__["forward"]], set[int]()
    while pending:
        here = pending.pop()
        if here is kind.forward or here is block:
            return False
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, FunctionType):
            words = set(_words(here.__code__))
            if words & names:
                return False
            pending.extend(getattr(kind, word) for word in words if isinstance(getattr(kind, word, None), FunctionType))
            pending.extend(here.__globals__[word] for word in words & here.__globals__.keys())
        pending.extend(_behind(here))
    return True


def _words(code: CodeType) -> list[str]:
    """Names and texts in a function's code, and in that of functions within."""
    inner = [word for each in code.co_consts if isinstance(each, CodeType) for word in _words(each)]
    return [*code.co_names, *(each for each in code.co_consts if isinstance(each, str)), *inner]


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
            held = [*vars(function).values(), *(function.__closure__ or ()), *(function.__defaults__ or ())]
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            return held + [value for value in named if isinstance(value, MethodType)]
        case _ if callable(function) and not isinstance(function, nn.Module | type):
            return list(getattr(function, "__dict__", {}).values())
        case _:
            return []


@torch.compiler.assume_constant_result  # a forward is put on a block once, not by what it computes
def check_own_forward(block: nn.Module, name: str) -> bool:
    """Refuse to call a `block` that was taken over, or whose weights accelerate offloads by their stock names."""
    if isinstance(block, KernelLayoutMixin) and _is_offloaded(block):
        raise UnsupportedModelError.about(
            "weights",
            "in memory while they are in kernel layout",
            "weights that accelerate offloads, which finds them by their stock names and shapes",
            "Load the model again and patch it with weights='stock', or do not offload it.",
        ).named(name)
    if is_taken_over(block):
        forward = block.__dict__["forward"]
        raise UnsupportedModelError.about(
            "forward",
            "the patched block's own",
            described(forward) + ", put on the block later",
            "If you passed use_liger_kernel=True, leave it out or pass liger_kernel_config={'swiglu': False}. "
            f"If not, delete the forward (`del block.forward`), or unpatch the model and pass exclude=[{name!r}].",
        ).named(name)
    return True


def _is_offloaded(block: nn.Module) -> bool:
    hook = block.__dict__.get("_hf_hook")
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def described(forward: Any) -> str:
    """Return module and name of a function."""
    function = getattr(forward, "__func__", forward)
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}.{getattr(function, '__qualname__', kind.__qualname__)}"
