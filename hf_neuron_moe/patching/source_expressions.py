"""Reads expressions of source, and the functions that they call, as expressions of the input."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.modules.dense_roles import code_of
from hf_neuron_moe.modules.structure import gate_of, is_inert
from hf_neuron_moe.patching.source_calls import CALLS, METHODS, MODULES
from hf_neuron_moe.patching.source_functions import parsed, scope_of
from hf_neuron_moe.patching.source_halves import halved, subscript
from hf_neuron_moe.patching.source_shapes import shape_of, size_of
from hf_neuron_moe.patching.source_values import (
    EXPECTED,
    INPUT,
    NO_CONSTANT,
    NO_TENSORS,
    Constants,
    Expression,
    Notes,
    NotSwiGLU,
    bare,
    cast_kind,
    is_torchs,
    line,
    product,
    storage,
)

_DEPTH = 3
"""How deep calls of functions are followed."""


@dataclass
class Expressions:
    """One function's names, and what its expressions stand for; a subclass reads the statements."""

    own: str | None  # the name of self
    module: nn.Module | None  # the instance whose forward is read, also in functions that it calls
    scope: dict[str, Any]
    values: dict[str, Expression]
    notes: Notes = field(default_factory=Notes)
    place: str = ""  # of self in the instance: "" or a path with a dot at its end
    title: str = "its forward"  # the function, in messages
    depth: int = 0
    given: tuple[Expression, ...] = (INPUT,)  # what holds the memory of the caller's tensors
    places: dict[str, int | None] = field(default_factory=dict)  # of further arguments, see DenseRoles.fixed_arguments
    defaults: dict[str, Any] = field(default_factory=dict)
    extra_arguments: bool = False  # whether there are any
    guarded: bool = False  # whether the statements that are read run in training only
    statement: ast.AST | None = None  # the one that is read, without the names that it assigns

    def __post_init__(self) -> None:
        self.constants = Constants(self.own, self.module, self.values, self.scope, self.notes, self.place)
        self.resolve = self.constants.resolve

    def run(self, body: list[ast.stmt]) -> Expression | None:
        """Return what the statements return; None where they do not."""
        raise NotImplementedError

    def unknown(self, does: str, node: ast.AST, *, unread: bool = False) -> NotSwiGLU:
        """The answer "no" because of one line."""
        wanted = "" if self.depth else f", {EXPECTED}"
        return NotSwiGLU(f"{self.title} {does} `{line(node)}`{wanted}", unread=unread or self.depth > 0)

    def value(self, node: ast.expr) -> Expression:
        """What a variable gets: an expression of the input, a dtype, a size, a shape or a constant."""
        match node:
            case ast.Attribute(value=ast.Name(id=tensor), attr="dtype") if tensor in self.values:
                return ("dtype", cast_kind(self.values[tensor], self.module))
            case ast.Name(id=name) if self.values.get(name, ("overwritten",))[0] in {*NO_TENSORS} - {"overwritten"}:
                return self.values[name]
        whole = halved(self, node)
        if whole is not None:
            return ("half_size", whole)
        known = self.constants.of(node)
        if known is not NO_CONSTANT:
            return ("constant", known, self.constants.path(node))
        sizes, size = shape_of(self, node), size_of(self, node) or ("",)
        if sizes is not None:
            return ("shape", *sizes)
        return size if size[0] in NO_TENSORS else self.evaluate(node)

    def overwrite(self, value: Expression, last: bool = False) -> None:
        """Note that the statement writes into the tensor `value`, after anything else that it does with `last`.

        Raises:
            NotSwiGLU: the tensor is or may be the caller's, or the statement has an older reference to it.
        """
        tensor = storage(value, self.module)
        names = {name for name, held in self.values.items() if storage(held, self.module) == tensor}
        assert self.statement is not None
        used = [each for each in ast.walk(self.statement) if isinstance(each, ast.Name) and each.id in names]
        if tensor in self.given or (len(used) > 1 and not last):
            what = "its input" if tensor in self.given else "a tensor that it reads"
            raise NotSwiGLU(f"{self.title} may change {what} in place: `{line(self.statement)}`")
        self.values |= dict.fromkeys(names, ("overwritten",))
        self.notes.overwrites = True

    def casts_for_layer(self, name: str, value: ast.expr) -> bool:
        """Whether `value` is ``name.to(self.<layer>.weight.dtype)`` of a layer's result.

        All layers have one dtype, so only autocast makes another one, in which it calls the next layer anyway.
        """
        match value:
            case ast.Call(ast.Attribute(ast.Name(id=cast), "to"), [ast.Attribute(weight, "dtype")], []):
                layer, _, leaf = (self.constants.path(weight) or "").rpartition(".")
                known = self.module is not None and isinstance(self.module._modules.get(layer), nn.Linear)
                read = bare(self.values.get(name, INPUT))[0]
                return known and leaf == "weight" and name == cast and read in ("part", "product", "dropout")
        return False

    def two(self, node: ast.expr) -> tuple[Expression, Expression]:
        """What two variables get."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            return self.value(node.elts[0]), self.value(node.elts[1])
        whole = bare(self.evaluate(node))
        if whole[0] != "pair":
            raise self.unknown("unpacks", node)
        return (whole[1], whole[2], 0), (whole[1], whole[2], 1)

    def decide(self, test: ast.expr, statement: ast.AST) -> bool:
        """Whether a branch is live, by constants and by defaults of further arguments."""
        names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} & self.defaults.keys()
        defaults = {name: self.defaults[name] for name in names if name not in self.values}
        known = self.constants.of(test, defaults)
        if known is NO_CONSTANT:
            raise self.unknown("has the statement", statement)
        self.notes.fixed |= defaults.keys()
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
                found = whole if factor == -1 else ("scaled", whole, -factor, line(node))
            case ast.NamedExpr(target=ast.Name(id=name) as target, value=value):
                self.values[name] = self.value(value)
                return self.evaluate(target)
            case ast.Subscript(value=value, slice=index):
                found = subscript(self, value, index)
            case ast.Call(func=ast.Attribute(ast.Name(id=own), name)) if own == self.own:
                found = self.own_call(name, node)
            case ast.Call(func=ast.Call(kind, first, keywords), args=[argument], keywords=[]):
                called = self.resolve(kind)
                made = MODULES.get(called) if isinstance(called, type) else None
                found = self.call(made, [argument, *first], keywords)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = self.resolve(function)
                method = function.attr.removesuffix("_") if isinstance(function, ast.Attribute) else ""
                if called is None and isinstance(function, ast.Attribute) and method in METHODS:
                    called, arguments = METHODS[method], [function.value, *arguments]
                found = self.call(called, arguments, keywords)
                if found is not None and isinstance(function, ast.Attribute) and function.attr == f"{method}_":
                    self.overwrite(self.evaluate(function.value))
                called = getattr(called, "_torchdynamo_inline", called)  # what torch.jit.script compiled
                if found is None and isinstance(called, FunctionType) and not is_torchs(called):
                    found = self.follow(called, node, f"{called.__name__}()")
        if found is None:
            raise self.unknown("computes", node, unread=isinstance(node, ast.Call) and self.is_foreign(node.func))
        return found

    def is_foreign(self, function: ast.expr) -> bool:
        """Whether the function of a call may be a gate: it is no tensor's method and nothing that PyTorch computes."""
        called = self.resolve(function)
        if called is not None:
            runs_others = str(getattr(called, "__module__", "")).startswith(("torch.utils", "torch._ops"))
            return runs_others or not (is_torchs(called) and is_torchs(getattr(called, "__self__", None)))
        match function:
            case ast.Name(id=name):
                return not hasattr(builtins, name)
            case ast.Attribute(value=holder, attr=name):
                return ast.unparse(holder) == self.own or not hasattr(torch.Tensor, name)
            case ast.Call(func=kind):
                made = self.resolve(kind)
                return not (isinstance(made, type) and is_torchs(made))
        return True

    def own_call(self, name: str, node: ast.Call) -> Expression | None:
        """``self.<name>(...)``: a module or function of the instance, or a method of its class."""
        alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if self.module is None:
            return ("part", name, self.evaluate(node.args[0])) if alone else None
        holder = self.module.get_submodule(self.place.removesuffix("."))
        held = holder.__dict__.get(name)
        if held is None and hasattr(type(holder), name):
            method = inspect.getattr_static(type(holder), name)
            title, own = f"its {self.place}{name}()", self.place
            if isinstance(method, staticmethod):
                return self.follow(method.__func__, node, title)
            return self.follow(method, node, title, own) if isinstance(method, FunctionType) else None
        held = holder._modules.get(name) if held is None else held
        if held is None:
            return None
        if alone and (gate_of(held) is not None or isinstance(held, nn.Linear | nn.Dropout) or is_inert(held)):
            return self.layer(name, held, node.args[0])
        earlier = deepcopy(self.notes)
        try:
            return self.follow_held(name, held, node)
        except NotSwiGLU as answer:
            if not alone or self.place:
                raise
            self.notes.restore(earlier)
            if not is_torchs(type(held)) or isinstance(held, nn.Sequential):
                self.notes.unread[name] = str(answer)
            return ("part", name, self.evaluate(node.args[0]))

    def layer(self, name: str, held: object, argument: ast.expr) -> Expression | None:
        """A linear layer, an activation or a dropout of the instance; of a module in it, an activation only."""
        value, gate = self.evaluate(argument), gate_of(held)
        if not self.place:
            inert = type(held) is nn.Dropout or is_inert(held)
            return ("dropout" if inert else "part", name, value)
        if gate is None:
            return None
        self.note_code(name, held)
        return ("act", gate.act, gate.alpha, bare(value))

    def follow_held(self, name: str, held: object, node: ast.Call) -> Expression:
        """What a module without weights, or a function that the instance holds, computes by its source."""
        path = self.place + name
        if isinstance(held, FunctionType) and not is_torchs(held):
            self.note_code(name, held)
            return self.follow(held, node, f"its {path}()")
        title = f"its {path} ({type(held).__name__})"
        if isinstance(held, nn.Sequential):
            raise NotSwiGLU(f"{title} is several modules in one", unread=True)
        if not isinstance(held, nn.Module) or is_torchs(type(held)):
            raise self.unknown("computes", node, unread=True)
        if next(held.parameters(), None) is not None or next(held.buffers(), None) is not None:
            raise NotSwiGLU(f"{title} has weights of its own", unread=True)
        self.note_code(name, held)
        return self.follow(type(held).forward, node, title, f"{path}.")

    def note_code(self, name: str, held: object) -> None:
        """Let each call compare what a call of ``self.<name>`` runs."""
        code = self.notes.read[f"{self.place}{name}()"] = code_of(held)
        if isinstance(code, str):
            raise NotSwiGLU(f"its {self.place}{name} is {code}", unread=True)

    def follow(self, function: Callable[..., Any], node: ast.Call, title: str, own: str | None = None) -> Expression:
        """What a call of a plain function returns; with `own` a method of what is there in the instance."""
        if self.depth == _DEPTH:
            raise NotSwiGLU(f"{self.title} calls `{line(node)}`, deeper than {_DEPTH} calls are followed", unread=True)
        definition = parsed(function, title)
        arguments: list[Expression | None] = [] if own is None else [None]
        for each in node.args:
            arguments += self.two(each.value) if isinstance(each, ast.Starred) else [self.value(each)]
        named = {str(each.arg): self.value(each.value) for each in node.keywords}
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError as error:
            raise NotSwiGLU(f"{title} takes {signature}: {error}", unread=True) from error
        values = dict(bound.arguments)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        if any(kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for name in values):
            raise NotSwiGLU(f"{title} takes {signature}", unread=True)
        self_name = None if own is None else next(iter(values))
        bound.apply_defaults()
        values |= {
            name: ("constant", default, None)
            for name, default in bound.arguments.items()
            if name not in values and isinstance(default, int | float | str | None)
        }
        values = {name: value for name, value in values.items() if name != self_name}
        callee = type(self)(
            own=self_name,
            module=self.module,
            scope=scope_of(function),
            values=values,
            notes=self.notes,
            place=own or "",
            title=title,
            depth=self.depth + 1,
            given=(*self.given, *(storage(value, self.module) for value in values.values())),
        )
        result = callee.run(definition.body)
        if result is None:
            raise NotSwiGLU(f"{title} returns nothing", unread=True)
        return result

    def multiply(self, left: ast.expr, right: ast.expr) -> Expression:
        """What a product stands for."""
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
        """What a sum stands for, None for one of two tensors other than ``f * u + f``."""
        for one, other in ((left, right), (right, left)):
            number = self.constants.of(one)
            if type(number) in (int, float):
                return ("offset", bare(self.evaluate(other)), float(number))
        first, second = bare(self.evaluate(left)), bare(self.evaluate(right))
        for whole, alone in ((first, second), (second, first)):  # f * u + f
            if whole[0] == "product" and alone in whole[1:]:
                return ("product", alone, ("offset", whole[2] if whole[1] == alone else whole[1], 1.0))
        return None

    def call(self, function: object, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Expression | None:
        """What a call of a function computes whose first argument is a tensor; None if that is not known."""
        if not arguments:
            arguments = [each.value for each in keywords if each.arg == "input"]
            keywords = [each for each in keywords if each.arg != "input"]
        known = CALLS.get(function) if arguments and isinstance(function, Hashable) else None
        if known is None or any(isinstance(each, ast.Starred) for each in arguments[:1]):
            return None
        return known(self, arguments[0], arguments[1:], keywords)
