"""Which attribute of a dense MLP plays which part, and what must stay as it was when this was found.

I intermediate size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.modules.structure import attribute_of, gate_of, has_call_hooks


class Presence(str):
    """What stands for an attribute that is a module, where only its presence matters: two of them say nothing."""

    def __bool__(self) -> bool:
        """Return what a condition finds."""
        return self == MODULE


MODULE, EMPTY = Presence("a module"), Presence("a module of none")  # such as a list of no modules
_SCALARS = (int, float, bool, str, type(None))
OVERRIDDEN = ("__call__", "__getattr__", "__getattribute__")
"""Methods of modules with which a class may do anything at each call or at each look at an attribute."""
FUNCTIONS = (FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class DenseRoles:
    """The parts of ``down(f(gate(x)) * p(up(x)))``; names are those of attributes of the module."""

    inputs: tuple[str, ...]
    """Names of the linear layers before the product: ``(gate, up)`` or the single fused one ``(gate_up,)``. A name may
    be a path, ``gate_proj.linear``, where a class of its own holds the layer."""
    down: str  # name of the linear layer after the product
    activation: str | None  # name of the activation's attribute; None where forward calls the function itself
    half_size: str | int | None = None  # attribute or number that a fused projection is split by; None for its middle
    input_sizes: tuple[str, ...] = ()  # attributes that the forward takes for the number of its input's features
    extra_arguments: bool = False  # whether forward takes arguments that it does not use
    inert: tuple[str, ...] = ()  # names of attributes that change nothing while they are as they are: a dropout of 0
    gate: Gate = SWIGLU
    up_first: bool = False  # the fused layer's first half, or its even rows, are up's
    interleaved: bool = False  # rows of the fused layer alternate between gate and up
    biased: tuple[str, ...] = ()  # names of the linear layers with a bias
    constants: tuple[tuple[str, Any], ...] = ()  # paths of attributes that decided what forward computes, and values
    fixed_arguments: tuple[tuple[str, int | None, Any], ...] = ()
    """Further arguments that decide a branch of forward: name, place after the input (None: by keyword only), default.
    Another value than the default is an error."""
    rank: int | None = None  # number of dimensions that the forward counts from the first; None for any number
    overwrites: bool = False  # whether forward changes tensors of its own in place
    before: tuple[str, ...] = ()  # names of the modules through which the input goes first, in order
    after: tuple[str | float, ...] = ()
    """Steps after the operator, in order: the name of a dropout or of a parameter (a factor), or a probability."""
    cast_back: bool = False  # whether the result is cast to the input's dtype, which modules before may change

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of all linear layers."""
        return (*self.inputs, self.down)

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of the module's own children that are or hold the linear layers."""
        return tuple(name.partition(".")[0] for name in self.linears)

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases' parameters, in the order of the layers."""
        return tuple(f"{name}.bias" for name in self.linears if name in self.biased)

    @property
    def gate_first(self) -> bool:
        """Whether gate rows come before up rows, as in the kernels' fused weight."""
        return not self.up_first and not self.interleaved

    @property
    def surrounded(self) -> bool:
        """Whether a call does more than its operator: checks, steps before or after it."""
        return bool(self.inert or self.constants or self.before or self.after or self.rank)

    @property
    def bias_rules(self) -> tuple[WeightRule, ...]:
        """The biases as parameters of a block in kernel layout, where they lie as they do in stock layout."""
        titles = ("gate_proj_bias", "up_proj_bias") if len(self.inputs) == 2 else ("gate_up_proj_bias",)
        names = zip(self.linears, (*titles, "down_proj_bias"), strict=True)
        return tuple(WeightRule(title, (f"{name}.bias",)) for name, title in names if name in self.biased)

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """The parameters in kernel layout: ``gate_up_proj [2I, H]``, ``down_proj [H, I]`` and the biases.

        A fused layer keeps its own order of rows.
        """
        gate_up = WeightRule("gate_up_proj", tuple(f"{name}.weight" for name in self.inputs))
        return gate_up, WeightRule("down_proj", (f"{self.down}.weight",)), *self.bias_rules

    def halves(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of gate's and up's rows of a fused weight ``[2I, H]`` or bias ``[2I]``."""
        rows, rest = fused.shape[0] // 2, fused.shape[1:]
        # unbind of a view: its backward writes both gradients into one tensor, where two slices would add two full ones
        if self.interleaved:
            first, second = fused.view(rows, 2, *rest).unbind(1)
        else:
            first, second = fused.view(2, rows, *rest).unbind(0)
        return (second, first) if self.up_first else (first, second)

    def fused(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the fused weight or bias of gate's and up's rows; the inverse of :meth:`halves`."""
        first, second = (up, gate) if self.up_first else (gate, up)
        return torch.stack((first, second), dim=1).flatten(0, 1) if self.interleaved else torch.cat((first, second))

    def halves_of_result(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate's and up's entries along the last dimension of a fused layer's result ``[..., 2I]``."""
        first, second = (fused[..., ::2], fused[..., 1::2]) if self.interleaved else fused.chunk(2, dim=-1)
        return (second, first) if self.up_first else (first, second)


def constant_of(module: nn.Module, path: str) -> Any:
    """Return the plain value or function at a dotted `path` of attributes of `module`, :data:`MODULE` for a module.

    Of a path with ``()`` at its end, return what a call of the attribute runs: see :func:`code_of`.

    Raises:
        AttributeError: there is none, or it is neither a plain value nor a module.
    """
    first, *rest = path.removesuffix("()").split(".")
    if path.rpartition(".")[2] in ("training", ""):
        raise AttributeError(path)
    holder: Any = module
    for name in (first, *rest):
        holder = attribute_of(holder, name) if isinstance(holder, nn.Module) else getattr(holder, name)
    if path.endswith("()"):
        return code_of(holder)
    if isinstance(holder, nn.Module):
        return MODULE if bool(holder) else EMPTY
    if type(holder) not in (*_SCALARS, *FUNCTIONS):
        raise AttributeError(f"{path} is no plain value")
    return holder


def code_of(called: object) -> Any:
    """Return what decides how `called` computes: a function itself, an activation's gate, another module's class.

    Of a module that may compute something else these are words that say why.
    """
    if not isinstance(called, nn.Module):
        return called
    own = any(getattr(type(called), name) is not getattr(nn.Module, name) for name in OVERRIDDEN)
    changed = has_call_hooks(called) or "forward" in called.__dict__ or own
    if changed:
        return f"a {type(called).__name__} with hooks or methods of its own"
    return gate_of(called) or type(called)
