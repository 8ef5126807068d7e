"""Checks that several kernels share. Letters: T' token rows, H hidden, I intermediate, E experts, N blocks of B."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tests.neuron.double.contract import Double, broken, need
from tests.neuron.double.memory import DTYPES, DType, KernelTensor, Launch

BF16, FP16, FP32 = DTYPES["bfloat16"], DTYPES["float16"], DTYPES["float32"]
INT32, UINT8, E8M0 = DTYPES["int32"], DTYPES["uint8"], DTYPES["float8_e8m0fnu"]
FP8 = DTYPES["float8_e4m3fn"]


def check_operand(
    value: Any, shape: Sequence[int | None], dtypes: Sequence[DType], where: str, name: str
) -> tuple[int, ...]:
    """A kernel tensor of this shape (None is any size) and one of these dtypes; return its shape."""
    need(isinstance(value, KernelTensor), where, f"{name} is a device tensor, got {type(value).__name__}")
    names = ", ".join(dtype.name for dtype in dtypes)
    need(value.dtype in dtypes, where, f"{name} is {names}, got {value.dtype.name}")
    fits = value.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, value.shape))
    need(fits, where, f"{name} has shape {list(shape)}, got {list(value.shape)}")
    sizes: tuple[int, ...] = value.shape
    return sizes


def check_read(value: KernelTensor | None, launch: Launch, where: str, name: str) -> None:
    """What a kernel reads was written before: NaN means memory that no kernel and no caller filled."""
    if value is None or launch.fake or not value.data.is_floating_point() or value.dtype is E8M0:
        return
    need(not bool(torch.isnan(value.data.float()).any()), where, f"{name} holds NaN: it was never written")


def check_multiple(size: int, of: int, where: str, name: str) -> None:
    """A positive multiple."""
    need(size > 0 and size % of == 0, where, f"{name} is a multiple of {of}, got {size}")


def check_member(value: Any, kind: type[Enum], where: str, name: str) -> None:
    """A member of exactly this enum."""
    need(isinstance(value, kind), where, f"{name} is a {kind.__module__}.{kind.__name__}, got {value!r}")


def check_flag(value: Any, where: str, name: str) -> None:
    """True or False."""
    need(type(value) is bool, where, f"{name} is a bool, got {value!r}")


def check_target(double: Double, target: str, where: str) -> None:
    """A kernel of one chip."""
    need(double.target == target, where, f"runs on {target} only, this is {double.target}")


def tensor(value: KernelTensor | None) -> Tensor | None:
    """Its values."""
    return None if value is None else value.data


def give(launch: Launch, values: Tensor | None, shape: Sequence[int], dtype: DType) -> KernelTensor:
    """An output in shared memory; `values` is None under fake tensors."""
    out = launch.allocate(shape, dtype)
    if values is not None:
        need(tuple(values.shape) == tuple(shape), launch.kernel, f"double computed {list(values.shape)}, not {shape}")
        out.data.copy_(values)
    return out


def unreadable(where: str, name: str) -> None:
    """For arguments whose documented meaning is not enough to check a value."""
    broken(where, f"{name} is not documented well enough to be passed")
