"""Checks of tensors and options. Each returns nothing; an error names the argument, the rule and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError, with_article

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""Types of tensors without a class of their own, which may stand for others."""
CONVERT = "Convert it, for example with .to({})."
VIEW = "View its bytes, for example with .view({}); converting would change them."
_PAD = "Zero-pad to the next multiple (padding with zeros is exact); patched modules do so themselves."


def check_tensor(value: object, argument: str) -> None:
    """Raise DTypeError for what is not a torch tensor."""
    if not isinstance(value, Tensor):
        raise DTypeError.about(argument, "a torch.Tensor", type(value).__name__, "Convert it with torch.as_tensor.")


def check_dtype(tensor: object, allowed: Sequence[torch.dtype], argument: str, fix: str = CONVERT) -> None:
    """Raise DTypeError for a tensor whose dtype is not in `allowed`, and for what is not a tensor.

    `fix` says what to do about another dtype, ``{}`` being the first of `allowed`: :data:`VIEW` where the elements are
    codes, words or scale bytes, which a conversion would take for values.
    """
    if isinstance(tensor, Tensor) and tensor.dtype in allowed:
        return
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    if isinstance(tensor, Tensor):
        fix = fix.format(allowed[0])
    else:
        fix = "This argument is required." if tensor is None else "Pass a torch.Tensor."
    got = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else type(tensor).__name__
    raise DTypeError.about(argument, f"a tensor of dtype {names}", got, fix)


def check_float(tensor: object, argument: str) -> None:
    """Raise DTypeError for what is not a bf16, fp16 or fp32 tensor."""
    check_dtype(tensor, FLOATS, argument)


def check_shape(tensor: Tensor, shape: Sequence[int | None], names: str, argument: str) -> None:
    """Raise ShapeError for a tensor that does not have `shape`.

    Args:
        tensor: the argument.
        shape: required extents; None stands for any.
        names: the shape in words, for the message, for example ``"[S, H]"``.
        argument: its name.
    """
    if tensor.dim() == len(shape) and all(want is None or want == have for want, have in zip(shape, tensor.shape)):
        return
    wanted = ", ".join("?" if extent is None else str(extent) for extent in shape)
    sizes = "" if all(extent is None for extent in shape) else f" = [{wanted}]"
    fix = "Check which axis is which; layouts are never guessed from sizes."
    raise ShapeError.about(argument, f"of shape {names}{sizes}", list(tensor.shape), fix)


def check_axes(tensor: Tensor, names: Sequence[str], argument: str) -> None:
    """Raise DTypeError or ShapeError for what is not a tensor with one axis per name, each of at least one element."""
    check_tensor(tensor, argument)
    if tensor.ndim != len(names) or 0 in tensor.shape:
        expected = f"a non-empty tensor of shape [{', '.join(names)}]"
        raise ShapeError.about(argument, expected, list(tensor.shape), "Reshape it, or pass one matrix at a time.")


def check_equal_shape(tensor: Tensor, shape: tuple[int, ...], argument: str, because: str) -> None:
    """Raise DTypeError or ShapeError for what is not a tensor of `shape`; `because` says what that follows from."""
    check_tensor(tensor, argument)
    if tuple(tensor.shape) != shape:
        fix = "Check that the tensors belong together and that their layout is the documented one."
        raise ShapeError.about(argument, f"of shape {list(shape)} ({because})", list(tensor.shape), fix)


def check_same_device(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise DeviceError for tensors, by argument name, not on the first one's device; None is an argument left out."""
    given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    first, anchor = next(given)
    for name, tensor in given:
        if tensor.device != anchor.device:
            expected = f"on {anchor.device} like {first}"
            raise DeviceError.about(name, expected, tensor.device, "Move them to one device.")


def is_whole(number: object) -> bool:
    """Return whether `number` can be a size or an index: an int, also a symbolic one or NumPy's, but no bool."""
    if isinstance(number, bool):
        return False
    return isinstance(number, int | torch.SymInt) or hasattr(number, "__index__")


def check_multiple(size: int, of: int, argument: str, rule: str = "", remedy: str = _PAD) -> None:
    """Raise ShapeError for a size that is not a positive multiple of `of`; `rule` says why it has to be."""
    if not is_whole(size) or size <= 0 or size % of:
        raise ShapeError.about(argument, f"a positive multiple of {of}{rule and f' ({rule})'}", repr(size), remedy)


def check_flags(flags: Mapping[str, object]) -> None:
    """Raise ConfigError for switches, by argument name, that are not bools."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError.about(name, "True or False", shown(flag), "Pass a bool.")


def check_record(value: object, kind: type, argument: str, optional: bool = True) -> None:
    """Raise ConfigError for what is not an instance of `kind` (or None, if `optional`).

    A dict or tuple is never taken for a record: its fields could be mixed up.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        expected = f"{with_article(kind.__name__)}{' or None' if optional else ''}"
        fix = f"Make one with {kind.__name__}(...), from hf_neuron_moe.kernels."
        raise ConfigError.about(argument, expected, shown(value), fix)


def shown(value: object) -> str:
    """Return a wrong argument as a message shows it: the value if it is short, else its type."""
    return repr(value) if value is None or isinstance(value, str | int | float) else with_article(type(value).__name__)


class Rule(NamedTuple):
    """Whether a condition on an argument holds, and what the error says where it does not."""

    holds: bool
    argument: str
    expected: str
    got: object
    fix: str
    error: type[NeuronMoEError] = ConfigError


def check_rules(rules: Iterable[Rule]) -> None:
    """Raise the error of the first rule that does not hold."""
    for rule in rules:
        if not rule.holds:
            raise rule.error.about(rule.argument, rule.expected, rule.got, rule.fix)


def check_layouts(given: Mapping[str, Tensor | None], layouts: Mapping[str, str], **sizes: int) -> dict[str, int]:
    """Check tensors, by argument name, against layouts such as ``[E, H, 2, I]`` and each other; None is left out.

    A letter stands for a size of `sizes` or else that of its first axis; ``T' * E`` is a product. Returns all sizes.
    """
    for name, layout in layouts.items():
        tensor, axes = given.get(name), layout[1:-1].split(", ")
        if tensor is None:
            continue
        shape: list[int | None] = []
        for axis in axes:
            factors = [int(factor) if factor.isdigit() else sizes.get(factor) for factor in axis.split(" * ")]
            shape.append(None if None in factors else math.prod(factor for factor in factors if factor is not None))
        check_shape(tensor, shape, layout, name)
        sizes |= dict(zip(axes, tensor.shape))
    return sizes
