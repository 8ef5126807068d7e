"""Operands of the MXFP8 MLP: raw, pre-swizzled or pre-quantized. Letters: S tokens, H hidden, I intermediate.

Sources: nki-library 2.30 to 2.33 ``experimental.mlp_mxfp8``, its loaders and scale layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.neuron.double.checks import BF16, E8M0, FP8, FP16, UINT8, check_multiple, check_operand, check_read
from tests.neuron.double.contract import broken, need
from tests.neuron.double.memory import X4_FP8, KernelTensor, Launch


@dataclass(frozen=True)
class Operand:
    """One matmul operand: its contraction size K, its free size F, and how it comes."""

    name: str
    K: int
    F: int
    raw: bool


def read_operand(
    value: Any, scales: Any, swizzled: Any, packed: bool, launch: Launch, where: str, name: str
) -> Operand:
    """Check an operand in any of its three modes."""
    need(isinstance(value, KernelTensor), where, f"{name} is a device tensor, got {type(value).__name__}")
    need(type(swizzled) is bool, where, f"{name}'s is_swizzled is a bool, got {swizzled!r}")
    check_read(value, launch, where, name)
    if scales is not None:
        return _quantized(value, scales, packed, where, name)
    if swizzled:
        rows, columns = check_operand(value, (None, None), (BF16,), where, name)
        check_multiple(rows, 8, where, f"K/4 of {name}")
        check_multiple(columns, 8, where, f"4F of {name}")
        return Operand(name, 4 * rows, columns // 4, raw=False)
    F, K = check_operand(value, (None, None), (BF16, FP16), where, name)
    check_multiple(K, 128, where, f"the contraction axis of raw {name}")
    check_multiple(F, 8, where, f"the free axis of raw {name}")
    return Operand(name, K, F, raw=True)


def _quantized(value: KernelTensor, scales: Any, packed: bool, where: str, name: str) -> Operand:
    rows, columns = check_operand(value, (None, None), (*X4_FP8, FP8), where, name)
    K, F = 4 * rows, columns if value.dtype is not FP8 else columns // 4
    check_multiple(rows, 8, where, f"K/4 of {name}")
    check_multiple(F, 2, where, f"F of {name}")
    slab = 128 * -(-K // 2048)
    wanted = slab if packed else rows
    layout = "packed" if packed else "oversized"
    shape = check_operand(scales, (None, None), (UINT8, E8M0), where, f"scales of {name}")
    need(
        shape == (wanted, F), where,
        f"scales of {name} are {layout}, [{wanted}, {F}], as use_scale_packing={packed} says; got {list(shape)}",
    )  # fmt: skip
    return Operand(name, K, F, raw=False)


def check_pair(left: Operand, right: Operand, where: str) -> None:
    """Operands of one product share K, and at K = 384 their way of grouping."""
    need(left.K == right.K, where, f"{left.name} (K={left.K}) and {right.name} (K={right.K}) contract over one axis")
    if left.K == 384:
        need(left.raw == right.raw, where, f"{left.name} and {right.name} group a K of 384 differently: raw or not")


def check_buffer(value: Any, shape: tuple[int, int], dtypes: Any, where: str, name: str) -> None:
    """Memory that the kernel writes."""
    check_operand(value, shape, dtypes, where, name)


def check_distinct(buffers: dict[str, KernelTensor], where: str) -> None:
    """No two buffers share memory."""
    roots = [id(buffer.root) for buffer in buffers.values()]
    if len(set(roots)) != len(roots):
        broken(where, f"buffers share memory among {', '.join(buffers)}")


def check_lnc(run_with_lnc2: Any, launch: Launch, where: str) -> None:
    """The switch says what the grid is: two cores with one's grid leave half of the rows unwritten."""
    need(type(run_with_lnc2) is bool, where, f"run_with_lnc2 is a bool, got {run_with_lnc2!r}")
    need(
        run_with_lnc2 == (launch.cores == 2), where, f"run_with_lnc2={run_with_lnc2} on a grid of {launch.cores} cores"
    )


def check_tiles(arguments: dict[str, Any], where: str) -> None:
    """Tile counts are positive ints known at compile time."""
    for name, value in arguments.items():
        if "_tiles_" in name:
            need(type(value) is int and value > 0, where, f"{name} is a positive int, got {value!r}")
