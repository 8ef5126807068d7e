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
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from hf_neuron_moe.modules.swiglu_mlp import DenseRoles

_EXPECTED = "expected down_proj(act_fn(gate_proj(x)) * up_proj(x))"


class NotSwiGLU(ValueError):  # noqa: N818 -- not an error of the program: the answer "no", with the reason
    """The source is not a form this module knows; the message says what it met."""


@dataclass(frozen=True)
class Input:
    """The argument of forward."""


@dataclass(frozen=True)
class Part:
    """``self.<name>(argument)``; name None is a direct call of ``torch.nn.functional.silu``."""

    name: str | None
    argument: Expression


@dataclass(frozen=True)
class Product:
    """``left * right``."""

    left: Expression
    right: Expression


@dataclass(frozen=True)
class Sigmoid:
    """``torch.sigmoid(argument)``."""

    argument: Expression


@dataclass(frozen=True)
class Half:
    """First (0) or second (1) half of a tensor along its last dimension."""

    whole: Expression
    index: int


@dataclass(frozen=True)
class Halves:
    """``whole.chunk(2, dim=-1)``, or a split by a size that is found to be half of it."""

    whole: Expression


Expression = Input | Part | Product | Sigmoid | Half | Halves


@cache
def dense_roles(forward: Callable[..., Any], inert: frozenset[str] = frozenset()) -> DenseRoles:
    """Return which attribute plays which part in a SwiGLU `forward`.

    Args:
        forward: the function as found on the class.
        inert: names of the instance's attributes that are a dropout of 0.
    """
    reader, body = _reader(forward, inert)
    roles = _match(reader.run(body))
    if len(reader.half_sizes) > 1:
        raise NotSwiGLU(f"its forward splits by {' and '.join(sorted(map(str, reader.half_sizes)))}")
    half_size = next(iter(reader.half_sizes), None)
    return replace(roles, half_size=half_size, extra_arguments=reader.extra, inert=tuple(sorted(reader.skipped)))


def _reader(forward: Callable[..., Any], inert: frozenset[str]) -> tuple[_Reader, list[ast.stmt]]:
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
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = len(names) - len(arguments.defaults) + sum(default is None for default in arguments.kw_defaults)
    if len(names) < 2 or needed > 2:
        raise NotSwiGLU(f"its forward takes ({ast.unparse(arguments)}), not one tensor")
    extra = [*names[2:], *(a.arg for a in (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if a is not None)]
    scope = {name: value for name, value in forward.__globals__.items() if name not in extra}
    return _Reader(names[0], {names[1]: Input()}, scope, bool(extra), inert), function.body


class _Reader:
    """Substitutes straight-line assignments into the returned expression."""

    def __init__(
        self, own: str, values: dict[str, Expression], scope: dict[str, Any], extra: bool, inert: frozenset[str]
    ) -> None:
        self.own = own
        self.values = values
        self.scope = scope
        self.extra = extra
        self.inert = inert
        self.skipped = set[str]()  # attributes of `inert` that were met
        self.half_sizes = set[str | int]()  # attributes and numbers that a tensor is split by

    def run(self, body: list[ast.stmt]) -> Expression:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self.evaluate(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.values[name] = self.evaluate(value)
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value):
                    halves = self.evaluate(value)
                    if not isinstance(halves, Halves):
                        raise NotSwiGLU(f"its forward unpacks `{_line(value)}`")
                    self.values[first], self.values[second] = Half(halves.whole, 0), Half(halves.whole, 1)
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value)
                case _:
                    raise NotSwiGLU(f"its forward has the statement `{_line(statement)}`, {_EXPECTED}")
        raise NotSwiGLU("its forward returns nothing")

    def evaluate(self, node: ast.expr) -> Expression:
        match node:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return _product(self.evaluate(left), self.evaluate(right))
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as index)) if index in (0, 1):
                halves = self.evaluate(value)
                if isinstance(halves, Halves):
                    return Half(halves.whole, index)
            case ast.Call(func=ast.Attribute(ast.Name(self.own), part), args=[argument], keywords=[]):
                if part not in self.inert:
                    return Part(part, self.evaluate(argument))
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

    def call(self, function: object, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Expression | None:
        """What a call of a function computes whose first argument is a tensor; None if that is not known."""
        if not arguments:
            return None
        whole, *rest = arguments
        alone = not rest and not keywords
        if function in _SIGMOIDS and alone:
            return Sigmoid(self.evaluate(whole))
        if function is F.silu and alone:
            return Part(None, self.evaluate(whole))
        if function is F.dropout and self.is_inert_dropout(rest, keywords):
            return self.evaluate(whole)
        if function is torch.split and self.is_split_in_two(rest, keywords):
            return Halves(self.evaluate(whole))
        if function is torch.chunk and _is_halves(rest, keywords):
            return Halves(self.evaluate(whole))
        return None

    def attribute(self, node: ast.expr | None) -> str | None:
        """The name in ``self.<name>``; None for anything else."""
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if owner == self.own:
                return attr
            case _:
                return None

    def is_inert_dropout(self, rest: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Whether the arguments after the tensor are a probability of 0 and ``training=self.training``."""
        given = dict(zip(("p", "training"), rest)) | {keyword.arg: keyword.value for keyword in keywords}
        probability = given.get("p")
        name = self.attribute(probability)
        if len(rest) > 2 or given.keys() != {"p", "training"} or self.attribute(given["training"]) != "training":
            return False
        if name in self.inert:
            self.skipped.add(name)
            return True
        return isinstance(probability, ast.Constant) and probability.value == 0

    def is_split_in_two(self, rest: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Whether a tensor is split along its last dimension by one size, which the instance has to confirm.

        The size is ``self.<size>`` or a number.
        """
        given = dict(zip(("size", "dim"), rest)) | {keyword.arg: keyword.value for keyword in keywords}
        size = given.pop("size", None) or given.pop("split_size_or_sections", None) or given.pop("split_size", None)
        both = size.elts if isinstance(size, ast.List | ast.Tuple) and len(size.elts) == 2 else [size]
        names = {_number(one) or self.attribute(one) for one in both}
        name = names.pop()
        if len(rest) > 2 or names or name is None or given.keys() != {"dim"} or ast.unparse(given["dim"]) != "-1":
            return False
        self.half_sizes.add(name)
        return True

    def resolve(self, node: ast.expr) -> object:
        """The object a dotted global name stands for, or None."""
        match node:
            case ast.Name(id=name) if name not in self.values:
                return self.scope.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.resolve(value)
                return None if owner is None else getattr(owner, attr, None)
            case _:
                return None


_SIGMOIDS = (torch.sigmoid, F.sigmoid)
_METHODS = {"sigmoid": torch.sigmoid, "split": torch.split, "chunk": torch.chunk}
"""Functions by the name of the tensor method that computes the same."""


def _product(left: Expression, right: Expression) -> Expression:
    """``left * right``; ``g * sigmoid(g)`` is SiLU."""
    for one, other in ((left, right), (right, left)):
        if other == Sigmoid(one):
            return Part(None, one)
    return Product(left, right)


def _number(node: ast.expr | None) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_halves(rest: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    given = [ast.unparse(node) for node in rest]
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
    sections = given[0] if given else named.pop("chunks", None)
    dim = given[1] if len(given) == 2 else named.pop("dim", None)
    return sections == "2" and dim == "-1" and not named and len(given) <= 2


def _line(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _match(result: Expression) -> DenseRoles:
    if not (isinstance(result, Part) and result.name is not None and isinstance(result.argument, Product)):
        raise NotSwiGLU(f"its forward is not one projection of a product of two branches, {_EXPECTED}")
    down, left, right = result.name, result.argument.left, result.argument.right
    for gated, up in ((left, right), (right, left)):
        match gated, up:
            case Part(name=act, argument=Part(name=str() as g, argument=Input())), Part(
                name=str() as u, argument=Input()
            ) if g != u:
                return DenseRoles((g, u), down, act)
            case Part(name=act, argument=Half(whole=Part(name=str() as g, argument=Input()) as whole, index=0)), Half(
                whole=other, index=1
            ) if other == whole:
                return DenseRoles((g,), down, act)
            case Part(argument=Half(whole=whole, index=1)), Half(whole=other, index=0) if other == whole:
                raise NotSwiGLU("its forward has up in the first half of a fused projection, the gate in the second")
            case _:
                continue
    raise NotSwiGLU("its forward is not down(act(gate(x)) * up(x))")
