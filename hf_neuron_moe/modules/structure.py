"""Which parts of modules the operators compute: hooks, activations, linear layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import with_article
from hf_neuron_moe.modules.engine import installed, is_sharded

CALL_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""Those that run when a module is called or differentiated, by the name a message gives them."""


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when `module` is called or differentiated."""
    return any(getattr(module, kind) for kind in CALL_HOOKS)


def _named_classes(*names: str) -> set[Any]:
    """Classes that transformers has under names of activations."""
    from transformers.activations import ACT2CLS

    entries = (ACT2CLS[name] for name in names if name in ACT2CLS)
    return {entry[0] if isinstance(entry, tuple) else entry for entry in entries}


def _is_silu(activation: object) -> bool:
    return activation is F.silu or type(activation) in {nn.SiLU, *_named_classes("silu", "swish")}


def _is_gelu(activation: Any) -> bool:
    """The exact GELU: by the error function."""
    if type(activation) is nn.GELU:
        return activation.approximate == "none"
    if type(activation) in _named_classes("gelu"):
        function = activation.act
        own = getattr(function, "__func__", None)
        return function is F.gelu or (own is not None and own is getattr(type(activation), "_gelu_python", None))
    return activation is F.gelu


def _is_gelu_tanh(activation: Any) -> bool:
    """The approximation by a hyperbolic tangent, in any of its spellings."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    if type(activation) in _named_classes("gelu_pytorch_tanh"):
        function = activation.act
        if isinstance(function, functools.partial):
            return function.func is F.gelu and not function.args and function.keywords == {"approximate": "tanh"}
        own = getattr(function, "__func__", None)
        return own is not None and own is getattr(type(activation), "_gelu_tanh_python", None)
    return type(activation) in _named_classes("gelu_new", "gelu_fast")


def _is_squared_relu(activation: object) -> bool:
    return type(activation) in _named_classes("relu2")


def _is_quick_gelu(activation: object) -> bool:
    return type(activation) in _named_classes("quick_gelu")


def attribute_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of `module` or, of a block that stands in for another module, of that one's class.

    A property or another descriptor is returned itself: its value may depend on anything. What the class has hides what
    the instance registered, as in Python. Raises AttributeError where there is none.
    """
    if name in module.__dict__:
        return module.__dict__[name]
    for kind in module.__dict__.get("neuron_stock_class", type(module)).__mro__:
        if name in kind.__dict__:  # torch.compile cannot follow inspect.getattr_static on Python 3.14
            found = kind.__dict__[name]
            method = MethodType(found, module) if isinstance(found, FunctionType) else found
            return found.__func__ if isinstance(found, staticmethod) else method
    for held in (module._modules, module._parameters, module._buffers):
        if name in held:
            return held[name]
    raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")


class Recognized(NamedTuple):
    """How an activation of ``backends/torch/gating.py`` is recognized."""

    title: str  # the activation's name in messages
    matches: Callable[[Any], bool]  # whether an activation, a module or a function, is it
    alpha: float = 1.0  # of a Swish: the constant inside


ACTIVATIONS: dict[str, Recognized] = {
    "silu": Recognized("SiLU", _is_silu),
    "gelu": Recognized("GELU", _is_gelu),
    "gelu_tanh": Recognized("GELU by tanh", _is_gelu_tanh),
    "squared_relu": Recognized("squared ReLU", _is_squared_relu),
    "swish": Recognized("Swish", _is_quick_gelu, 1.702),
}
"""By the names of the rows."""


def act_of(activation: object) -> str | None:
    """Return the name of the row with this activation, or None where no row matches."""
    return next((name for name, row in ACTIVATIONS.items() if row.matches(activation)), None)


def gate_of_text(text: str) -> Gate:
    """Return the gate whose :attr:`Gate.text` is `text`, for a call that may be compiled.

    A compiler that is asked for dynamic sizes takes numbers in a module's attributes for symbols, of which no string
    can be made. Those read here are constants.
    """
    return Gate.read(text) if torch.compiler.is_compiling() else Gate.parse(text)


def gate_of(activation: object) -> Gate | None:
    """Return ``activation(gate) * up`` as a gate, or None where no row matches."""
    name = act_of(activation)
    return None if name is None else Gate(name, ACTIVATIONS[name].alpha)


def unsupported_activation(activation: object, act: str | None = None) -> str | None:
    """Return what `activation` is, if no row has it (or not `act`'s) or it has a forward of its own; else None."""
    if isinstance(activation, nn.Module) and "forward" in activation.__dict__:
        return f"{with_article(type(activation).__name__)} whose forward is overridden on the instance"
    matches = act_of(activation) is not None if act is None else ACTIVATIONS[act].matches(activation)
    return None if matches else describe_activation(activation)


def supported_activations() -> str:
    """Return the activations of all rows as a message names them."""
    *first, last = (row.title for row in ACTIVATIONS.values())
    return f"{', '.join(first)} and {last}"


def describe_activation(activation: object) -> str:
    """Return a short name of an activation module or function."""
    return getattr(activation, "__name__", type(activation).__name__)


def is_inert(value: object) -> bool:
    """Return whether an attribute is a dropout of 0, as a module without hooks or as a probability."""
    if isinstance(value, nn.Module):
        inert = type(value) is nn.Identity or (type(value) is nn.Dropout and value.p == 0)
        return inert and not has_call_hooks(value) and "forward" not in value.__dict__
    return type(value) in (int, float) and value == 0


def unsupported_reason_plain_linear(module: Any, *, sharded: bool = False) -> str | None:
    """Return why `module` may compute something else than ``x @ weight.T + bias``, or None for a plain linear layer.

    With `sharded` it may also be one that transformers' engine cut and wrapped.
    """
    if type(module) is not nn.Linear:
        return f"{with_article(type(module).__module__)}.{type(module).__qualname__}, not a plain torch.nn.Linear"
    if "forward" in module.__dict__ and not (sharded and installed(module) is not None):
        return "a linear layer whose forward is overridden on the instance"
    if has_call_hooks(module):
        return "a linear layer with hooks"
    if sharded and is_sharded(module.weight):
        return None
    for name in ("weight", "bias"):
        value: Any = getattr(module, name)
        # torch.func.functional_call puts plain tensors in the parameters' places, nn.DataParallel beside them.
        lent = type(value) is Tensor and (name in module._parameters or "_is_replica" in module.__dict__)
        if lent or type(value) is FakeTensor or (value is None and name == "bias"):  # a stand-in has no values
            continue
        if not isinstance(value, Tensor):
            return f"a linear layer without a {name}"
        if type(value) is not nn.Parameter or type(value.data) is not Tensor:
            return f"a linear layer whose {name} is {with_article(type(value).__name__)} of {type(value.data).__name__}"
    return None
