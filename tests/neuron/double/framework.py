"""``torch_neuronx``: ``nki_op``, ``wrap_nki`` and the number of cores."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.neuron.double.contract import Double, need
from tests.neuron.double.launch import Kernel, launch


class NKIHOPCaller:
    """What ``wrap_nki`` returns: its grid starts empty, and a grid set on the kernel is ignored."""

    def __init__(self, kernel: Kernel, grid: Any = ()) -> None:
        need(isinstance(kernel, Kernel), "wrap_nki", f"takes a kernel made by nki.jit, got {type(kernel).__name__}")
        self.kernel = kernel
        self.grid = grid

    def __getitem__(self, grid: Any) -> NKIHOPCaller:
        return NKIHOPCaller(self.kernel, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kernel = self.kernel
        need(kernel.double.current is None, kernel.where, "wrap_nki launches from torch, not from inside of a kernel")
        said = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        agree = kernel.double.release < (2, 33) or said == str(kernel.double.lnc)
        need(agree, kernel.where, f"NCC_EVRF066: NEURON_LOGICAL_NC_CONFIG is {said}, unlike the launch grid")
        return launch(kernel, self.grid, args, kwargs, kernel.double.lnc, plain=True)


def wrap_nki(kernel: Kernel, **_: Any) -> NKIHOPCaller:
    """Wrap a kernel for launches from torch."""
    return NKIHOPCaller(kernel)


def make_nki_op(double: Double) -> Callable[..., Any]:
    """``nki_op``: register a function that calls kernels; its body is its fake until another one is registered."""

    def nki_op(name: str, fn: Any = None, mutates_args: Iterable[str] | str = ()) -> Any:
        register = functools.partial(_register, double, name, tuple(mutates_args))
        return register if fn is None else register(fn)

    return nki_op


def _register(double: Double, name: str, mutates_args: tuple[str, ...], function: Callable[..., Any]) -> Any:
    need(isinstance(function, types.FunctionType), "nki_op", "takes the torch function that calls the kernel")
    need("::" in name, "nki_op", f"the name has a namespace, got {name!r}")
    need(not mutates_args, "nki_op", "mutates_args is empty: a mutation that the kernel does not return is lost")
    op = torch.library.custom_op(name, function, mutates_args=())
    op.register_fake(function)
    double.operators.append(name)
    double.bodies[name] = function
    return op


def utilities(double: Double) -> dict[str, Any]:
    """``torch_neuronx.utils``."""

    def get_logical_neuron_cores() -> int:
        return double.lnc

    return {"get_logical_neuron_cores": get_logical_neuron_cores}


def tracking(double: Double) -> dict[str, Any]:
    """Which operations ran on the CPU since the record was cleared."""
    seen: list[str] = ["aten::from_before"]

    def clear_op_tracking() -> None:
        seen.clear()

    def get_fallback_ops() -> list[str]:
        return [*seen, *double.fallback]

    return {"clear_op_tracking": clear_op_tracking, "get_fallback_ops": get_fallback_ops}
