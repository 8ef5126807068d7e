"""The leading dimensions of tensors: how source joins them to one and separates them again.

Layers and gates compute row by row, so that only the shape of the result has to be the input's again.
"""

from __future__ import annotations

import ast

from hf_neuron_moe.patching.source_halves import axis, grid
from hf_neuron_moe.patching.source_values import (
    INPUT,
    ROWS,
    Arguments,
    Expression,
    Reading,
    bare,
    is_joined,
    with_leading,
)

_ANY = ("number", -1)


def shape_of(read: Reading, node: ast.expr) -> list[Expression] | None:
    """Return the sizes that a shape, a part of one or a tuple of sizes stands for; None for anything else."""
    match node:
        case ast.Name(id=name) if read.values.get(name, ("",))[0] == "shape":
            return list(read.values[name][1:])
        case ast.Attribute(tensor, "shape") | ast.Call(ast.Attribute(tensor, "size"), [], []):
            whole = read.evaluate(tensor)
            return None if bare(whole)[0] in ("grid", "pair") else [("leading", whole), ("size", whole, -1)]
        case ast.Subscript(value, ast.Slice(lower=None, upper=ast.expr() as upper, step=None)):
            found = shape_of(read, value)
            if found is None or [each[0] for each in found] != ["leading", "size"]:
                return None
            whole = found[0][1]
            stop = axis(read, upper, whole)
            if stop == -1 and read.constants.of(upper) == 2:
                return [("size", whole, -3), ("size", whole, -2)]
            return found[:1] if stop == -1 else None
        case ast.BinOp(left, ast.Add(), right):
            parts = shape_of(read, left), shape_of(read, right)
            return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]
        case ast.Tuple(elts) | ast.List(elts):
            return _sizes(read, elts)
    return None


def _sizes(read: Reading, nodes: list[ast.expr]) -> list[Expression] | None:
    found: list[Expression] = []
    for node in nodes:
        one = size_of(read, node)
        part = [one] if one else shape_of(read, node.value if isinstance(node, ast.Starred) else node)
        if part is None:
            return None
        found += part
    return found


def size_of(read: Reading, node: ast.expr) -> Expression | None:
    """Return what one size stands for."""
    match node:
        case ast.Name(id=name) if read.values.get(name, ("",))[0] in ("size", "rows of"):
            return read.values[name]
        case ast.Name(id=name) if read.values.get(name, ("",))[0] == "constant" and read.values[name][2] is not None:
            return ("path", read.values[name][2])
        case ast.Subscript(value, ast.Constant() | ast.UnaryOp() as index):
            found = shape_of(read, value)
        case ast.Call(ast.Attribute(tensor, "size"), [index], []):
            found = shape_of(read, ast.Attribute(tensor, "shape"))
        case ast.BinOp(left, ast.Mult(), right):
            both = size_of(read, left), size_of(read, right)
            match both:
                case (("size", whole, -3), ("size", other, -2)) if not is_joined(("pair", whole, other)):
                    read.notes.counted(3)
                    return ("rows of", whole)
            return None
        case _:
            path = read.constants.path(node)
            number = None if path else read.constants.of(node)
            return ("path", path) if path else ("number", number) if type(number) is int else None
    if found is None or [each[0] for each in found] != ["leading", "size"]:
        return None
    place = axis(read, index, found[0][1])
    return None if place is None else ("size", found[0][1], place)


def unpacked(read: Reading, names: list[ast.expr], value: ast.expr) -> dict[str, Expression] | None:
    """Return the variables that a shape is unpacked to; None where `value` is none."""
    found = shape_of(read, value)
    plain = [each.id for each in names if isinstance(each, ast.Name)]
    match names, found:
        case [ast.Starred(ast.Name(id=first)), ast.Name(id=last)], [("leading", _) as leading, size]:
            return {first: ("shape", leading), last: size}
        case _, [("leading", whole), *last] if len(plain) == len(names) and len(last) < 2:
            start = len(last) - 1 - len(names)
            return {name: ("size", whole, start + place) for place, name in enumerate(plain)}
        case _, list() if len(plain) == len(names) == len(found) and {each[0] for each in found} <= {"size", "rows of"}:
            return dict(zip(plain, found))
    return None


def _leading(read: Reading, sizes: list[Expression]) -> Expression | None:
    """What a tensor with these leading sizes is computed from: the input or its rows; None where that is not known."""
    read.notes.reshaped = True
    if sizes == [_ANY] or [each[0] for each in sizes] == ["rows of"]:
        return ROWS
    given = [each for each in sizes if each != _ANY]
    if len(sizes) - len(given) > 1 or any(each[0] not in ("leading", "size") for each in given) or not given:
        return None
    joined = is_joined(("pair", *(each[1] for each in given)))
    if [each[0] for each in sizes] != ["leading"]:
        if any(each != _ANY and each[2:] != (place - len(sizes) - 1,) for place, each in enumerate(sizes)):
            return None
        if not joined:
            read.notes.counted(len(sizes) + 1)
    return ROWS if joined else INPUT


def view(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """A view that joins or separates leading dimensions, or unflattens the last; the others stay as they are."""
    nodes, value = list(given.values()), read.evaluate(tensor)
    if bare(value)[0] in ("grid", "pair"):
        return None
    sizes = _sizes(read, nodes)
    if sizes is not None and len(sizes) > 1 and (leading := _leading(read, sizes[:-1])) is not None:
        return with_leading(value, leading) if _keeps_rows(read, value, sizes) else None
    leading = _leading(read, _sizes(read, nodes[:-2]) or [])
    return None if leading is None else grid(read, bare(with_leading(value, leading)), nodes[-2:])


def _keeps_rows(read: Reading, value: Expression, sizes: list[Expression]) -> bool:
    """Whether the last of `sizes` is how many entries a row of `value` has.

    If all others are given, it cannot be another number. The last layer's result has as many as the input.
    """
    ends = value
    while ends[0] in ("cast", "dropout", "weighted"):
        ends = ends[1] if ends[0] == "cast" else ends[2]
    as_input = ends in (INPUT, ROWS) or (ends[0] == "part" and "'product'" in str(ends))
    exact = _ANY not in sizes[:-1]
    match sizes[-1]:
        case ("path", str() as path):
            read.notes.input_sizes.add(path)
            return exact or as_input
        case ("size", whole, -1):
            same = with_leading(bare(whole), ROWS) == with_leading(bare(value), ROWS)
            return exact or same or (as_input and bare(whole) in (INPUT, ROWS))
        case last:
            return exact and last == _ANY


def view_as(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """``y.view_as(x)``."""
    return view(read, tensor, {"0": ast.Attribute(given["other"], "shape")}) if "other" in given else None


def flatten(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """``x.flatten(0, -2)``, which joins all dimensions but the last."""
    value, start = read.evaluate(tensor), read.constants.of(given.get("start_dim", ast.Constant(0)))
    if bare(value)[0] in ("grid", "pair") or start != 0 or axis(read, given.get("end_dim"), value) != -2:
        return None
    read.notes.reshaped = True
    return with_leading(value, ROWS)


def unflatten(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """The last dimension unflattened to halves or stripes, or the joined ones separated."""
    dim, value = read.constants.of(given.get("dim", ast.Constant(None))), read.evaluate(tensor)
    match given.get("sizes"):
        case ast.Tuple(elts) | ast.List(elts) if dim == -1:
            return grid(read, bare(value), elts)
        case ast.expr() as sizes if dim == 0 and is_joined(value):
            leading = _leading(read, shape_of(read, sizes) or [])
            return None if leading is None else with_leading(value, leading)
    return None
