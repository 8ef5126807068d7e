"""What calls of torch's functions and tensor methods mean in the source of a dense MLP."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_neuron_moe.patching import source_halves as halves, source_shapes as shapes
from hf_neuron_moe.patching.source_values import (
    NO_CONSTANT,
    NO_TENSORS,
    Arguments,
    Constants,
    Expression,
    NotSwiGLU,
    Reading,
    bare,
    cast_kind,
    line,
    product,
)


def _number(read: Reading, node: ast.expr | None) -> Any:
    """A number, or None where there is no argument or None is given; else :data:`NO_CONSTANT`."""
    value = None if node is None else read.constants.of(node)
    if value is None or type(value) is float or (type(value) is int and abs(value) < 2**1000):
        return None if value is None else float(value)
    return NO_CONSTANT


def _sigmoid(read: Reading, tensor: ast.expr, _: Arguments) -> Expression:
    value = bare(read.evaluate(tensor))
    return ("sigmoid", value[1], float(value[2])) if value[0] == "scaled" else ("sigmoid", value, 1.0)


def _exp(read: Reading, tensor: ast.expr, given: Arguments) -> Expression:
    return ("exp", *_sigmoid(read, tensor, given)[1:])


def _silu(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    value, in_place = read.evaluate(tensor), read.constants.of(given.get("inplace", ast.Constant(False)))
    if in_place is True:
        read.overwrite(value)
    return ("act", "silu", 1.0, bare(value)) if type(in_place) is bool else None


def _itself(read: Reading, tensor: ast.expr, _: Arguments) -> Expression:
    return read.evaluate(tensor)


def _gelu(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    form = given.get("approximate")
    row = {"none": "gelu", "tanh": "gelu_tanh"}.get("none" if form is None else read.constants.of(form))
    return None if row is None else ("act", row, 1.0, bare(read.evaluate(tensor)))


def _product(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    return read.multiply(tensor, given["other"]) if "other" in given else None


def _sum(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    return read.add(tensor, given["other"]) if "other" in given else None


def _clamp(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    low, high = (_number(read, given.get(name)) for name in ("min", "max"))
    if low is NO_CONSTANT or high is NO_CONSTANT:
        return None
    for name, limit in (("min", low), ("max", high)):
        if limit is not None and math.isnan(limit):
            raise NotSwiGLU(f"a limit of its forward is NaN: {name}={line(given[name])}")
    low = None if low == float("-inf") else low
    high = None if high == float("inf") else high
    value = bare(read.evaluate(tensor))
    if value[0] == "clamp" and low is None is value[3]:  # two calls, one for each side
        return ("clamp", value[1], value[2], high)
    if value[0] == "clamp" and high is None is value[2]:
        return ("clamp", value[1], low, value[3])
    return value if low is None is high else ("clamp", value, low, high)


def _dropout(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    training = given.pop("training", None)
    always = training is None or read.constants.of(training) is True
    follows = training is not None and read.constants.path(training) == "training"
    if given.keys() != {"p"} or not (follows or (always and read.guarded)):
        return None
    source: Any = read.constants.path(given["p"])
    if source is None:
        source = read.constants.of(given["p"])
    return ("dropout", source, read.evaluate(tensor)) if type(source) in (str, int, float) else None


def _quotient(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """``v / (1 + exp(-c x))``, which is ``v * sigmoid(c x)``; or by the number 1."""
    divisor = read.constants.of(given["other"]) if "other" in given else None
    if divisor is not NO_CONSTANT:
        return read.evaluate(tensor) if divisor == 1 else None
    dividend = None if read.constants.of(tensor) == 1 else read.evaluate(tensor)
    match bare(read.evaluate(given["other"])):
        case ("offset", ("exp", value, c), 1.0):
            sigmoid = ("sigmoid", value, -c)
            return sigmoid if dividend is None else product(dividend, sigmoid)
    return None


def _layer_of(constants: Constants, weight: ast.expr, bias: ast.expr | None) -> str | None:
    """The layer of ``F.linear(x, self.<layer>.weight, self.<layer>.bias)``, without a bias if it has none."""
    name, _, leaf = (constants.path(weight) or "").rpartition(".")
    layer = None if constants.module is None else constants.module._modules.get(name)
    if layer is None or leaf != "weight":
        return None
    expected = None if getattr(layer, "bias", None) is None else f"{name}.bias"
    none = bias is None or (isinstance(bias, ast.Constant) and bias.value is None)
    given = None if none or bias is None else constants.path(bias)
    fits = given == expected or (expected is None and given == f"{name}.bias")
    return name if fits and (none or given is not None) else None


def _linear(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    name = _layer_of(read.constants, given["weight"], given.get("bias")) if "weight" in given else None
    return None if name is None else ("part", name, read.evaluate(tensor))


def _matmul(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """``x @ layer.weight.T`` of a layer without bias, and other spellings of the transpose."""
    match given.get("other"):
        case ast.Attribute(weight, "T" | "mT") | ast.Call(ast.Attribute(weight, "t"), [], []):
            return _linear(read, tensor, {"weight": weight})
        case ast.Call(ast.Attribute(weight, "transpose"), axes, []) if {read.constants.of(axis) for axis in axes} in (
            {0, 1},
            {-2, -1},
        ):
            return _linear(read, tensor, {"weight": weight})
    return None


def _float(read: Reading, tensor: ast.expr, _: Arguments) -> Expression:
    return ("cast", read.evaluate(tensor), "float")


def _to(read: Reading, tensor: ast.expr, given: Arguments) -> Expression | None:
    """A cast to fp32, or to the dtype of a tensor of the forward."""
    known = read.constants.values
    match list(given.values()):
        case [ast.Attribute(value=ast.Name(id="torch"), attr="float32" | "float")]:
            return _float(read, tensor, given)
        case [ast.Attribute(value=ast.Name(id=name), attr="dtype")] if name in known:
            return ("cast", read.evaluate(tensor), cast_kind(known[name], read.constants.module))
        case [ast.Name(id=name)] if name in known and known[name][0] not in NO_TENSORS:
            return ("cast", read.evaluate(tensor), cast_kind(known[name], read.constants.module))
        case [ast.Name(id=name)] if name in known and known[name][0] == "dtype":
            return ("cast", read.evaluate(tensor), known[name][1])
    return None


class Meaning:
    """Names of a function's arguments after the tensor, and what the call of them stands for."""

    def __init__(self, read: Callable[[Any, ast.expr, Arguments], Expression | None], *names: str) -> None:
        self.read, self.names = read, names

    def __call__(
        self, reader: Reading, tensor: ast.expr, rest: list[ast.expr], keywords: list[ast.keyword]
    ) -> Expression | None:
        """Return what the call stands for, None where it has other arguments than those known."""
        names = self.names if self.names != ("*",) else tuple(map(str, range(len(rest))))
        if len(rest) > len(names):
            return None
        given: Arguments = dict[str | None, ast.expr](zip(names, rest))
        given |= {keyword.arg: keyword.value for keyword in keywords}
        known = {*names, "split_size", "split_size_or_sections"} if "size" in names else set(names)
        return self.read(reader, tensor, given) if given.keys() <= known else None


CALLS: dict[Any, Meaning] = {
    torch.sigmoid: Meaning(_sigmoid),
    F.sigmoid: Meaning(_sigmoid),
    torch.special.expit: Meaning(_sigmoid),
    torch.exp: Meaning(_exp),
    F.silu: Meaning(_silu, "inplace"),
    F.gelu: Meaning(_gelu, "approximate"),
    torch.mul: Meaning(_product, "other"),
    torch.multiply: Meaning(_product, "other"),
    torch.add: Meaning(_sum, "other"),
    torch.div: Meaning(_quotient, "other"),
    torch.clamp: Meaning(_clamp, "min", "max"),
    torch.clip: Meaning(_clamp, "min", "max"),
    torch.clamp_max: Meaning(_clamp, "max"),
    torch.clamp_min: Meaning(_clamp, "min"),
    torch.chunk: Meaning(halves.chunk, "chunks", "dim"),
    torch.tensor_split: Meaning(halves.chunk, "indices_or_sections", "dim"),
    torch.split: Meaning(halves.split, "size", "dim"),
    torch.narrow: Meaning(halves.narrow, "dim", "start", "length"),
    torch.select: Meaning(halves.select, "dim", "index"),
    torch.unbind: Meaning(halves.unbind, "dim"),
    torch.unflatten: Meaning(shapes.unflatten, "dim", "sizes"),
    torch.flatten: Meaning(shapes.flatten, "start_dim", "end_dim"),
    torch.reshape: Meaning(shapes.view, "*"),
    torch.Tensor.view_as: Meaning(shapes.view_as, "other"),
    F.dropout: Meaning(_dropout, "p", "training"),
    F.linear: Meaning(_linear, "weight", "bias"),
    torch.matmul: Meaning(_matmul, "other"),
    torch.Tensor.contiguous: Meaning(_itself),
    torch.Tensor.float: Meaning(_float),
    torch.Tensor.to: Meaning(_to, "dtype"),
    torch.Tensor.type_as: Meaning(_to, "other"),
}
"""By the function; a tensor's method is read as the function that computes the same."""
METHODS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("sigmoid", "exp", "mul", "multiply", "add", "clamp", "clip")},
    **{name: getattr(torch, name) for name in ("clamp_max", "clamp_min", "chunk", "tensor_split", "split")},
    **{name: getattr(torch, name) for name in ("unflatten", "flatten", "unbind", "narrow", "select", "matmul")},
    **dict.fromkeys(("view", "reshape"), torch.reshape),
    **dict.fromkeys(("view_as", "reshape_as"), torch.Tensor.view_as),
    "contiguous": torch.Tensor.contiguous,
    "float": torch.Tensor.float,
    "to": torch.Tensor.to,
    "type": torch.Tensor.to,
    "type_as": torch.Tensor.type_as,
}
MODULES = {nn.SiLU: F.silu, nn.GELU: F.gelu, nn.Sigmoid: torch.sigmoid}
"""Classes of modules that source makes where it calls them, by what they compute."""
