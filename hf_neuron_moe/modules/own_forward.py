"""Notices a forward that was put on a patched block and does not lead to the block's own.

``block.forward = ...`` takes a block over without a trace: ``use_liger_kernel=True`` does it inside ``train()``.
Wrappers that call what they found (accelerate's hooks, a timer, ``torch.compile``) are fine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin


def is_taken_over(block: nn.Module) -> bool:
    """Return whether a forward on the instance `block` does not call the forward of its class, as far as one can see.

    Looked through is what :func:`_behind` lists: also bound methods that a function names as global variables (a
    notebook's), and what ``functools.wraps`` and ``torch.compile`` note about the function they wrap.
    """
    found = block.__dict__.get("forward")
    return found is not None and all(here is not type(block).forward for here in _reached(found, _behind))


def passes_by(parent: nn.Module, block: nn.Module) -> bool:
    """Return whether a forward on the instance `parent` leaves its child `block` out, as far as one can see.

    It does not if it leads to the class's forward or the block, or to code that has the block's attribute name in it.
    """
    if "forward" not in parent.__dict__:
        return False
    kind, names = type(parent), {attr for attr, child in parent._modules.items() if child is block}

    def behind(here: object) -> list[Any]:
        if not isinstance(here, FunctionType):
            return _behind(here)
        words = set(_words(here.__code__))
        methods = [getattr(kind, word) for word in words if isinstance(getattr(kind, word, None), FunctionType)]
        return [*methods, *(here.__globals__[word] for word in words & here.__globals__.keys()), *_behind(here)]

    return not any(
        here is kind.forward or here is block or (isinstance(here, FunctionType) and names & {*_words(here.__code__)})
        for here in _reached(parent.__dict__["forward"], behind)
    )


def _reached(start: object, behind: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """Yield `start` and what lies behind it, every object once."""
    pending, seen = [start], set[int]()
    while pending:
        here = pending.pop()
        if id(here) not in seen:
            seen.add(id(here))
            yield here
            pending.extend(behind(here))


def _words(code: CodeType) -> list[str]:
    """Names and texts in a function's code, and in that of functions within."""
    inner = [word for each in code.co_consts if isinstance(each, CodeType) for word in _words(each)]
    return [*code.co_names, *(each for each in code.co_consts if isinstance(each, str)), *inner]


def _behind(function: object) -> list[Any]:
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
    hook = block.__dict__.get("_hf_hook")
    offloaded = any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))
    if offloaded and isinstance(block, KernelLayoutMixin):
        expected = "in memory while they are in kernel layout"
        got = "weights that accelerate offloads, which finds them by their stock names and shapes"
        fix = "Load the model again and patch it with weights='stock', or do not offload it."
        raise UnsupportedModelError.about("weights", expected, got, fix).named(name)
    if is_taken_over(block):
        got = f"{described(block.__dict__['forward'])}, put on the block later"
        fix = (
            "If you passed use_liger_kernel=True, leave it out or pass liger_kernel_config={'swiglu': False}. "
            f"If not, delete the forward (`del block.forward`), or unpatch the model and pass exclude=[{name!r}]."
        )
        raise UnsupportedModelError.about("forward", "the patched block's own", got, fix).named(name)
    return True


def described(forward: object) -> str:
    """Return module and name of a function."""
    function = getattr(forward, "__func__", forward)
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}.{getattr(function, '__qualname__', kind.__qualname__)}"
