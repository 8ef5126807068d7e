"""``nki.jit``, ``nki.simulate`` and what a launch checks before, inside and after a kernel."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake

from tests.neuron.double.contract import Double, LaunchRecord, broken, need
from tests.neuron.double.memory import FROM_TORCH, INPUT, SHARED_HBM, KernelTensor, Launch

SAFE_DTYPES = (
    torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn,
    torch.int16, torch.uint16, torch.uint32,
)  # fmt: skip
"""What a kernel argument may be. fp64 and int64 are cast silently, others fail in the dtype map of some versions.

The 16 and 32 bit integers carry the words of MX weights.
"""

MODES = ("trace",)
"""``torchxla`` is the old path's."""


class Kernel:
    """What ``nki.jit`` returns: ``kernel[grid](...)``, or a plain call inside of another kernel."""

    def __init__(self, double: Double, function: Callable[..., Any], grid: Any = None, upstream: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.double = double
        self.function = function
        self.grid = grid
        self.upstream = upstream

    @property
    def where(self) -> str:
        """Name in messages."""
        return str(self.function.__name__)

    def __getitem__(self, grid: Any) -> Kernel:
        return Kernel(self.double, self.function, grid, self.upstream)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.double.current is not None:
            need(self.grid is None, self.where, "a kernel called inside of a kernel has no grid of its own")
            return self.function(*args, **kwargs)
        return launch(self, self.grid, args, kwargs, self.double.lnc)


def make_jit(double: Double) -> Callable[..., Any]:
    """``nki.jit`` as a decorator, with or without options."""

    def jit(function: Any = None, *, mode: str | None = None, platform_target: str | None = None) -> Any:
        if function is None:
            return functools.partial(jit, mode=mode, platform_target=platform_target)
        need(mode in (None, *MODES), "nki.jit", f"mode is left out or 'trace' on the native path, got {mode!r}")
        target_fits = platform_target in (None, double.target)
        need(target_fits, "nki.jit", f"platform_target is this machine's, {double.target}, got {platform_target!r}")
        upstream = bool(getattr(function, "is_nkilib", False))
        if not upstream:
            check_function(function)
        return Kernel(double, function, upstream=upstream)

    return jit


def check_function(function: Any) -> None:
    """A kernel is a plain function of a module without closures: tracing resolves globals, not closure cells."""
    need(isinstance(function, types.FunctionType), "nki.jit", f"takes a plain function, got {type(function).__name__}")
    where = function.__qualname__
    need("<locals>" not in where and "<lambda>" not in where, where, "a kernel is defined at module level")
    check_cells(function, where, set())


def check_cells(function: types.FunctionType, where: str, seen: set[types.CodeType]) -> None:
    """No closure cell in a function, in functions inside of it, or in this package's helpers that it names."""
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    need(function.__closure__ is None, where, f"{function.__qualname__} closes over variables")
    need(not function.__code__.co_cellvars, where, f"a function inside of {function.__qualname__} closes over its own")
    for name in function.__code__.co_names:
        helper = function.__globals__.get(name)
        if isinstance(helper, types.FunctionType) and helper.__module__.startswith(
            ("hf_neuron_moe", "tests.neuron.test")
        ):
            check_cells(helper, where, seen)


def check_home(kernel: Kernel) -> None:
    """The kernel's module holds it under its name when it is launched."""
    module = sys.modules.get(kernel.function.__module__)
    found = getattr(module, kernel.function.__name__, None)
    need(
        found is not None and getattr(found, "function", found) is kernel.function, kernel.where,
        "a kernel is found by its name in its module when it is launched",
    )  # fmt: skip


def check_grid(grid: Any, lnc: int, where: str) -> int:
    """The grid is ``(int(lnc),)``: the spelling that every version takes."""
    fits = type(grid) is tuple and len(grid) == 1 and type(grid[0]) is int and grid[0] == lnc
    need(fits, where, f"the launch grid is ({lnc},), one int for the cores of a logical core, got {grid!r}")
    return int(grid[0])


def check_tensor(tensor: Tensor, name: str, where: str) -> None:
    """What a kernel argument must be, whatever the kernel."""
    need(tensor.layout == torch.strided, where, f"{name} is a dense tensor")
    need(tensor.is_contiguous(), where, f"{name} is contiguous, got strides {tensor.stride()} for {list(tensor.shape)}")
    need(tensor.dtype in SAFE_DTYPES, where, f"{name} has a dtype that reaches a kernel unchanged, got {tensor.dtype}")
    need(tensor.numel() > 0, where, f"{name} is not empty")


def check_constant(value: Any, name: str, where: str, plain: bool) -> None:
    """Non-tensor arguments are compiled in: hashable numbers, strings, enums; nkilib records outside of wrap_nki."""
    record = not plain and is_dataclass(value) and not isinstance(value, type)
    known = value is None or isinstance(value, bool | int | float | str | Enum) or record
    need(known, where, f"{name} is a tensor, number, string or enum, got {type(value).__name__}")
    hash(value)


def launch(
    kernel: Kernel, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lnc: int, *, plain: bool = False
) -> Any:
    """Check the operands, run the body, check what it did; return torch tensors."""
    double, where = kernel.double, kernel.where
    cores = check_grid(grid, lnc, where)
    if not kernel.upstream:
        check_home(kernel)
    try:
        bound = inspect.signature(kernel.function).bind(*args, **kwargs)
    except TypeError as error:
        broken(where, str(error))
    tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, Tensor)}
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor):
            check_tensor(value, name, where)
        else:
            check_constant(value, name, where, plain)
    need(len({tensor.device for tensor in tensors.values()}) <= 1, where, "all operands are on one device")
    fakes = {name for name, tensor in tensors.items() if isinstance(tensor, FakeTensor) or is_fake(tensor)}
    need(not fakes or len(fakes) == len(tensors), where, "real and fake operands are mixed")
    handles = {name: KernelTensor(tensor.detach(), FROM_TORCH[tensor.dtype], INPUT) for name, tensor in tensors.items()}
    state = Launch(where, cores, bool(fakes), next(iter(tensors.values()), None))
    before = {} if fakes else {name: _bytes(handle.data).clone() for name, handle in handles.items()}
    bound.arguments.update(handles)
    double.current = state
    try:
        with torch.no_grad():
            returned = kernel.function(*bound.args, **bound.kwargs)
    finally:
        double.current = None
    outputs = list(_flat(returned, where))
    _check_outputs(outputs, state, list(handles.values()), where)
    _check_writes(before, handles, outputs, where)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    if fakes:
        double.traced.append(where)
    else:
        double.launches.append(LaunchRecord(where, grid, shapes))
        constants = tuple((name, value) for name, value in bound.arguments.items() if name not in tensors)
        double.compilations[(where, grid, shapes, tuple(t.dtype for t in tensors.values()), constants)] += 1
    originals = {id(handle): tensors[name] for name, handle in handles.items()}
    return _unwrap(returned, originals)


def _flat(returned: Any, where: str) -> Iterator[KernelTensor]:
    if isinstance(returned, KernelTensor):
        yield returned
    elif isinstance(returned, tuple | list):
        for item in returned:
            yield from _flat(item, where)
    else:
        broken(where, f"a kernel returns its tensors, got {type(returned).__name__}")


def _check_outputs(outputs: list[KernelTensor], state: Launch, inputs: list[KernelTensor], where: str) -> None:
    need(bool(outputs), where, "a kernel returns at least one tensor")
    made = {id(tensor) for tensor in (*state.owned, *inputs)}
    for tensor in outputs:
        need(id(tensor.root) in made, where, "a kernel returns tensors of its own launch")
        shared = tensor.buffer in (SHARED_HBM, INPUT)
        need(shared, where, f"outputs live in shared_hbm, got {tensor!r}")
    roots = [id(tensor.root) for tensor in outputs]
    need(len(set(roots)) == len(roots), where, "every output is a tensor of its own")


def _check_writes(
    before: dict[str, Tensor], handles: dict[str, KernelTensor], outputs: list[KernelTensor], where: str
) -> None:
    """A write into an argument exists only if the kernel returns that argument."""
    returned = {id(tensor.root) for tensor in outputs}
    for name, old in before.items():
        handle = handles[name]
        if id(handle) not in returned and not torch.equal(old, _bytes(handle.data)):
            broken(where, f"{name} is written but not returned: the write would be lost")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _unwrap(returned: Any, originals: dict[int, Tensor]) -> Any:
    if isinstance(returned, KernelTensor):
        return originals.get(id(returned), returned.data)
    return tuple(_unwrap(item, originals) for item in returned)


def make_simulate(double: Double) -> Callable[[Kernel], Callable[..., Any]]:
    """``nki.simulate``: the same checks on host tensors or arrays; the grid is the kernel's."""

    def simulate(kernel: Kernel) -> Callable[..., Any]:
        need(isinstance(kernel, Kernel), "nki.simulate", "takes a kernel made by nki.jit")
        cores = kernel.grid[0] if isinstance(kernel.grid, tuple) else kernel.grid
        lnc = 1 if cores is None else int(cores)
        need(lnc in (1, 2), "nki.simulate", f"a logical core has 1 or 2 cores, got {cores!r}")

        def run(*args: Any, **kwargs: Any) -> Any:
            arrays = [isinstance(value, np.ndarray) for value in (*args, *kwargs.values())]
            hosted = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in args]
            named = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
            results = launch(kernel, (lnc,), tuple(hosted), named, lnc)
            if not any(arrays):
                return results
            return results.numpy() if isinstance(results, Tensor) else tuple(r.numpy() for r in results)

        return run

    return simulate
