"""Halves of a tensor's last dimension: how source cuts them out by chunks, slices, or a dimension of two."""

from __future__ import annotations

import ast
from typing import Any

from hf_neuron_moe.patching.source_values import Arguments, Expression, Reading, bare, is_joined


def axis(read: Reading, dim: ast.expr | None, value: Expression, own: int = 1) -> int | None:
    """Return a dimension of `value` counted from the end, None where it is not known.

    `own` is how many dimensions a row has. A dimension that is counted from the first fixes the input's number of them.
    """
    found = None if dim is None else read.constants.of(dim)
    if type(found) is not int or found < 0:
        return found if type(found) is int else None
    if not is_joined(value):
        read.notes.counted(3)
    return found - own - (1 if is_joined(value) else 2)


def subscript(read: Reading, value: ast.expr, index: ast.expr) -> Expression | None:
    """One of two halves or stripes."""
    if not isinstance(index, ast.Constant | ast.UnaryOp | ast.Tuple):
        return None
    whole = bare(read.evaluate(value))
    match index:
        case ast.Constant() | ast.UnaryOp():
            place = read.constants.of(index)
            return (whole[1], whole[2], place % 2) if whole[0] == "pair" and place in (0, 1, -1, -2) else None
        case ast.Tuple(elts=[ast.Constant(value=leading), *rest]) if leading is ...:
            if len(rest) == 1 and isinstance(rest[0], ast.Constant):
                rest = [ast.Slice(), *rest]
        case ast.Tuple(elts=elts):
            count = 1 if is_joined(whole) else 2
            if not all(ast.unparse(each) == ":" for each in elts[:count]):
                return None
            rest = elts[count:]
            if count == 2:
                read.notes.counted(3)
    match rest:
        case [ast.Slice(lower=lower, upper=upper, step=step)]:
            return _part_of_row(read, whole, lower, upper, step)
        case [ast.Constant(value=0 | 1 as place), *every] if [ast.unparse(each) for each in every] in ([], [":"]):
            return ("half", whole[2], place) if whole[:2] == ("grid", "half") else None
        case [ast.Slice(lower=None, upper=None, step=None), ast.Constant(value=0 | 1 as place)]:
            return ("stripe", whole[2], place) if whole[:2] == ("grid", "stripe") else None
    return None


def _part_of_row(
    read: Reading, whole: Expression, lower: ast.expr | None, upper: ast.expr | None, step: ast.expr | None
) -> Expression | None:
    if step is not None:
        start = 0 if lower is None else read.constants.of(lower)
        stripe = upper is None and read.constants.of(step) == 2 and start in (0, 1)
        return ("stripe", whole, start) if stripe else None
    if (lower is None) == (upper is None):
        return None
    size = upper if lower is None else lower
    assert size is not None
    return ("half", whole, int(upper is None)) if is_half(read, size, whole) else None


def halved(read: Reading, size: ast.expr) -> Expression | None:
    """The tensor of ``z.shape[-1] // 2`` or ``z.size(-1) // 2``, or what a variable has of it; else None."""
    match size:
        case ast.Name(id=name) if read.values.get(name, ("",))[0] == "half_size":
            return read.values[name][1]
        case ast.BinOp(left=whole, op=ast.FloorDiv(), right=two) if read.constants.of(two) == 2:
            match whole:
                case ast.Name(id=name) if read.values.get(name, ("",))[::2] == ("size", -1):
                    return bare(read.values[name][1])
                case ast.Subscript(ast.Attribute(tensor, "shape"), last) | ast.Call(
                    ast.Attribute(tensor, "size"), [last]
                ) if ast.unparse(last) == "-1":
                    return bare(read.evaluate(tensor))
    return None


def is_half(read: Reading, size: ast.expr, whole: Expression) -> bool:
    """Whether `size` may be half of the last dimension of `whole`, which the instance has to confirm later."""
    known = halved(read, size)
    if known is not None:
        return known == whole
    path = read.constants.path(size)
    found: Any = path if path is not None else read.constants.of(size)
    if type(found) not in (int, str):
        return False
    read.notes.half_sizes.add(found)
    return True


def chunk(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """Two chunks along the last dimension."""
    value, dim = bare(read.evaluate(tensor)), given.pop("dim", None)
    count = [read.constants.of(node) for node in given.values()]
    return ("pair", "half", value) if axis(read, dim, value) == -1 and count == [2] else None


def split(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """A split along the last dimension by one size, or by two equal ones, which the instance has to confirm."""
    size = given.pop("size", None) or given.pop("split_size_or_sections", None) or given.pop("split_size", None)
    both = size.elts if isinstance(size, ast.List | ast.Tuple) and len(size.elts) == 2 else [size]
    whole = bare(read.evaluate(tensor))
    if size is None or given.keys() != {"dim"} or axis(read, given["dim"], whole) != -1:
        return None
    same = len({ast.unparse(each) for each in both if each is not None}) == 1
    if not same or not all(each is not None and is_half(read, each, whole) for each in both):
        return None
    return ("pair", "half", whole)


def narrow(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """``torch.narrow(z, -1, start, length)``, where `start` is 0 or the length."""
    whole = bare(read.evaluate(tensor))
    if given.keys() != {"dim", "start", "length"} or axis(read, given["dim"], whole) != -1:
        return None
    second = ast.unparse(given["start"]) != "0"
    fits = all(is_half(read, given[name], whole) for name in ("start", "length")[1 - second :])
    return ("half", whole, int(second)) if fits else None


def grid(read: Reading, whole: Expression, sizes: list[ast.expr]) -> Expression | None:
    """The last dimension unflattened to two `sizes`, of which one is 2."""
    if len(sizes) != 2:
        return None
    for kind, (two, rest) in (("half", (sizes[0], sizes[1])), ("stripe", (sizes[1], sizes[0]))):
        if read.constants.of(two) == 2 and (read.constants.of(rest) == -1 or is_half(read, rest, whole)):
            return ("grid", kind, whole)
    return None


def unbind(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """Both parts of a tensor whose last dimension was unflattened."""
    value = bare(read.evaluate(tensor))
    dimension = {"half": -2, "stripe": -1}.get(value[1]) if value[0] == "grid" else None
    found = axis(read, given.get("dim"), value, 2)
    return ("pair", value[1], value[2]) if dimension is not None and found == dimension else None


def select(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """One part of a tensor whose last dimension was unflattened."""
    index = read.constants.of(given.pop("index", ast.Constant(None)))
    pair = unbind(read, tensor, given)
    return (*pair[1:], index % 2) if pair is not None and index in (0, 1, -1, -2) else None
