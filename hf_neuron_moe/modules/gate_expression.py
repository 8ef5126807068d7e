"""What expressions of a gate's source stand for, and their arithmetic."""

from __future__ import annotations

import ast
import math
from typing import Any


class UnknownForm(ValueError):  # noqa: N818 -- not an error of the program: the answer "no", with the reason
    """The source is not a form this package knows; the message says what it met."""


Expression = tuple[Any, ...]
"""What an expression of the source stands for:

("input",)                      the joint projection
("number", value)               a float, or None
("dtype",)                      the dtype of a tensor
("middle",)                     half of the columns of the joint projection
("halves", interleaved)         gate and up of the joint projection; ("half", index, interleaved) is one of them
("parts", interleaved)          the joint projection with an axis of the two
("act", name, alpha, x)         an activation of ``structure.ACTIVATIONS``
("sigmoid", x), ("tanh", x), ("exp", x)
("clamp", x, low, high)
("scaled", x, c), ("over", x, c), ("plus", x, c)
("softcap", x, c)               ``c tanh(x / c)``
("product", x, y)
("pair", x, y)                  a tuple of two
"""

TENSORS = {"input", "half", "act", "sigmoid", "tanh", "clamp", "scaled", "over", "plus", "softcap", "product", "exp"}
"""Kinds of expressions that are tensors."""


def line_of(node: ast.AST) -> str:
    """Return the source of `node` in one line of at most 100 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


def holds(value: Expression, tensor: Expression) -> bool:
    """Whether a value is a tensor, or a tuple with it."""
    return value == tensor or (value[0] == "pair" and any(holds(part, tensor) for part in value[1:]))


def two(value: Expression, node: ast.expr) -> tuple[Expression, Expression]:
    """Return the parts of a pair, or of the joint projection its halves."""
    kind, *parts = value
    if kind == "pair":
        return parts[0], parts[1]
    if kind != "halves":
        raise UnknownForm(f"its gate unpacks `{line_of(node)}`")
    return ("half", 0, *parts), ("half", 1, *parts)


def clamped(x: Expression, low: float | None, high: float | None) -> Expression:
    """Return `x` between the limits; those without end are none."""
    low = None if low == -math.inf else low
    high = None if high == math.inf else high
    return x if low is None and high is None else ("clamp", x, low, high)


def with_number(kind: str, x: Expression, number: Expression, node: ast.expr) -> Expression:
    """Return an expression of this kind of a tensor and a number."""
    if x[0] not in TENSORS or number[0] != "number" or number[1] is None:
        raise UnknownForm(f"its gate computes `{line_of(node)}`")
    return (kind, x, number[1])


def over(left: Expression, right: Expression, node: ast.expr) -> Expression:
    """Also ``left / (1 + exp(-c x))``, which is ``left * sigmoid(c x)``."""
    match right:
        case ("plus", ("exp", ("scaled", x, c)), 1):
            sigmoid = ("sigmoid", times(x, ("number", -c), node))
            return sigmoid if left == ("number", 1) else times(left, sigmoid, node)
    return with_number("over", left, right, node)


def times(left: Expression, right: Expression, node: ast.expr) -> Expression:
    """Return a product; ``c tanh(x / c)`` is a softcap."""
    if left[0] in TENSORS and right[0] in TENSORS:
        return ("product", left, right)
    x, number = (left, right) if right[0] == "number" else (right, left)
    kind, _, c = with_number("scaled", x, number, node)
    match x:
        case ("tanh", ("over", inner, divisor)) if divisor == c:
            return ("softcap", inner, c)
    return x if c == 1 else (kind, x, c)
