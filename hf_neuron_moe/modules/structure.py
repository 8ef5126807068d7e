"""Which modules the operators compute: hooks, activations, linear layers, experts.

Experts are read from the flags that transformers puts on the instance. Every class decorated with
``transformers.integrations.use_experts_implementation`` has the same call and describes its parameters by flags, so one
rule covers all families.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import with_article

CALL_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""Those that run when a module is called or differentiated, by the name a message gives them."""

_FLAG_RULES: tuple[tuple[str, bool, str], ...] = (
    ("has_gate", True, "it has no gate projection"),
    ("has_bias", False, "its projections have a bias"),
    ("is_concatenated", True, "its gate and up rows are interleaved, not concatenated"),
    ("has_post_expert_norm", False, "it normalizes each expert's output"),
)
"""Flag, the value the kernels need, and what the other value means."""


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when `module` is called or differentiated."""
    return any(getattr(module, kind) for kind in CALL_HOOKS)


def _named_classes(*names: str) -> set[Any]:
    """Classes that transformers has under names of activations."""
    from transformers.activations import ACT2CLS

    entries = (ACT2CLS[name] for name in names if name in ACT2CLS)
    return {entry[0] if isinstance(entry, tuple) else entry for entry in entries}


def _is_silu(activation: Any) -> bool:
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


def _is_squared_relu(activation: Any) -> bool:
    return type(activation) in _named_classes("relu2")


def _is_quick_gelu(activation: Any) -> bool:
    return type(activation) in _named_classes("quick_gelu")


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


def act_of(activation: Any) -> str | None:
    """Return the name of the row with this activation, or None where no row matches."""
    return next((name for name, row in ACTIVATIONS.items() if row.matches(activation)), None)


def gate_of(activation: Any) -> Gate | None:
    """Return ``activation(gate) * up`` as a gate, or None where no row matches."""
    name = act_of(activation)
    return None if name is None else Gate(name, ACTIVATIONS[name].alpha)


def unsupported_activation(activation: Any, act: str | None = None) -> str | None:
    """Return what `activation` is, if no row has it (or not `act`'s) or it has a forward of its own; else None."""
    if isinstance(activation, nn.Module) and "forward" in activation.__dict__:
        return f"{with_article(type(activation).__name__)} whose forward is overridden on the instance"
    matches = act_of(activation) is not None if act is None else ACTIVATIONS[act].matches(activation)
    return None if matches else describe_activation(activation)


def supported_activations() -> str:
    """Return the activations of all rows as a message names them."""
    *first, last = (row.title for row in ACTIVATIONS.values())
    return f"{', '.join(first)} and {last}"


def describe_activation(activation: Any) -> str:
    """Return a short name of an activation module or function."""
    return getattr(activation, "__name__", type(activation).__name__)


def is_inert(value: Any) -> bool:
    """Return whether an attribute is a dropout of 0, as a module without hooks or as a probability."""
    if isinstance(value, nn.Module):
        inert = type(value) is nn.Identity or (type(value) is nn.Dropout and value.p == 0)
        return inert and not has_call_hooks(value) and "forward" not in value.__dict__
    return type(value) in (int, float) and value == 0


def unsupported_reason_plain_linear(module: Any) -> str | None:
    """Return why `module` may compute something else than ``x @ weight.T + bias``, or None for a plain linear layer."""
    if type(module) is not nn.Linear:
        return f"{with_article(type(module).__module__)}.{type(module).__qualname__}, not a plain torch.nn.Linear"
    if "forward" in module.__dict__:
        return "a linear layer whose forward is overridden on the instance"
    if has_call_hooks(module):
        return "a linear layer with hooks"
    weight: Any = module.weight
    if type(weight) is Tensor and module.__dict__.get("_is_replica"):  # nn.DataParallel gives devices plain tensors
        return None
    if type(weight) is FakeTensor:  # a stand-in without values, in a forward that is run for its shapes
        return None
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"a linear layer whose weight is {with_article(type(weight).__name__)} of {type(weight.data).__name__}"
    bias: Any = module.bias
    if bias is not None and (type(bias) is not nn.Parameter or type(bias.data) is not Tensor):
        return f"a linear layer whose bias is {with_article(type(bias).__name__)} of {type(bias.data).__name__}"
    return None


def is_decorated_experts(module: nn.Module) -> bool:
    """Return whether `module` has the flags that ``use_experts_implementation`` sets since transformers 5.17."""
    return module.__dict__.keys() >= {"has_gate", "has_bias", "is_transposed", "is_concatenated"}


@cache
def _dispatching_forward() -> CodeType:
    """The code of the forward that the decorator installs; the same object for every decorated class."""
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation
    class _Probe(nn.Module):
        def forward(self) -> None:
            """Never called."""

    return _Probe.forward.__code__


def unsupported_reason_swiglu_experts(module: Any) -> str | None:
    """Return why the operator cannot compute `module`, or None where its flags and parts say that it can."""
    from transformers.integrations.moe import _default_apply_gate

    if not is_decorated_experts(module):
        return "its class is not decorated with transformers' use_experts_implementation"
    forward = type(module).forward
    if module.__dict__.get("_is_hooked") and "forward" in module.__dict__:
        return "transformers' tensor or expert parallelism wraps its forward, which is not supported"
    if forward.__code__ is not _dispatching_forward() or "forward" in module.__dict__:
        return "its forward is not the one that use_experts_implementation installs"
    for flag, needed, meaning in _FLAG_RULES:
        value = getattr(module, flag, needed)  # a version without the flag has no experts it would describe
        if bool(value) is not needed:
            return f"{meaning} ({flag}={value})"
    if "_apply_gate" in module.__dict__ or type(module)._apply_gate is not _default_apply_gate:
        return f"its gate is not silu(gate) * up: {type(module).__name__} defines its own _apply_gate"
    activation = getattr(module, "act_fn", None)
    if act_of(activation) is None:
        return f"its activation is {describe_activation(activation)}, the kernels have {supported_activations()}"
    if isinstance(activation, nn.Module) and has_call_hooks(activation):
        return "its act_fn has hooks, which the operator would not call"
    return _unsupported_reason_shapes(module)


def _unsupported_reason_shapes(module: Any) -> str | None:
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return "it has no 3-D parameters gate_up_proj and down_proj"
    E, first, second = gate_up.shape
    hidden, double = (first, second) if module.is_transposed else (second, first)
    expected = (E, double // 2, hidden) if module.is_transposed else (E, hidden, double // 2)
    if double % 2 or tuple(down.shape) != expected:
        return f"its parameters do not fit together: gate_up_proj {tuple(gate_up.shape)}, down_proj {tuple(down.shape)}"
    return None
