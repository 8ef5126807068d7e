"""Checks of routings and of the sizes of block plans.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_same_device, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError

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
    """Refuse what is no ``[T, E]`` mask (DTypeError, ShapeError); return T and E."""
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError.about(
            "expert_mask", "a bool or integer tensor", got, "Pass expert_mask(top_k_index, experts)."
        )
    check_shape(mask, (None, None), "[T, E]", argument="expert_mask")
    return mask.shape[0], mask.shape[1]


def check_row_sums(mask: Tensor, top_k: int) -> None:
    """Refuse rows with more than `top_k` experts (ShapeError), where values can be read."""
    if not _readable(mask):
        return
    most = int(mask.bool().sum(1).max())
    if most > top_k:
        raise ShapeError.about(
            "expert_mask",
            f"made of rows with at most top_k = {top_k} experts",
            f"a row with {most}",
            "Pass the top_k of the routing: it decides how many blocks there are.",
        )


def check_sizes(sizes: dict[str, int]) -> None:
    """Refuse sizes, by argument name, that are no positive ints; T has to be exact in fp32 too (ShapeError)."""
    for name, value in sizes.items():
        if type(value) is not int or value <= 0 or (name == "T" and value >= _MAX_TOKEN_ID):
            raise ShapeError.about(
                name,
                f"positive{f' and below {_MAX_TOKEN_ID}' if name == 'T' else ''}, an int",
                repr(value),
                "Ids are exact below 2**24; split longer inputs." if name == "T" else "Pass a positive size.",
            )


def check_routing(top_k_index: Tensor) -> None:
    """Refuse what is no ``[T, K]`` of ids of 0 and above (DTypeError, ShapeError)."""
    check_dtype(top_k_index, (torch.int64, torch.int32), argument="top_k_index")
    check_shape(top_k_index, (None, None), "[T, K]", argument="top_k_index")
    if _readable(top_k_index) and top_k_index.numel() and int(top_k_index.min()) < 0:
        raise ShapeError.about(
            "top_k_index",
            "made of expert ids of 0 and above",
            f"the id {int(top_k_index.min())}",
            "Mark pairs without an expert with an id of at least the number of experts.",
        )


def check_distinct(local_TK: Tensor, experts: int) -> None:
    """Refuse rows that name an expert of this rank twice (ShapeError), where values can be read."""
    if not _readable(local_TK):
        return
    ordered = local_TK.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < experts)).any(1)
    if bool(twice.any()):
        raise ShapeError.about(
            "top_k_index",
            "made of rows that name an expert once",
            f"row {int(twice.nonzero()[0])} with one twice",
            "Add the weights of a repeated expert, and give the other place an id of E or above.",
        )


def check_values(values: Tensor, like: Tensor, names: str, *, argument: str, beside: str) -> None:
    """Refuse values that do not stand beside a routing or a mask: no tensor of its shape on its device.

    Raises:
        DTypeError, ShapeError, DeviceError: otherwise; `beside` is the name of `like`.
    """
    check_dtype(values, (*_FLOATS, *_INTEGERS), argument=argument)
    check_shape(values, tuple(like.shape), names, argument=argument)
    check_same_device({beside: like, argument: values})


def check_first_expert(first_expert: object) -> None:
    """Refuse what is no id of an expert (ConfigError)."""
    if type(first_expert) is not int or first_expert < 0:
        raise ConfigError.about(
            "first_expert", "an int of at least 0", repr(first_expert), "It is the id of this rank's first expert."
        )


def check_finite(number: object, *, argument: str, remedy: str) -> None:
    """Refuse what is no finite number of at least 0 (ConfigError)."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise ConfigError.about(argument, "a finite number of at least 0", repr(number), remedy)
