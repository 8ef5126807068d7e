"""Decides whether a dense MLP's source is ``down(f(gate(x)) * p(up(x)))``, and which part plays which role.

A numeric probe cannot see a multiplier that happens to be 1, a dropout in eval mode or a clamp with wide limits. So a
module is patched only if its ``forward`` *is* the formula. The expression that the reader made of it is compared here;
names of attributes and variables do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from hf_neuron_moe.backends.gate import SWIGLU, Gate, checked_gate
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.structure import gate_of, has_call_hooks, is_inert
from hf_neuron_moe.patching.source_reader import read_forward
from hf_neuron_moe.patching.source_values import EXPECTED, Expression, NotSwiGLU, bare, same

_FORM = "its forward is not down(act(gate(x)) * up(x))"


def dense_roles(forward: Callable[..., Any], module: nn.Module | None = None) -> DenseRoles:
    """Return the roles in a gated `forward`, the function as found on the class of the instance `module`.

    Without a module no attribute has a value, and an activation that the instance holds counts as SiLU.
    """
    result, reader = read_forward(forward, module)
    notes = reader.notes
    matcher = _Matcher(module)
    try:
        roles = matcher.match(result)
    except NotSwiGLU as answer:
        unread = [f"not read: {reason}" for reason in notes.unread.values()]
        inside = bare(result)[0] != "product" and "'product'" in str(result)
        gate = inside or (bool(unread) and _halves(module))
        raise NotSwiGLU("; ".join([str(answer), *unread]), unread=gate) from answer
    if len(notes.half_sizes) > 1:
        raise NotSwiGLU(f"its forward splits by {' and '.join(sorted(map(str, notes.half_sizes)))}")
    if notes.reshaped and roles.before:
        raise NotSwiGLU(f"its forward gives shapes, but {roles.before[0]} in front of the layers may change them")
    constants = dict(notes.read)
    paths = {}
    for name in roles.linears:
        paths[name], held = _layer_path(name, module)
        constants |= held
    fixed = tuple((name, reader.places[name], reader.defaults[name]) for name in sorted(notes.fixed))
    inputs, down = tuple(paths[name] for name in roles.inputs), paths[roles.down]
    return replace(
        roles,
        inputs=inputs,
        down=down,
        biased=tuple(name for name in (*inputs, down) if _has_bias(module, name)),
        half_size=next(iter(notes.half_sizes), None),
        input_sizes=tuple(sorted(notes.input_sizes)),
        extra_arguments=reader.extra_arguments,
        rank=notes.rank,
        overwrites=notes.overwrites,
        inert=tuple(sorted(matcher.inert)),
        constants=tuple(sorted(constants.items())),
        fixed_arguments=fixed,
    )


def _halves(module: nn.Module | None) -> bool:
    """Whether a layer of `module` reads half as many features as one returns, so that what is between may be a gate."""
    layers = [] if module is None else [layer for layer in module.children() if isinstance(layer, nn.Linear)]
    return any(first.out_features == 2 * second.in_features for first in layers for second in layers)


def _layer_path(name: str, module: nn.Module | None) -> tuple[str, dict[str, Any]]:
    """The path of the linear layer that a child of a class of its own stands for, and the constants that say so."""
    child = None if module is None else module._modules.get(name)
    if child is None or isinstance(child, nn.Linear) or has_call_hooks(child) or "forward" in child.__dict__:
        return name, {}
    try:
        result, reader = read_forward(type(child).forward, child)
    except NotSwiGLU:
        return name, {}
    if reader.notes.reshaped:
        return name, {}
    match result:
        case ("part", str() as inner, ("input",)) if isinstance(child._modules.get(inner), nn.Linear):
            return f"{name}.{inner}", {f"{name}.{path}": value for path, value in reader.notes.read.items()}
    return name, {}


def _has_bias(module: nn.Module | None, path: str) -> bool:
    """Whether the layer at `path` has a bias; an adapter around it has its base layer's."""
    layer: Any = module
    for name in path.split("."):
        layer = None if layer is None else layer._modules.get(name)
    return getattr(layer, "bias", None) is not None


class _Source(NamedTuple):
    """Where a branch comes from: a linear layer or one of its halves, and the value that the layer reads."""

    layer: str
    read: Expression
    part: tuple[str, int] | None  # ("half" or "stripe", index); None for the whole
    whole: Expression


class _Branch(NamedTuple):
    """One factor of the product: the fields of the gate that it says, its activation's attribute, its source."""

    said: dict[str, Any]
    activation: str | None
    source: _Source


class _Matcher:
    """Compares an expression with the formula; `inert` gets the names of the dropouts of 0 that it met inside."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self.inert: set[str] = set()
        self.below: float | None = None  # a lower limit on what may be the activation's value

    def match(self, result: Expression) -> DenseRoles:
        """Return the roles; what only the instance says is left out."""
        if result[0] == "cast" and result[2] != "back":
            raise NotSwiGLU("its result is cast to a dtype that may not be its input's")
        cast_back = result[0] == "cast"
        result = result[1] if cast_back else result
        after: list[str | float] = []
        while result[0] in ("dropout", "weighted"):
            after.insert(0, result[1])
            result = result[2]
        _refuse_factor(result)
        match result:
            case ("part", str() as down, value):
                value = self.settled(value)
            case _:
                raise NotSwiGLU(f"its forward is not one projection of a product of two branches, {EXPECTED}")
        _refuse_factor(value)
        if value[0] != "product":
            raise NotSwiGLU(f"its forward is not one projection of a product of two branches, {EXPECTED}")
        for one, other in (value[1:], value[:0:-1]):
            gate, up = self.gate_branch(one), self.up_branch(other)
            if gate is not None and up is not None:
                roles = _joined(gate, up, down, self.called_gate(gate.activation))
                if roles is not None:
                    return replace(roles, after=tuple(after), cast_back=cast_back)
        below = None if self.below is None else f"its forward clamps the activation from below, at {self.below:g}"
        raise NotSwiGLU(below or _FORM)

    def called_gate(self, activation: str | None) -> Gate:
        """The gate of an activation that the instance holds; of SiLU where no row has it, which discovery refuses."""
        held = None if activation is None or self.module is None else getattr(self.module, activation, None)
        return gate_of(held) or SWIGLU

    def settled(self, value: Expression) -> Expression:
        """Return `value` without casts and dropouts of 0 around it."""
        while (value := bare(value))[0] == "dropout":
            name, value = value[1:]
            held = getattr(self.module, name, None) if isinstance(name, str) else name
            if not is_inert(held):
                shown = f"{name} with p={getattr(held, 'p', held)}"
                missing = "it has dropout, which the kernels do not have before the last projection"
                raise NotSwiGLU(f"{missing}: {shown}; set it to 0 before you patch")
            if isinstance(name, str):
                self.inert.add(name)
        return value

    def gate_branch(self, value: Expression) -> _Branch | None:
        """``clamp(act(clamp(source)))``."""
        said: dict[str, Any] = {}
        value = self.settled(value)
        if value[0] == "clamp" and value[1][0] in ("act", "part"):
            _, inner, low, high = value
            if low is not None:
                self.below = low
                return None
            said["act_max"], value = high, self.settled(inner)
        match value:
            case ("act", row, alpha, argument):
                activation = None
                said |= {"act": row, "alpha": alpha}
            case ("part", str() as activation, argument):
                pass
            case _:
                return None
        limits, argument = self.limited(argument)
        said |= {"gate_min": limits[0], "gate_max": limits[1]}
        source = self.source(argument)
        return None if source is None else _Branch(said, activation, source)

    def up_branch(self, value: Expression) -> _Branch | None:
        """``clamp(source) + offset``."""
        value, offset = self.settled(value), 0.0
        if value[0] == "offset":
            value, offset = self.settled(value[1]), value[2]
        limits, value = self.limited(value)
        source = self.source(value)
        said = {"up_min": limits[0], "up_max": limits[1], "up_offset": offset}
        return None if source is None else _Branch(said, None, source)

    def limited(self, value: Expression) -> tuple[tuple[float | None, float | None], Expression]:
        """Lower and upper limit around a value, and the value."""
        value = self.settled(value)
        _refuse_factor(value)
        return (value[2:], self.settled(value[1])) if value[0] == "clamp" else ((None, None), value)

    def source(self, value: Expression) -> _Source | None:
        part = None
        whole = value
        if value[0] in ("half", "stripe"):
            part, whole = (value[0], value[2]), bare(value[1])
        match whole:
            case ("part", str() as layer, read) if _chain(read) is not None:
                return _Source(layer, read, part, whole)
        return None


def _refuse_factor(value: Expression) -> None:
    if value[0] == "scaled":
        raise NotSwiGLU(f"its forward computes `{value[3]}`, a factor of {value[2]}, which would have to be 1")


def _chain(value: Expression) -> tuple[str, ...] | None:
    """Names of the modules that the input goes through before it is `value`; None for another value."""
    names: list[str] = []
    while value[0] == "part":
        names.insert(0, value[1])
        value = value[2]
    return tuple(names) if value == ("input",) else None


def _joined(gate: _Branch, up: _Branch, down: str, called: Gate) -> DenseRoles | None:
    """The roles of two branches; None where they do not belong together."""
    first, second = gate.source, up.source
    before = _chain(first.read)
    if before is None or down in before:
        return None
    limits = {name: value for name, value in {**gate.said, **up.said}.items() if value is not None}
    try:
        found = checked_gate(called._replace(**limits))
    except ConfigError as error:
        raise NotSwiGLU(f"its gate cannot be computed: {str(error).rstrip('.')}") from error
    if first.part is None and second.part is None:
        if first.layer == second.layer or not (first.read is second.read or first.read == second.read == ("input",)):
            return None
        return DenseRoles((first.layer, second.layer), down, gate.activation, gate=found, before=before)
    if first.part is None or second.part is None or not same(first.whole, second.whole):
        return None
    if first.part[0] != second.part[0] or {first.part[1], second.part[1]} != {0, 1}:
        return None
    roles = DenseRoles((first.layer,), down, gate.activation, gate=found, before=before)
    return replace(roles, up_first=first.part[1] == 1, interleaved=first.part[0] == "stripe")
