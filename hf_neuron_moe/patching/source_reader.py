"""Reads the ``forward`` of a dense MLP as one expression of its input.

Statements are substituted into the returned expression. Branches that an attribute of the instance decides are
followed; what decided them is noted, for the patched block to compare at each call. Nothing is executed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.modules.structure import is_inert
from hf_neuron_moe.patching.source_calls import CALLS, METHODS
from hf_neuron_moe.patching.source_values import (
    EXPECTED,
    NO_CONSTANT,
    NO_TENSORS,
    Constants,
    Expression,
    NotSwiGLU,
    bare,
    cast_kind,
    changes_nothing,
    line,
    product,
    storage,
)


@cache
def parsed(forward: Callable[..., Any]) -> ast.FunctionDef:
    """Return the syntax tree of a plain function.

    Raises:
        NotSwiGLU: it is not plain, or its source is not available.
    """
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
    by_keyword = [argument.arg for argument in arguments.kwonlyargs]
    variadic = [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    places: dict[str, int | None] = {name: place for place, name in enumerate(positional[2:])}
    places |= dict.fromkeys(by_keyword)
    given = [*arguments.defaults[len(arguments.defaults) - len(positional[2:]) :], *arguments.kw_defaults]
    defaults = {name: node.value for name, node in zip(places, given, strict=True) if isinstance(node, ast.Constant)}
    hidden = {*places, *variadic}
    scope = {name: value for name, value in forward.__globals__.items() if name not in hidden}
    reader = Reader(positional[0], module, scope, {positional[1]: ("input",)}, places, defaults)
    reader.constants = Constants(positional[0], module, reader.values)
    reader.extra_arguments = bool(hidden)
    result = reader.run(function.body)
    if result is None:
        raise NotSwiGLU("its forward returns nothing")
    return result, reader


_PRODUCTS = frozenset({"mul", "mul_", "multiply", "glu", "einsum", "addcmul", "prod"})
"""Names of functions that may multiply two branches."""


@cache
def multiplies_branches(forward: Callable[..., Any]) -> bool:
    """Return whether a forward may multiply two values that both depend on its arguments, not as its result.

    It may where its source is not available, or where it multiplies by a function of one of the names above.
    """
    try:
        function = parsed(inspect.unwrap(forward))
    except NotSwiGLU:
        return True
    arguments = function.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args[1:], *arguments.kwonlyargs)}
    assigned = (each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    depends = names | {each.id for each in assigned}

    def is_branch(node: ast.expr) -> bool:
        return any(isinstance(each, ast.Name) and each.id in depends for each in ast.walk(node))

    results = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
    returned = {part for each in results for part in (each.elts if isinstance(each, ast.Tuple) else [each])}
    for node in ast.walk(function):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if is_branch(left) and is_branch(right):
                if node not in returned:
                    return True
            case ast.AugAssign(op=ast.Mult(), value=value) if is_branch(value):
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _PRODUCTS:
                return True
    return False


@dataclass
class Reader:
    """Substitutes assignments and live branches into the returned expression."""

    own: str  # the name of self
    module: nn.Module | None
    scope: dict[str, Any]
    values: dict[str, Expression]
    places: dict[str, int | None]  # of further arguments, see DenseRoles.fixed_arguments
    defaults: dict[str, Any]
    constants: Constants = field(init=False)
    half_sizes: set[str | int] = field(default_factory=set)  # attributes and numbers that a tensor is split by
    fixed: set[str] = field(default_factory=set)  # further arguments that decided a branch
    extra_arguments: bool = False
    rank: int | None = None  # number of the input's dimensions, where the source counts them from the first
    overwrites: bool = False
    statement: ast.AST | None = None  # the one that is read, without the names that it assigns

    def run(self, body: list[ast.stmt]) -> Expression | None:
        """Return what the statements return; None where they do not."""
        for statement in body:
            self.statement = statement.value if isinstance(statement, ast.Assign) else statement
            match statement:
                case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assign(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.assign(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])], value=value):
                    self.values[first], self.values[second] = self.two(value)
                case ast.Assign(
                    targets=[ast.Tuple(elts=names)], value=ast.Attribute(value=ast.Name(id=tensor), attr="shape")
                ) if tensor in self.values and all(isinstance(each, ast.Name) for each in names):
                    sizes = {ast.unparse(each): place - len(names) for place, each in enumerate(names)}
                    whole = self.values[tensor]
                    self.values |= {name: ("size", whole, place) for name, place in sizes.items()}
                case ast.If(test=test, body=[ast.Assign(targets=[ast.Name(id=name)], value=value)], orelse=[]) if (
                    self.casts_for_layer(name, value) and changes_nothing(test)
                ):
                    continue
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    before, after = self.evaluate(target), self.evaluate(ast.BinOp(target, op, value))
                    self.overwrite(before, last=True)
                    self.values[name] = after
                case ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(id=name), method)) as value) if (
                    method.endswith("_")
                ):
                    self.values[name] = self.evaluate(value)
                case ast.If(test=test, body=live, orelse=other):
                    result = self.run(live if self.decide(test, statement) else other)
                    if result is not None:
                        return result
                case ast.Return(value=ast.expr() as value):
                    return self.evaluate(value)
                case _:
                    raise NotSwiGLU(f"its forward has the statement `{line(statement)}`, {EXPECTED}")
        return None

    def assign(self, name: str, value: ast.expr) -> None:
        """Note the value of a local variable: an expression of the input, or the dtype of one."""
        match value:
            case ast.Attribute(value=ast.Name(id=tensor), attr="dtype") if tensor in self.values:
                self.values[name] = ("dtype", cast_kind(self.values[tensor]))
                return
        whole = self.halved(value)
        if whole is not None:
            self.values[name] = ("half_size", whole)
            return
        known = self.constants.of(value)
        self.values[name] = self.evaluate(value) if known is NO_CONSTANT else ("constant", known)

    def overwrite(self, value: Expression, last: bool = False) -> None:
        """Note that the statement writes into the tensor `value`, after anything else that it does with `last`.

        Raises:
            NotSwiGLU: the tensor is or may be the caller's, or the statement has an older reference to it.
        """
        tensor = storage(value, self.module)
        names = {name for name, held in self.values.items() if storage(held, self.module) == tensor}
        assert self.statement is not None
        used = [each for each in ast.walk(self.statement) if isinstance(each, ast.Name) and each.id in names]
        if tensor == ("input",) or (len(used) > 1 and not last):
            what = "its input" if tensor == ("input",) else "a tensor that it reads"
            raise NotSwiGLU(f"its forward may change {what} in place: `{line(self.statement)}`")
        self.values |= dict.fromkeys(names, ("overwritten",))
        self.overwrites = True

    def casts_for_layer(self, name: str, value: ast.expr) -> bool:
        """Whether `value` is ``name.to(self.<layer>.weight.dtype)`` of a layer's result.

        All layers have one dtype, so only autocast makes another one, in which it calls the next layer anyway.
        """
        match value:
            case ast.Call(ast.Attribute(ast.Name(id=cast), "to"), [ast.Attribute(weight, "dtype")], []):
                layer, _, leaf = (self.constants.path(weight) or "").rpartition(".")
                known = self.module is not None and isinstance(self.module._modules.get(layer), nn.Linear)
                read = bare(self.values.get(name, ("input",)))[0]
                return known and leaf == "weight" and name == cast and read in ("part", "product", "dropout")
        return False

    def two(self, node: ast.expr) -> tuple[Expression, Expression]:
        """What two variables get."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            return self.evaluate(node.elts[0]), self.evaluate(node.elts[1])
        whole = bare(self.evaluate(node))
        if whole[0] != "pair":
            raise NotSwiGLU(f"its forward unpacks `{line(node)}`")
        return (whole[1], whole[2], 0), (whole[1], whole[2], 1)

    def decide(self, test: ast.expr, statement: ast.AST) -> bool:
        """Whether a branch is live, by constants and by defaults of further arguments."""
        names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} & self.defaults.keys()
        defaults = {name: self.defaults[name] for name in names if name not in self.values}
        known = self.constants.of(test, defaults)
        if known is NO_CONSTANT:
            raise NotSwiGLU(f"its forward has the statement `{line(statement)}`, {EXPECTED}")
        self.fixed |= defaults.keys()
        return bool(known)

    def evaluate(self, node: ast.expr) -> Expression:
        """Return what an expression of the source stands for."""
        found: Expression | None = None
        match node:
            case ast.Name(id=name) if name in self.values and self.values[name][0] not in NO_TENSORS:
                return self.values[name]
            case ast.Call(func=ast.Attribute(ast.Name(id=name), "to")) if self.casts_for_layer(name, node):
                return ("cast", self.values[name], "float")
            case ast.IfExp(test=test, body=live, orelse=other):
                return self.evaluate(live if self.decide(test, node) else other)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                found = self.multiply(left, right)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = self.add(left, right)
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                found = self.call(torch.matmul, [left, right], [])
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                found = self.call(torch.div, [left, right], [])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = bare(self.evaluate(operand))
                whole, factor = value[1:3] if value[0] == "scaled" else (value, 1)
                found = ("scaled", whole, -factor, line(node))
            case ast.NamedExpr(target=ast.Name(id=name) as target, value=value):
                self.assign(name, value)
                return self.evaluate(target)
            case ast.Subscript(value=value, slice=index):
                found = self.subscript(value, index)
            case ast.Call(func=ast.Attribute(ast.Name(self.own), part), args=[argument], keywords=[]):
                found = self.part(part, argument)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = self.resolve(function)
                method = function.attr.removesuffix("_") if isinstance(function, ast.Attribute) else ""
                if called is None and isinstance(function, ast.Attribute) and method in METHODS:
                    called, arguments = METHODS[method], [function.value, *arguments]
                found = self.call(called, arguments, keywords)
                if found is not None and isinstance(function, ast.Attribute) and function.attr == f"{method}_":
                    self.overwrite(self.evaluate(function.value))
        if found is None:
            raise NotSwiGLU(f"its forward computes `{line(node)}`, {EXPECTED}")
        return found

    def part(self, name: str, argument: ast.expr) -> Expression | None:
        """``self.<name>(argument)``: a module or function of the instance; not a method of its class."""
        if self.module is not None and name not in self.module._modules and name not in self.module.__dict__:
            return None
        child = None if self.module is None else self.module._modules.get(name)
        kind = "dropout" if type(child) is nn.Dropout or is_inert(child) else "part"
        return (kind, name, self.evaluate(argument))

    def multiply(self, left: ast.expr, right: ast.expr) -> Expression:
        for one, other in ((left, right), (right, left)):
            factor = self.constants.of(one)
            if type(factor) in (int, float):
                value = self.evaluate(other)
                return value if factor == 1 else ("scaled", bare(value), factor, f"{line(left)} * {line(right)}")
            name = self.constants.path(one)
            own = None if self.module is None or name is None else self.module._parameters.get(name)
            if own is not None and own.shape == (1,):
                return ("weighted", name, self.evaluate(other))
        return product(self.evaluate(left), self.evaluate(right))

    def add(self, left: ast.expr, right: ast.expr) -> Expression | None:
        for one, other in ((left, right), (right, left)):
            number = self.constants.of(one)
            if type(number) in (int, float):
                return ("offset", bare(self.evaluate(other)), float(number))
        first, second = bare(self.evaluate(left)), bare(self.evaluate(right))
        for whole, alone in ((first, second), (second, first)):  # f * u + f
            if whole[0] == "product" and alone in whole[1:]:
                return ("product", alone, ("offset", whole[2] if whole[1] == alone else whole[1], 1.0))
        return None

    def is_last(self, dim: ast.expr | None) -> bool:
        """Whether a dimension is the last: -1, or 2 of three, which each call then has to have."""
        found = None if dim is None else self.constants.of(dim)
        self.rank = 3 if found == 2 else self.rank
        return found in (-1, 2)

    def subscript(self, value: ast.expr, index: ast.expr) -> Expression | None:
        """One of two halves or stripes."""
        match index:
            case ast.Constant() | ast.UnaryOp():
                whole, place = bare(self.evaluate(value)), self.constants.of(index)
                return (whole[1], whole[2], place % 2) if whole[0] == "pair" and place in (0, 1, -1, -2) else None
            case ast.Tuple(elts=[first, second, ast.Slice(lower=lower, upper=upper, step=step)]) if (
                ast.unparse(first) == ast.unparse(second) == ":"
            ):
                self.rank = 3
                return self.part_of_row(value, lower, upper, step)
            case ast.Tuple(elts=[ast.Constant(value=leading), *rest]) if leading is ...:
                match rest:
                    case [ast.Slice(lower=lower, upper=upper, step=step)]:
                        return self.part_of_row(value, lower, upper, step)
                    case [ast.Constant(value=0 | 1 as place)]:
                        return self.grid(value, "stripe", place)
                    case [ast.Constant(value=0 | 1 as place), ast.Slice(lower=None, upper=None)]:
                        return self.grid(value, "half", place)
        return None

    def grid(self, value: ast.expr, kind: str, place: object) -> Expression | None:
        """One of the two rows (halves) or columns (stripes) of an unflattened tensor."""
        whole = bare(self.evaluate(value))
        return (kind, whole[2], place) if whole[:2] == ("grid", kind) else None

    def part_of_row(
        self, value: ast.expr, lower: ast.expr | None, upper: ast.expr | None, step: ast.expr | None
    ) -> Expression | None:
        whole = bare(self.evaluate(value))
        if step is not None:
            start = 0 if lower is None else self.constants.of(lower)
            stripe = upper is None and self.constants.of(step) == 2 and start in (0, 1)
            return ("stripe", whole, start) if stripe else None
        if (lower is None) == (upper is None):
            return None
        size = upper if lower is None else lower
        assert size is not None
        return ("half", whole, int(upper is None)) if self.is_half(size, whole) else None

    def halved(self, size: ast.expr) -> Expression | None:
        """The tensor of ``z.shape[-1] // 2`` or ``z.size(-1) // 2``, or what a variable has of it; else None."""
        match size:
            case ast.Name(id=name) if self.values.get(name, ("",))[0] == "half_size":
                return self.values[name][1]
            case ast.BinOp(left=whole, op=ast.FloorDiv(), right=ast.Constant(value=2)):
                match whole:
                    case ast.Subscript(ast.Attribute(tensor, "shape"), last) | ast.Call(
                        ast.Attribute(tensor, "size"), [last]
                    ) if ast.unparse(last) == "-1":
                        return bare(self.evaluate(tensor))
        return None

    def is_half(self, size: ast.expr, whole: Expression) -> bool:
        """Whether `size` may be half of the last dimension of `whole`, which the instance has to confirm later."""
        known = self.halved(size)
        if known is not None:
            return known == whole
        path = self.constants.path(size)
        found: Any = path if path is not None else self.constants.of(size)
        if type(found) not in (int, str):
            return False
        self.half_sizes.add(found)
        return True

    def call(self, function: object, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Expression | None:
        """What a call of a function computes whose first argument is a tensor; None if that is not known."""
        if not arguments:
            arguments = [each.value for each in keywords if each.arg == "input"]
            keywords = [each for each in keywords if each.arg != "input"]
        known = CALLS.get(function) if arguments and isinstance(function, Hashable) else None
        if known is None or any(isinstance(each, ast.Starred) for each in arguments[:1]):
            return None
        return known(self, arguments[0], arguments[1:], keywords)

    def resolve(self, node: ast.expr) -> object:
        """The object a dotted global name stands for, or None."""
        if isinstance(node, ast.Name) and node.id not in self.values:
            return self.scope.get(node.id)
        return getattr(self.resolve(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None
