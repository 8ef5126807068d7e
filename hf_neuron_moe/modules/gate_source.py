"""Reads from source which gate a module's method applies to its joint projection, as a :class:`Gate`.

The method takes one tensor, gate and up side by side, and returns the intermediate. Its statements are substituted into
one expression, whose form is then matched. Numbers are read from the instance; what was read is part of the answer, so
that a block can compare it at each call. Submodules that are no known activation are read by their own ``forward``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from hf_neuron_moe.backends.gate import Gate, checked_gate
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules.gate_expression import (
    TENSORS,
    Expression,
    UnknownForm,
    clamped,
    holds,
    line_of,
    over,
    times,
    two,
    with_number,
)
from hf_neuron_moe.modules.gate_match import match_gate
from hf_neuron_moe.modules.structure import (
    attribute_of,
    describe_activation,
    gate_of,
    has_call_hooks,
    is_inert,
    supported_activations,
)


class GateSource(NamedTuple):
    """What a method computes, and what that depends on."""

    gate: Gate
    interleaved: bool  # whether columns of gate and up alternate
    activation: str | None  # attribute that is called as the activation; None where a function is
    constants: tuple[tuple[str, Any], ...]  # attributes that were read, by their path, with their values; of modules
    # whose forward was read, the class


_FLOAT32 = (torch.float32, torch.float)
_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    torch.special.expit: "sigmoid",
    torch.exp: "exp",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.clamp: "clamp",
    torch.clip: "clamp",
    torch.clamp_max: "clamp_max",
    torch.clamp_min: "clamp_min",
    torch.chunk: "chunk",
    torch.split: "split",
    torch.unbind: "unbind",
    torch.mul: "mul",
    F.dropout: "dropout",
}
_METHODS = {name: name for name in ("sigmoid", "tanh", "exp", "clamp", "clamp_max", "clamp_min", "mul", "to")}
_METHODS |= {name: name for name in ("chunk", "split", "unflatten", "unbind")}
_METHODS |= {"clip": "clamp", "float": "itself", "contiguous": "itself"}


def read_gate(module: nn.Module, method: Callable[..., Any]) -> GateSource:
    """Return the gate of `method`, a function found on the class of `module`; raise :class:`UnknownForm`."""
    reader = _Reader(module)
    result = reader.call(method, module, "", [("input",)])
    gate, interleaved = match_gate(result)
    try:
        checked_gate(gate)
    except ConfigError as error:
        raise UnknownForm(f"its gate defines no function: {str(error).rstrip('.')}") from error
    return GateSource(gate, interleaved, reader.activation, tuple(reader.constants.items()))


@cache
def parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return the syntax tree of a plain function; raise :class:`UnknownForm`."""
    free = set(getattr(getattr(function, "__code__", None), "co_freevars", ())) - {"__class__"}
    if hasattr(function, "__wrapped__") or free:  # what it calls is elsewhere than its source and its module say
        what = (
            "wraps another function" if not free else f"has variables of an outer function: {', '.join(sorted(free))}"
        )
        raise UnknownForm(f"{getattr(function, '__qualname__', 'a method')} {what}")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        name = getattr(function, "__qualname__", "a method")
        raise UnknownForm(f"the source of {name} is not available ({type(error).__name__})") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        raise UnknownForm(f"{getattr(function, '__qualname__', 'a method')} is not a plain function")
    return definition


@dataclass
class _Reader:
    """Follows the calls; notes the activation and the constants of the instance."""

    root: nn.Module
    activation: str | None = None
    constants: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], module: nn.Module, path: str, given: list[Expression]) -> Expression:
        definition = parsed(function)
        own, *names = (argument.arg for argument in definition.args.args)
        if len(names) != len(given) or definition.args.vararg or definition.args.kwonlyargs or definition.args.kwarg:
            raise UnknownForm(f"{function.__qualname__} takes ({ast.unparse(definition.args)})")
        arguments = dict(zip(names, given))
        frame = _Frame(self, module, path, own, arguments, function.__globals__, tuple(given))
        return frame.run(definition.body)


@dataclass
class _Frame:
    """One function's statements and names."""

    reader: _Reader
    module: nn.Module
    path: str  # of the module within the one that is read, with a dot at the end
    own: str  # the name of self
    values: dict[str, Expression]
    scope: dict[str, Any]
    given: tuple[Expression, ...]  # the arguments, which the caller has too

    def run(self, body: list[ast.stmt]) -> Expression:
        result = self.run_block(body)
        if result is None:
            raise UnknownForm("its gate returns nothing")
        return result

    def run_block(self, body: list[ast.stmt]) -> Expression | None:
        """What the statements return; None where they return nothing."""
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self.evaluate(value)
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value):
                    self.values[first], self.values[second] = two(self.evaluate(value), value)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    changed, after = self.evaluate(target), self.evaluate(ast.BinOp(target, op, value))
                    # Halves are views of one tensor, and the caller goes on with its arguments.
                    if changed[0] not in TENSORS - {"input", "half"} or changed in self.given:
                        raise UnknownForm(f"its gate has the statement `{line_of(statement)}`")
                    kept = {each: held for each, held in self.values.items() if not holds(held, changed)}
                    self.values = kept | {name: after}
                case ast.If(test=test, body=then, orelse=otherwise):
                    if (result := self.run_block(then if self.decides(test) else otherwise)) is not None:
                        return result
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value)
                case _:
                    raise UnknownForm(f"its gate has the statement `{line_of(statement)}`")
        return None

    def decides(self, test: ast.expr) -> bool:
        """Whether a condition holds that numbers of the instance decide, or their absence."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.decides(operand)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                value = self.evaluate(left)
                return (value == ("number", None)) is isinstance(op, ast.Is)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == self.own:
                if attr != "training" and type(flag := self.attribute(attr)) is bool:
                    self.reader.constants[self.path + attr] = flag
                    return flag
                return bool(self.constant(attr)[1])
        raise UnknownForm(f"its gate depends on `{line_of(test)}`")

    def evaluate(self, node: ast.expr) -> Expression:
        match node:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Constant(value=int() | float() | None as value) if not isinstance(value, bool):
                return ("number", value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                negated = self.evaluate(operand)
                if negated[0] == "number" and negated[1] is not None:
                    return ("number", -negated[1])
                return times(negated, ("number", -1), node)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                self.values[name] = self.evaluate(value)
                return self.values[name]
            case ast.Tuple(elts=[first, second]):
                return ("pair", self.evaluate(first), self.evaluate(second))
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == self.own:
                return self.constant(attr)
            case ast.Attribute(value=value, attr="dtype") if self.tensor(value):
                return ("dtype",)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=2)) if self.is_width(left):
                return ("middle",)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return times(self.evaluate(left), self.evaluate(right), node)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return over(self.evaluate(left), self.evaluate(right), node)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = sorted((self.evaluate(left), self.evaluate(right)), key=lambda part: part[0] == "number")
                for (kind, *factors), other in (parts, parts[::-1]):
                    if kind == "product" and other in factors:  # f * up + f
                        return ("product", other, ("plus", factors[factors[0] == other], 1))
                return with_number("plus", parts[0], parts[1], node)
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                return self.evaluate(then if self.decides(test) else otherwise)
            case ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Constant(value=types.EllipsisType()), columns])):
                start = {"::2": 0, "1::2": 1}.get(ast.unparse(columns))
                if start is not None and self.evaluate(value) == ("input",):
                    return ("half", start, True)
                match columns:
                    case ast.Slice(lower=None, upper=ast.expr() as end, step=None):
                        place, at = 0, self.evaluate(end)
                    case ast.Slice(lower=ast.expr() as begin, upper=None, step=None):
                        place, at = 1, self.evaluate(begin)
                    case _:
                        raise UnknownForm(f"its gate computes `{line_of(node)}`")
                if self.is_middle(at) and self.evaluate(value) == ("input",):
                    return ("half", place, False)
            case ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp() as index):
                place = self.evaluate(index)[1]
                if place in (0, 1, -1, -2):
                    return two(self.evaluate(value), value)[place]
            case ast.Call():
                return self.evaluate_call(node)
        raise UnknownForm(f"its gate computes `{line_of(node)}`")

    def evaluate_call(self, node: ast.Call) -> Expression:
        arguments, function = list(node.args), node.func
        if isinstance(function, ast.Attribute) and getattr(function.value, "id", None) == self.own:
            if node.keywords:
                raise UnknownForm(f"its gate computes `{line_of(node)}`")
            return self.child(function.attr, [self.evaluate(argument) for argument in arguments], node)
        called = self.resolve(function)
        name = _FUNCTIONS.get(called) if callable(called) else None
        if called is None and isinstance(function, ast.Attribute):
            name, arguments = _METHODS.get(function.attr), [function.value, *arguments]
        if called is F.gelu and len(arguments) == 1:
            match node.keywords:
                case [ast.keyword(arg="approximate", value=ast.Constant(value=str() as how))]:
                    return self.activate(nn.GELU(how), self.evaluate(arguments[0]), node)
        if called is not None and name is None and len(arguments) == 1 and not node.keywords:
            return self.activate(called, self.evaluate(arguments[0]), node)
        keywords = {str(keyword.arg): keyword.value for keyword in node.keywords}
        found = None if name is None else self.known(name, arguments, keywords)
        if found is None:
            raise UnknownForm(f"its gate computes `{line_of(node)}`")
        return found

    def known(self, name: str, arguments: list[ast.expr], keywords: dict[str, ast.expr]) -> Expression | None:
        """What a call of a tensor function computes; None if that is not known."""
        if name == "dropout":  # whether it is training decides nothing where nothing is dropped
            share = arguments[1] if len(arguments) > 1 else keywords.get("p") if arguments else None
            none = share is not None and self.evaluate(share) == ("number", 0)
            return self.evaluate(arguments[0]) if none else None
        if not arguments:
            return None  # a tensor that is given by name
        x, *rest = map(self.evaluate, arguments)
        if name in ("chunk", "split", "unflatten", "unbind"):
            return self.halves(name, x, rest, keywords)
        if x[0] not in TENSORS:
            return None
        if name in ("sigmoid", "tanh", "exp", "itself"):
            plain = not rest and not keywords
            return None if not plain else x if name == "itself" else (name, x)
        if name == "mul" and len(rest) == 1 and not keywords:
            return times(x, rest[0], arguments[0])
        if name == "clamp" and len(rest) <= 2 and keywords.keys() <= {"min", "max"}:
            given = dict(zip(("min", "max"), rest)) | {key: self.evaluate(value) for key, value in keywords.items()}
            low, high = (given.get(key, ("number", None)) for key in ("min", "max"))
            return clamped(x, low[1], high[1]) if low[0] == high[0] == "number" else None
        if name in ("clamp_max", "clamp_min") and len(rest) == 1 and rest[0][0] == "number" and not keywords:
            limits = (None, rest[0][1]) if name == "clamp_max" else (rest[0][1], None)
            return clamped(x, *limits)
        if name == "to" and len(arguments) == 2 and not keywords:
            return x if rest[0] == ("dtype",) else None
        return None

    def halves(
        self, name: str, x: Expression, rest: list[Expression], keywords: dict[str, ast.expr]
    ) -> Expression | None:
        """What a call computes that cuts the joint projection, or counts the parts of its columns; None if unknown."""
        names = {"chunk": ("chunks", "dim"), "split": ("split_size", "dim"), "unflatten": ("dim", "sizes")}
        places = names.get(name, ("dim",))
        said = {key.removesuffix("_or_sections"): self.evaluate(value) for key, value in keywords.items()}
        given = dict(zip(places, rest)) | said
        last = given.get("dim") == ("number", -1) and given.keys() == set(places) and x == ("input",)
        if name == "chunk":
            return ("halves", False) if last and given["chunks"] == ("number", 2) else None
        if name == "split":
            return ("halves", False) if last and self.is_middle(given["split_size"]) else None
        if name == "unflatten":
            two, others = ("number", 2), ("number", -1)
            alternate = {("pair", two, others): False, ("pair", others, two): True}.get(given.get("sizes", ()))
            return None if alternate is None or not last else ("parts", alternate)
        cut = {("parts", False): -2, ("parts", True): -1}.get(x)
        return ("halves", x[1]) if cut is not None and given == {"dim": ("number", cut)} else None

    def is_width(self, node: ast.expr) -> bool:
        """Whether ``z.shape[-1]`` or ``z.size(-1)`` is the number of columns of the joint projection."""
        match node:
            case ast.Subscript(value=ast.Attribute(value=z, attr="shape"), slice=axis):
                pass
            case ast.Call(func=ast.Attribute(value=z, attr="size"), args=[axis], keywords=[]):
                pass
            case _:
                return False
        return ast.unparse(axis) == "-1" and self.evaluate(z) == ("input",)

    def is_middle(self, number: Expression) -> bool:
        """Whether a number of columns is half of those of a projection of the module."""
        if number == ("middle",):
            return True
        kind, size = number if len(number) == 2 else ("", None)
        params = [param for param in self.reader.root._parameters.values() if param is not None]
        return kind == "number" and any(axis == 2 * (size or 0) != 0 for param in params for axis in param.shape[-2:])

    def constant(self, attr: str) -> Expression:
        value = self.attribute(attr)
        if value is not None and (type(value) not in (int, float) or value != value):
            shown = "NaN" if type(value) is float else describe_activation(value)
            raise UnknownForm(f"its gate reads {self.path}{attr}, {shown}, not a number")
        self.reader.constants[self.path + attr] = value
        return ("number", value)

    def attribute(self, attr: str) -> Any:
        """An attribute of the module; None where it has none of this name."""
        try:
            return attribute_of(self.module, attr)
        except AttributeError:
            return None

    def child(self, attr: str, given: list[Expression], node: ast.expr) -> Expression:
        """What ``self.<attr>(...)`` computes."""
        called: Any = getattr(self.module, attr, None)
        if isinstance(called, nn.Dropout | nn.Identity) and is_inert(called) and len(given) == 1:
            self.reader.constants[self.path + attr] = type(called)
            if isinstance(called, nn.Dropout):
                self.reader.constants[f"{self.path}{attr}.p"] = called.p
            return given[0]
        if gate_of(called) is None and isinstance(called, nn.Module):
            own_call = "forward" in called.__dict__ or type(called).__call__ is not nn.Module.__call__
            if own_call or has_call_hooks(called) or called._parameters or called._buffers:
                raise UnknownForm(f"its {self.path}{attr} has parameters, hooks or a forward of its own")
            self.reader.constants[self.path + attr] = type(called)
            forward = type(called).forward
            alone = not self.path and len(given) == 1  # an activation of the gate only, which has no row
            if alone or len(given) != len(inspect.signature(forward).parameters) - 1 or hasattr(forward, "__wrapped__"):
                raise UnknownForm(_unknown_activation(called))
            try:
                return self.reader.call(forward, called, f"{self.path}{attr}.", given)
            except UnknownForm as answer:
                raise UnknownForm(f"{_unknown_activation(called)} ({answer})") from answer
        if len(given) != 1 or self.reader.activation not in (None, self.path + attr):
            raise UnknownForm(f"its gate computes `{line_of(node)}`")
        found = self.activate(called, given[0], node)
        if isinstance(called, nn.Module) and has_call_hooks(called):
            raise UnknownForm(f"its {attr} has hooks, which the operator would not call")
        self.reader.activation = self.path + attr
        return found

    def activate(self, called: object, x: Expression, node: ast.expr) -> Expression:
        gate = gate_of(called)
        if gate is None:
            raise UnknownForm(_unknown_activation(called))
        if x[0] not in TENSORS:
            raise UnknownForm(f"its gate computes `{line_of(node)}`")
        return ("act", gate.act, gate.alpha, x)

    def tensor(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and self.values.get(node.id, ("",))[0] in TENSORS

    def resolve(self, node: ast.expr) -> Any:
        """The object a dotted global name stands for, or None."""
        if isinstance(node, ast.Name):
            return None if node.id in self.values else self.scope.get(node.id)
        return getattr(self.resolve(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


def _unknown_activation(called: object) -> str:
    return f"its activation is {describe_activation(called)}, the kernels have {supported_activations()}"
