"""Checks of routings and of the sizes of block plans.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_dtype, check_rules, check_same_device, check_shape
from hf_neuron_moe.errors import DTypeError, ShapeError

_MAX_TOKEN_ID = 1 << 24
"""Ids pass through fp32 on the chip and are exact only below this."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and breaks no trace: an ordinary tensor in host memory."""
    if torch.compiler.is_compiling():  # first: the rest cannot be traced
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch._is_functional_tensor(tensor)


def check_mask(mask: Tensor) -> tuple[int, int]:
    """Check a ``[T, E]`` mask of bools or integers; return T and E."""
    fits = isinstance(mask, Tensor) and not mask.is_floating_point()
    got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    fix = "Pass expert_mask(top_k_index, experts)."
    check_rules([Rule(fits, "expert_mask", "a bool or integer tensor", got, fix, DTypeError)])
    check_shape(mask, (None, None), "[T, E]", "expert_mask")
    return mask.shape[0], mask.shape[1]


def check_row_sums(mask: Tensor, top_k: int) -> None:
    """Check that no row has more than `top_k` experts, where values can be read."""
    most = int(mask.bool().sum(1).max()) if _readable(mask) else 0
    expected = f"made of rows with at most top_k = {top_k} experts"
    fix = "Pass the top_k of the routing: it decides how many blocks there are."
    check_rules([Rule(most <= top_k, "expert_mask", expected, f"a row with {most}", fix, ShapeError)])


def check_sizes(sizes: dict[str, int]) -> None:
    """Check sizes, by argument name, for positive ints; T has to be exact in fp32 too."""
    for name, value in sizes.items():
        expected, fix = "positive, an int", "Pass a positive size."
        if name == "T":
            expected = f"positive and below {_MAX_TOKEN_ID}, an int"
            fix = "Ids are exact below 2**24; split longer inputs."
        fits = type(value) is int and value > 0 and (name != "T" or value < _MAX_TOKEN_ID)
        check_rules([Rule(fits, name, expected, repr(value), fix, ShapeError)])


def check_routing(top_k_index: Tensor) -> None:
    """Check a ``[T, K]`` of ids of 0 and above, the values where they can be read."""
    check_dtype(top_k_index, _INTEGERS, "top_k_index")
    check_shape(top_k_index, (None, None), "[T, K]", "top_k_index")
    least = int(top_k_index.min()) if _readable(top_k_index) and top_k_index.numel() else 0
    fix = "Mark pairs without an expert with an id of at least the number of experts."
    expected = "made of expert ids of 0 and above"
    check_rules([Rule(least >= 0, "top_k_index", expected, f"the id {least}", fix, ShapeError)])


def check_distinct(local_TK: Tensor, experts: int) -> None:
    """Refuse rows that name an expert of this rank twice, where values can be read."""
    if not _readable(local_TK):
        return
    ordered = local_TK.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < experts)).any(1)
    if bool(twice.any()):
        got = f"row {int(twice.nonzero()[0])} with one twice"
        fix = "Add the weights of a repeated expert, and give the other place an id of E or above."
        raise ShapeError.about("top_k_index", "made of rows that name an expert once", got, fix)


def check_values(tensors: dict[str, Tensor], names: str) -> None:
    """Check that the second tensor, by argument name, has the shape and the device of the first, in any dtype."""
    (_, like), (argument, values) = tensors.items()
    check_dtype(values, (*_FLOATS, *_INTEGERS), argument)
    check_shape(values, tuple(like.shape), names, argument)
    check_same_device(tensors)


def check_ids(experts: int, first_expert: int) -> None:
    """Check the number of experts of a rank and the id of its first one."""
    check_sizes({"experts": experts})
    fits, fix = type(first_expert) is int and first_expert >= 0, "It is the id of this rank's first expert."
    check_rules([Rule(fits, "first_expert", "an int of at least 0", repr(first_expert), fix)])


def check_finite(number: object, argument: str, fix: str) -> None:
    """Check for a finite number of at least 0."""
    fits = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < math.inf
    check_rules([Rule(fits, argument, "a finite number of at least 0", repr(number), fix)])
