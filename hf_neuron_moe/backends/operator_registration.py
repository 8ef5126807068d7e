"""How operators are registered: by the Neuron plugin's ``nki_op`` where that is loaded, by ``torch.library`` elsewhere.

``torch.compile`` traces into the body of an operator of ``nki_op``, so that a kernel becomes a node of the graph. The
torch backend looks at values and cannot be traced: there the body calls a second operator, which stays whole. torch
loads the plugin when it is imported itself; where one comes later, operators that exist are registered again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

_registered: dict[str, Any] = {}
"""By module with operators: what they were registered with."""
_twins: dict[int, Any] = {}
"""By the id of an operator made by ``nki_op``: the operator that its body calls where it is not traced into."""
_bodies: dict[int, Callable[..., Any]] = {}
"""By the id of an operator: the function that it was made of."""
_made: list[Any] = []
"""All operators. One that is replaced and then collected would take its successor out of the cache of ``torch.ops``.
Selective checkpointing, which names an operator, would get another object than what is called."""


def plugin_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the loaded Neuron plugin, from the package or the module it is defined in; else None."""
    homes = (sys.modules.get(home) for home in ("torch_neuronx", "torch_neuronx.nki_hop"))
    return next((found for home in homes if (found := getattr(home, name, None)) is not None), None)


def _definer() -> Callable[..., Any]:
    return plugin_function("nki_op") or torch.library.custom_op


def operator(name: str, traced_into: Callable[[str], bool]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes the functional operator ``"namespace::name"`` of a completely annotated function.

    The function has an argument ``call``, with which `traced_into` is asked whether a compiler may trace into the body.
    The result has ``register_autograd``; its fake comes with :func:`fake_of`. Registering a name again replaces it.
    """

    def register(body: Callable[..., Any]) -> Any:
        define = _definer()
        _registered[body.__module__] = define
        if define is torch.library.custom_op:
            _made.append(define(name, body, mutates_args=()))
            _bodies[id(_made[-1])] = body
            return _made[-1]
        twin = torch.library.custom_op(f"{name}_torch", body, mutates_args=())
        signature = inspect.signature(body, eval_str=True)

        @functools.wraps(body)
        def traceable(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            return (body if traced_into(bound.arguments["call"]) else twin)(*bound.args)

        vars(traceable)["__signature__"] = signature  # types, where their names would be looked up in this module
        made = define(name, traceable, mutates_args=())
        _made.append(made)
        _twins[id(made)], _bodies[id(made)] = twin, body
        return made

    return register


def body_of(op: object) -> Callable[..., Any]:
    """Return the function that :func:`operator` made `op` of: what a compiler traces into."""
    return _bodies[id(op)]


def fake_of(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function of shapes the fake of an operator that :func:`operator` returned."""

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        for each in (op, _twins.get(id(op))):
            if each is not None:
                each.register_fake(shapes)
        return shapes

    return register


def register_again() -> None:
    """Register the operators anew if the Neuron plugin came or went since; their modules are executed again."""
    for module, used in list(_registered.items()):
        if used != _definer():
            importlib.reload(sys.modules[module])
