"""How operators are registered: by the Neuron plugin's ``nki_op`` where that is loaded, by ``torch.library`` elsewhere.

``nki_op`` returns an ordinary custom operator; its difference is that ``torch.compile`` traces into the body, so that
a kernel becomes a node of the graph. torch loads the plugin when it is imported itself; only where that is switched
off, or a plugin comes later, operators that exist already are registered again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

_registered: dict[str, Any] = {}
"""By module with operators: what they were registered with."""


def plugin_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the loaded Neuron plugin, from the package or the module it is defined in; else None."""
    homes = (sys.modules.get(home) for home in ("torch_neuronx", "torch_neuronx.nki_hop"))
    return next((found for home in homes if (found := getattr(home, name, None)) is not None), None)


def _definer() -> Callable[..., Any]:
    nki_op = plugin_function("nki_op")
    return torch.library.custom_op if nki_op is None else nki_op


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a functional operator of a function with complete annotations.

    The result has ``register_fake`` and ``register_autograd``. Registering a name again replaces it.

    Args:
        name: ``"namespace::name"``.
    """

    def register(body: Callable[..., Any]) -> Any:
        define = _definer()
        _registered[body.__module__] = define
        return define(name, body, mutates_args=())

    return register


def register_again() -> None:
    """Register the operators anew if the Neuron plugin came or went since; their modules are executed again."""
    for module, used in list(_registered.items()):
        if used != _definer():
            importlib.reload(sys.modules[module])
