"""Reads the ``forward`` of a dense MLP as one expression of its input.

Statements are substituted into the returned expression. Branches that an attribute of the instance decides are
followed, and so are calls of functions whose source is plain. What decided the result is noted, for the patched block
to compare at each call. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.patching.source_expressions import Expressions
from hf_neuron_moe.patching.source_functions import parsed, scope_of
from hf_neuron_moe.patching.source_shapes import unpacked
from hf_neuron_moe.patching.source_values import INPUT, Expression, NotSwiGLU, changes_nothing, is_joined

_WATCHING = (torch.profiler.record_function, nullcontext)
"""Contexts that change no tensor."""


def read_forward(forward: Callable[..., Any], module: nn.Module | None) -> tuple[Expression, Reader]:
    """Return what `forward` computes for the instance `module`, and the reader with what it noted.

    Without a module no attribute has a value.
    """
    function = parsed(forward)
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = len(positional) - len(arguments.defaults) + sum(default is None for default in arguments.kw_defaults)
    if len(positional) < 2 or needed > 2:
        raise NotSwiGLU(f"its forward takes ({ast.unparse(arguments)}), not one tensor")
    own, tensor, *further = positional
    places: dict[str, int | None] = {name: place for place, name in enumerate(further)}
    places |= dict.fromkeys(argument.arg for argument in arguments.kwonlyargs)
    given = [*arguments.defaults[len(arguments.defaults) - len(further) :], *arguments.kw_defaults]
    defaults = {name: node.value for name, node in zip(places, given, strict=True) if isinstance(node, ast.Constant)}
    reader = Reader(own, module, scope_of(forward), {tensor: INPUT}, places=places, defaults=defaults)
    reader.extra_arguments = any((places, arguments.vararg, arguments.kwarg))
    result = reader.run(function.body)
    if result is None:
        raise NotSwiGLU("its forward returns nothing")
    if is_joined(result):
        raise NotSwiGLU("its forward returns its result with the leading dimensions joined, not with its input's shape")
    return result, reader


class Reader(Expressions):
    """Substitutes assignments and live branches into the returned expression."""

    def run(self, body: list[ast.stmt]) -> Expression | None:
        """Return what the statements return; None where they do not."""
        for statement in body:
            if self.own in self.values:
                raise self.unknown("reads attributes of another object in", statement)
            self.statement = statement.value if isinstance(statement, ast.Assign) else statement
            match statement:
                case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                    continue
                case ast.Assert(test=test) | ast.If(test=test, body=[ast.Raise()], orelse=[]) if changes_nothing(
                    self, test
                ):
                    continue
                case ast.Delete(targets=targets) if all(isinstance(each, ast.Name) for each in targets):
                    for each in targets:
                        self.values.pop(ast.unparse(each), None)
                case ast.Assign(targets=targets, value=value) if all(isinstance(each, ast.Name) for each in targets):
                    self.values |= dict.fromkeys(map(ast.unparse, targets), self.value(value))
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.values[name] = self.value(value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=value) if (
                    sizes := unpacked(self, names, value)
                ) is not None:
                    self.values |= sizes
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value):
                    self.values[first], self.values[second] = self.two(value)
                case ast.If(test=test, body=[ast.Assign(targets=[ast.Name(id=name)], value=value)], orelse=[]) if (
                    self.casts_for_layer(name, value) and changes_nothing(self, test)
                ):
                    self.values[name] = self.evaluate(value)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    before, after = self.evaluate(target), self.evaluate(ast.BinOp(target, op, value))
                    self.overwrite(before, last=True)
                    self.values[name] = after
                case ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(id=name), method)) as value) if (
                    method.endswith("_")
                ):
                    self.values[name] = self.evaluate(value)
                case ast.If(test=test, body=live, orelse=other):
                    training, rest = self.of_training(test)
                    if training and not other:
                        if all(self.decide(each, statement) for each in rest):
                            self.drop_out(live, statement)
                        continue
                    result = self.run(live if self.decide(test, statement) else other)
                    if result is not None:
                        return result
                case ast.With(items=items, body=within) if all(map(self.only_watches, items)):
                    result = self.run(within)
                    if result is not None:
                        return result
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value)
                case _:
                    raise self.unknown("has the statement", statement)
        return None

    def of_training(self, test: ast.expr) -> tuple[bool, list[ast.expr]]:
        """Whether a condition holds in training only, and what else it asks."""
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        rest = [each for each in parts if self.constants.path(each) != "training"]
        return len(rest) < len(parts), rest

    def drop_out(self, body: list[ast.stmt], statement: ast.AST) -> None:
        """Read statements that run in training only and may do nothing but dropout, which does nothing otherwise."""
        before, self.guarded = dict(self.values), True
        returned = self.run(body)
        self.guarded = False
        changed = {name: value for name, value in self.values.items() if value != before.get(name)}
        if returned is not None or any(
            new[0] != "dropout" or new[2] != before.get(old) for old, new in changed.items()
        ):
            raise self.unknown("has the statement", statement)

    def only_watches(self, item: ast.withitem) -> bool:
        """Whether a context changes no tensor."""
        match item:
            case ast.withitem(ast.Call(function, arguments, []), None):
                return self.resolve(function) in _WATCHING and all(changes_nothing(self, each) for each in arguments)
        return False
