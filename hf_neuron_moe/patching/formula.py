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
from dataclasses import dataclass
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
class Half:
    """First (0) or second (1) half of a tensor along its last dimension."""

    whole: Expression
    index: int


@dataclass(frozen=True)
class Halves:
    """``whole.chunk(2, dim=-1)``."""

    whole: Expression


Expression = Input | Part | Product | Half | Halves


@cache
def dense_roles(forward: Callable[..., Any]) -> DenseRoles:
    """Return which attribute plays which part in a SwiGLU `forward`.

    Args:
        forward: the function as found on the class.

    Raises:
        NotSwiGLU: the source is not available or computes something else; the message is the reason.
    """
    return _match(_read(forward))


def _read(forward: Callable[..., Any]) -> Expression:
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
    extra = [*arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    if len(arguments.posonlyargs) + len(arguments.args) != 2 or any(extra):
        raise NotSwiGLU(f"its forward takes ({ast.unparse(arguments)}), not one tensor")
    own, tensor = (argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    return _Reader(own, {tensor: Input()}, forward.__globals__).run(function.body)


class _Reader:
    """Substitutes straight-line assignments into the returned expression."""

    def __init__(self, own: str, values: dict[str, Expression], scope: dict[str, Any]) -> None:
        self.own = own
        self.values = values
        self.scope = scope

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
                return Product(self.evaluate(left), self.evaluate(right))
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as index)) if index in (0, 1):
                halves = self.evaluate(value)
                if isinstance(halves, Halves):
                    return Half(halves.whole, index)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr), args=[argument], keywords=[]) if (
                owner == self.own
            ):
                return Part(attr, self.evaluate(argument))
            case ast.Call(func=function, args=[argument], keywords=[]) if self.resolve(function) is F.silu:
                return Part(None, self.evaluate(argument))
            case ast.Call(func=function, args=[whole, *rest], keywords=keywords) if _is_halves(rest, keywords) and (
                self.resolve(function) is torch.chunk
            ):
                return Halves(self.evaluate(whole))
            case ast.Call(func=ast.Attribute(value=whole, attr="chunk"), args=rest, keywords=keywords) if _is_halves(
                rest, keywords
            ):
                return Halves(self.evaluate(whole))
        raise NotSwiGLU(f"its forward computes `{_line(node)}`, {_EXPECTED}")

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
    match result:
        case Part(name=str() as down, argument=Product(left=left, right=right)):
            pass
        case _:
            raise NotSwiGLU(f"its forward is not one projection of a product of two branches, {_EXPECTED}")
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
            case _:
                continue
    raise NotSwiGLU("its forward is not down(act(gate(x)) * up(x))")
