"""Reads from a class's source what a dense MLP computes.

A numeric probe cannot see a multiplier that happens to be 1, a dropout in eval mode or a clamp with wide limits, so a
module is patched only if its ``forward`` *is* ``down(act(gate(x)) * up(x))``. The function's statements are
substituted into one expression, whose form is then compared; names of attributes and variables do not matter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from hf_neuron_moe.modules.swiglu_mlp import DenseRoles

_EXPECTED = "expected down_proj(act_fn(gate_proj(x)) * up_proj(x))"


class NotSwiGLU(ValueError):  # noqa: N818 -- not an error of the program: the answer "no", with the reason
    """The source is not a form this module knows; the message says what it met."""


_Expression = tuple[Any, ...]
"""What an expression of the source stands for:

("input",)                 the argument of forward
("part", name, argument)   ``self.<name>(argument)``; name None is a direct call of ``torch.nn.functional.silu``
("product", left, right)   ``left * right``
("sigmoid", argument)      ``torch.sigmoid(argument)``
("half", whole, index)     first (0) or second (1) half of a tensor along its last dimension
("halves", whole)          ``whole.chunk(2, dim=-1)``, or a split by a size that is found to be half of it
"""


@cache
def dense_roles(forward: Callable[..., Any], inert: frozenset[str] = frozenset()) -> DenseRoles:
    """Return which attribute plays which part in a SwiGLU `forward`, the function as found on the class.

    `inert` are the names of the instance's attributes that are a dropout of 0.
    """
    function = _parsed(forward)
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = len(names) - len(arguments.defaults) + sum(default is None for default in arguments.kw_defaults)
    if len(names) < 2 or needed > 2:
        raise NotSwiGLU(f"its forward takes ({ast.unparse(arguments)}), not one tensor")
    extra = [*names[2:], *(a.arg for a in (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if a is not None)]
    scope = {name: value for name, value in forward.__globals__.items() if name not in extra}
    reader = _Reader(names[0], inert, scope, {names[1]: ("input",)})
    roles = _match(reader.run(function.body))
    if len(reader.half_sizes) > 1:
        raise NotSwiGLU(f"its forward splits by {' and '.join(sorted(map(str, reader.half_sizes)))}")
    half_size = next(iter(reader.half_sizes), None)
    return replace(roles, half_size=half_size, extra_arguments=bool(extra), inert=tuple(sorted(reader.skipped)))


def _parsed(forward: Callable[..., Any]) -> ast.FunctionDef:
    if hasattr(forward, "__wrapped__"):
        raise NotSwiGLU("its forward is wrapped by a decorator")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError) as error:
        raise NotSwiGLU(f"the source of its forward is not available ({type(error).__name__})") from error
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise NotSwiGLU("its forward is not a plain function")
    if function.decorator_list:
        raise NotSwiGLU(f"its forward is decorated with @{ast.unparse(function.decorator_list[0])}")
    return function


@dataclass
class _Reader:
    """Substitutes straight-line assignments into the returned expression."""

    own: str  # the name of self
    inert: frozenset[str]
    scope: dict[str, Any]
    values: dict[str, _Expression]
    skipped: set[str] = field(default_factory=set)  # attributes of `inert` that were met
    half_sizes: set[str | int] = field(default_factory=set)  # attributes and numbers that a tensor is split by

    def run(self, body: list[ast.stmt]) -> _Expression:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self.evaluate(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.values[name] = self.evaluate(value)
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value):
                    kind, *whole = self.evaluate(value)
                    if kind != "halves":
                        raise NotSwiGLU(f"its forward unpacks `{_line(value)}`")
                    self.values[first], self.values[second] = ("half", *whole, 0), ("half", *whole, 1)
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value)
                case _:
                    raise NotSwiGLU(f"its forward has the statement `{_line(statement)}`, {_EXPECTED}")
        raise NotSwiGLU("its forward returns nothing")

    def evaluate(self, node: ast.expr) -> _Expression:
        match node:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return _product(self.evaluate(left), self.evaluate(right))
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as index)) if index in (0, 1):
                kind, *whole = self.evaluate(value)
                if kind == "halves":
                    return ("half", *whole, index)
            case ast.Call(func=ast.Attribute(ast.Name(self.own), part), args=[argument], keywords=[]):
                if part not in self.inert:
                    return ("part", part, self.evaluate(argument))
                self.skipped.add(part)
                return self.evaluate(argument)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = self.resolve(function)
                if called is None and isinstance(function, ast.Attribute) and function.attr in _METHODS:
                    called, arguments = _METHODS[function.attr], [function.value, *arguments]
                found = self.call(called, arguments, keywords)
                if found is not None:
                    return found
        raise NotSwiGLU(f"its forward computes `{_line(node)}`, {_EXPECTED}")

    def call(self, function: object, arguments: list[ast.expr], keywords: list[ast.keyword]) -> _Expression | None:
        """What a call of a function computes whose first argument is a tensor; None if that is not known."""
        if not arguments:
            return None
        whole, *rest = arguments
        alone = not rest and not keywords
        if function in _SIGMOIDS and alone:
            return ("sigmoid", self.evaluate(whole))
        if function is F.silu and alone:
            return ("part", None, self.evaluate(whole))
        if function is F.dropout and self.is_inert_dropout(rest, keywords):
            return self.evaluate(whole)
        if function is torch.split and self.is_split_in_two(rest, keywords):
            return ("halves", self.evaluate(whole))
        if function is torch.chunk:
            given = {name: ast.unparse(node) for name, node in _bound(("chunks", "dim"), rest, keywords).items()}
            return ("halves", self.evaluate(whole)) if given == {"chunks": "2", "dim": "-1"} else None
        return None

    def attribute(self, node: ast.expr | None) -> str | None:
        """The name in ``self.<name>``; None for anything else."""
        match node:
            case ast.Attribute(value=ast.Name(id=self.own), attr=attr):
                return attr
        return None

    def is_inert_dropout(self, rest: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Whether the arguments after the tensor are a probability of 0 and ``training=self.training``."""
        given = _bound(("p", "training"), rest, keywords)
        if given.keys() != {"p", "training"} or self.attribute(given["training"]) != "training":
            return False
        probability = given["p"]
        name = self.attribute(probability)
        if name in self.inert:
            self.skipped.add(name)
            return True
        return isinstance(probability, ast.Constant) and probability.value == 0

    def is_split_in_two(self, rest: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Whether a tensor is split along its last dimension by one size, which the instance has to confirm.

        The size is ``self.<size>`` or a number.
        """
        given = _bound(("size", "dim"), rest, keywords)
        size = given.pop("size", None) or given.pop("split_size_or_sections", None) or given.pop("split_size", None)
        both = size.elts if isinstance(size, ast.List | ast.Tuple) and len(size.elts) == 2 else [size]
        names = {_number(one) or self.attribute(one) for one in both}
        name = names.pop()
        if names or name is None or given.keys() != {"dim"} or ast.unparse(given["dim"]) != "-1":
            return False
        self.half_sizes.add(name)
        return True

    def resolve(self, node: ast.expr) -> object:
        """The object a dotted global name stands for, or None."""
        if isinstance(node, ast.Name) and node.id not in self.values:
            return self.scope.get(node.id)
        return getattr(self.resolve(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


_SIGMOIDS = (torch.sigmoid, F.sigmoid)
_METHODS = {"sigmoid": torch.sigmoid, "split": torch.split, "chunk": torch.chunk}
"""Functions by the name of the tensor method that computes the same."""


def _product(left: _Expression, right: _Expression) -> _Expression:
    """``left * right``; ``g * sigmoid(g)`` is SiLU."""
    for one, other in ((left, right), (right, left)):
        if other == ("sigmoid", one):
            return ("part", None, one)
    return ("product", left, right)


def _number(node: ast.expr | None) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _bound(names: tuple[str, str], rest: list[ast.expr], keywords: list[ast.keyword]) -> dict[str | None, ast.expr]:
    """Return the arguments after the tensor by name; none where there are more than `names`."""
    if len(rest) > len(names):
        return {}
    return dict[str | None, ast.expr](zip(names, rest)) | {keyword.arg: keyword.value for keyword in keywords}


def _line(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _match(result: _Expression) -> DenseRoles:
    match result:
        case ("part", str() as down, ("product", left, right)):
            pass
        case _:
            raise NotSwiGLU(f"its forward is not one projection of a product of two branches, {_EXPECTED}")
    for branches in ((left, right), (right, left)):
        match branches:
            case ("part", act, ("part", str() as gate, ("input",))), ("part", str() as up, ("input",)) if gate != up:
                return DenseRoles((gate, up), down, act)
            case ("part", act, ("half", ("part", str() as gate, ("input",)) as whole, 0)), ("half", other, 1) if (
                other == whole
            ):
                return DenseRoles((gate,), down, act)
            case ("part", _, ("half", whole, 1)), ("half", other, 0) if other == whole:
                raise NotSwiGLU("its forward has up in the first half of a fused projection, the gate in the second")
    raise NotSwiGLU("its forward is not down(act(gate(x)) * up(x))")
