"""What a reader of source makes of its parts: expressions of the input, and values that are known beforehand."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from hf_neuron_moe.modules.dense_roles import FUNCTIONS, Presence, constant_of
from hf_neuron_moe.modules.structure import gate_of, supported_activations

EXPECTED = f"expected down_proj(act_fn(gate_proj(x)) * up_proj(x)), act_fn one of {supported_activations()}"


class NotSwiGLU(ValueError):  # noqa: N818 -- not an error of the program: the answer "no", with the reason
    """The source is not a form this package knows; the message says what it met.

    With `unread` that was code which the forward calls and which may be the gate.
    """

    def __init__(self, message: str, *, unread: bool = False) -> None:
        super().__init__(message)
        self.unread = unread


Expression = tuple[Any, ...]
"""What an expression of the source stands for:

("input",)                     the argument of forward
("rows",)                      the same with its leading dimensions joined to one
("part", name, argument)       ``self.<name>(argument)``
("act", row, alpha, argument)  an activation that forward calls or spells out itself, by its row
("product", left, right)       ``left * right``
("scaled", argument, c, line)  ``argument * c``, c a number other than 1
("offset", argument, c)        ``argument + c``
("sigmoid", argument, c)       ``torch.sigmoid(c * argument)``; ("exp", argument, c) likewise
("clamp", argument, lo, hi)    clamped, None for an absent limit
("cast", argument, kind)       to the layers' dtype (``"back"``), or to fp32 or one that may be it (``"float"``)
("half", whole, index)         first (0) or second (1) half of a tensor along its last dimension
("stripe", whole, index)       its even (0) or odd (1) entries along its last dimension
("pair", kind, whole)          both halves or stripes, in order
("grid", kind, whole)          the last dimension unflattened to ``(2, I)`` (halves) or ``(I, 2)`` (stripes)
("weighted", name, argument)   times ``self.<name>``, a parameter of one number
("size", whole, place)         its size along a dimension, counted from the end; ("rows of", whole) all but the last
("shape", sizes...)            several sizes; ("leading", whole) is all but the last, ("number", n), ("path", name)
("half_size", whole)           half of its size along the last dimension
("overwritten",)               of a variable whose tensor another one's statement has changed
("dtype", kind)                that of a tensor, as the kind of a cast to it
("dropout", name, argument)    dropout by a module or probability of the instance, or by a number
"""


INPUT, ROWS = ("input",), ("rows",)
NO_TENSORS = ("dtype", "constant", "size", "rows of", "shape", "half_size", "overwritten")
"""Kinds of local variables that are no expression of the input."""


def cast_kind(value: Expression, module: nn.Module | None) -> str:
    """Return the kind of a cast to the dtype of `value`: the layers' if it is surely that.

    Raises:
        NotSwiGLU: it is the result of a module of `module` that may have any dtype.
    """
    while value[0] == "part":  # a linear layer's dtype is its input's, an activation's too
        held = None if module is None else module._modules.get(value[1])
        if held is not None and not isinstance(held, nn.Linear) and gate_of(held) is None:
            title = f"its {value[1]} ({type(held).__name__})"
            raise NotSwiGLU(f"its forward casts to the dtype of what {title} returns, which may not be its input's")
        value = value[2]
    same = value in (INPUT, ROWS) or (value[0] == "cast" and value[2] == "back")
    return "back" if same else "float"


def bare(value: Expression) -> Expression:
    """Return `value` without casts around it."""
    while value[0] == "cast":
        value = value[1]
    return value


def storage(value: Expression, module: nn.Module | None) -> Expression:
    """Return the value whose memory `value` may share: modules other than linear layers may return their input."""
    while value[0] in ("cast", "half", "stripe", "pair", "grid", "dropout", "part"):
        if value[0] == "part" and module is not None and type(module._modules.get(value[1])) is nn.Linear:
            break
        value = value[1] if value[0] in ("cast", "half", "stripe") else value[2]
    return _computed_from(value, INPUT)


def _computed_from(value: Any, leading: Expression) -> Any:
    if value in (INPUT, ROWS):
        return leading
    return tuple(_computed_from(part, leading) for part in value) if isinstance(value, tuple) else value


def is_joined(value: Expression) -> bool:
    """Whether the leading dimensions of `value` are one, for any number of the input's.

    Raises:
        NotSwiGLU: it combines tensors of both kinds.
    """
    found = str(value)
    joined = "('rows',)" in found
    if joined and "('input',)" in found:
        raise NotSwiGLU(f"its forward combines its input with one whose leading dimensions are joined, {EXPECTED}")
    return joined


def with_leading(value: Expression, leading: Expression) -> Expression:
    """Return `value` computed from `leading`, :data:`INPUT` or :data:`ROWS`; every row of it stays the same.

    Not of a module in front of the layers, which may mix rows: both layers then read a result of their own, see `same`.
    """
    found: Expression = value if is_joined(value) is (leading == ROWS) else _computed_from(value, leading)
    return found


def same(one: Expression, other: Expression) -> bool:
    """Whether both are one value: one evaluation, or equal ones of a layer that reads the input itself.

    A module in front of the layer may draw random numbers, so that two of its results differ.
    """
    return one is other or (one == other and str(one).count("'part'") + str(one).count("'dropout'") <= 1)


def product(left: Expression, right: Expression) -> Expression:
    """``left * right``; ``g * sigmoid(c g)`` is an activation, also where another factor stands between its two."""
    left, right = bare(left), bare(right)
    found = _spelled_out(left, right)
    if found is not None:
        return found
    for whole, third in ((left, right), (right, left)):
        factors = whole[1:] if whole[0] == "product" else ()
        for factor, rest in zip(factors, reversed(factors)):
            found = _spelled_out(factor, third)
            if found is not None:
                return ("product", found, rest)
    return ("product", left, right)


def _spelled_out(left: Expression, right: Expression) -> Expression | None:
    for one, other in ((left, right), (right, left)):
        if other[0] == "sigmoid" and same(other[1], one):
            return ("act", "silu", 1.0, one) if other[2] == 1 else ("act", "swish", other[2], one)
    return None


def line(node: ast.AST) -> str:
    """Return a node's source on one line of at most 100 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


_LOOKING = {"isinstance", "len", "dim", "size", "numel", "is_contiguous", "isfinite", "isnan", "isinf", "any", "all"}


def changes_nothing(read: Reading, test: ast.expr) -> bool:
    """Whether evaluating a condition assigns nothing, and calls only functions that look at a tensor."""
    calls = [each.func for each in ast.walk(test) if isinstance(each, ast.Call)]
    assigns = any(isinstance(each, ast.NamedExpr) for each in ast.walk(test))
    names = {each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in calls}
    # Methods of the instance and functions of the program may have such names too.
    others = {f"{read.constants.own}.{name}" for name in _LOOKING} & set(map(ast.unparse, calls))
    foreign = others or not all(is_torchs(read.constants.resolve(each)) for each in calls)
    return not assigns and names <= _LOOKING and not foreign


def is_torchs(called: object) -> bool:
    """Whether an object is PyTorch's, or None, for which a tensor's methods and Python's own functions are resolved."""
    return (getattr(called, "__module__", None) or "torch").partition(".")[0] == "torch"


NO_CONSTANT = object()
"""What :meth:`Constants.of` returns for anything that is not known beforehand."""

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}


@dataclass
class Notes:
    """What was met in all functions that were read."""

    read: dict[str, Any] = field(default_factory=dict)  # values by the paths of the attributes read
    half_sizes: set[str | int] = field(default_factory=set)  # attributes and numbers that a tensor is split by
    input_sizes: set[str] = field(default_factory=set)  # attributes that are the number of the input's features
    fixed: set[str] = field(default_factory=set)  # further arguments that decided a branch
    unread: dict[str, str] = field(default_factory=dict)  # why the source of a module's forward is not a known form
    rank: int | None = None  # number of the input's dimensions, where the source counts them from the first
    reshaped: bool = False  # whether a shape was given that is not the tensor's own
    overwrites: bool = False

    def counted(self, rank: int) -> None:
        """Note the number of the input's dimensions."""
        if self.rank not in (None, rank):
            raise NotSwiGLU(f"its forward counts {self.rank} and {rank} dimensions of its input")
        self.rank = rank

    def restore(self, earlier: Notes) -> None:
        """Forget what was noted since ``copy.deepcopy`` made `earlier`."""
        vars(self).update(vars(copy.deepcopy(earlier)))


@dataclass
class Constants:
    """Evaluates source that needs plain values only: numbers, and plain attributes of the instance, which it notes."""

    own: str | None  # the name of self
    module: nn.Module | None  # the instance
    values: Mapping[str, Expression]  # local variables
    scope: Mapping[str, Any]  # global names
    notes: Notes
    place: str = ""  # of self in the instance: "" or a path with a dot at its end

    def of(self, node: ast.expr, defaults: Mapping[str, Any] | None = None) -> Any:
        """Return the value of `node`, :data:`NO_CONSTANT` where it is not known; `defaults` are values of names."""
        before = dict(self.notes.read)
        try:
            return self._of(node, defaults or {})
        except (LookupError, AttributeError, TypeError, ZeroDivisionError):
            self.notes.read = before
            return NO_CONSTANT

    def path(self, node: ast.expr) -> str | None:
        """Return the dotted path of ``self.a.b``; None for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        own = isinstance(node, ast.Name) and node.id == self.own and names
        return self.place + ".".join(reversed(names)) if own else None

    def _of(self, node: ast.expr, defaults: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in defaults:
                return defaults[name]
            case ast.Name(id=name) if self.values.get(name, ("",))[0] == "constant":
                return self.values[name][1]
            case ast.Attribute() if (path := self.path(node)) is not None:
                return self._attribute(path)
            case ast.Name() | ast.Attribute() if isinstance(function := self.resolve(node), FUNCTIONS):
                return function
            case ast.Name(id=name) if self.scope.get(name, name) is None and name not in self.values:
                return None  # a package that is not installed
            case ast.UnaryOp(op=op, operand=operand):
                return _UNARY[type(op)](self._of(operand, defaults))
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](self._of(left, defaults), self._of(right, defaults))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self._of(left, defaults), self._of(right, defaults)
                hidden = (Presence, int, float, str) if isinstance(op, ast.Is | ast.IsNot) else (Presence,)
                if type(one) is type(other) and type(one) in hidden:  # which object each is, is not known
                    raise LookupError(line(node))
                return _BINARY[type(op)](one, other)
            case ast.BoolOp(op=op, values=values):
                for each in values:  # up to the one that decides, whose value it is
                    value = self._of(each, defaults)
                    if bool(value) is isinstance(op, ast.Or):
                        break
                return value
        raise LookupError(line(node))

    def resolve(self, node: ast.expr) -> Any:
        """Return the object that a dotted global name or a variable with a known value stands for; else None."""
        if isinstance(node, ast.Name):
            kind, *value = self.values.get(node.id, ("global", self.scope.get(node.id)))
            return value[0] if kind in ("constant", "global") else None
        return getattr(self.resolve(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None

    def _attribute(self, path: str) -> Any:
        if self.module is None:
            raise LookupError(path)
        value = self.notes.read[path] = constant_of(self.module, path)
        return value


class Reading(Protocol):
    """What the meaning of a call needs of the reader."""

    constants: Constants
    notes: Notes
    values: dict[str, Expression]
    guarded: bool

    def evaluate(self, node: ast.expr) -> Expression: ...
    def add(self, left: ast.expr, right: ast.expr) -> Expression | None: ...
    def multiply(self, left: ast.expr, right: ast.expr) -> Expression: ...
    def overwrite(self, value: Expression) -> None: ...


Arguments = dict[str | None, ast.expr]
"""Those of a call after the tensor, by name."""
