"""Device memory as a kernel sees it: ``nki.language`` dtypes, buffers and tensors.

Inside of a kernel there are no torch tensors. A :class:`KernelTensor` has a shape and a dtype and can be handed to an
nkilib function or returned; torch refuses to compute with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.neuron.double.contract import Double, broken, need

UNWRITTEN_INT = 4
"""What the simulator documents for integer memory that nothing has written; floating memory holds NaN."""


@dataclass(frozen=True)
class DType:
    """A dtype of ``nki.language``; `carrier` is the torch dtype that holds its bits."""

    name: str
    carrier: torch.dtype

    def __repr__(self) -> str:
        return f"nki.language.{self.name}"


DTYPES = {
    name: DType(name, carrier)
    for name, carrier in {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "int8": torch.int8,
        "int16": torch.int16,
        "int32": torch.int32,
        "uint8": torch.uint8,
        "uint16": torch.uint16,
        "uint32": torch.uint32,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float8_e8m0fnu": torch.float8_e8m0fnu,
        "float8_e4m3fn_x4": torch.int32,
        "float8_e5m2_x4": torch.int32,
        "float4_e2m1fn_x4": torch.uint16,
    }.items()
}
FROM_TORCH = {dtype.carrier: dtype for name, dtype in DTYPES.items() if not name.endswith("_x4")}
X4_FP8 = (DTYPES["float8_e4m3fn_x4"], DTYPES["int32"], DTYPES["uint32"])


@dataclass(frozen=True)
class Buffer:
    """A memory space."""

    name: str

    def __repr__(self) -> str:
        return f"nki.language.{self.name}"


INPUT = Buffer("kernel argument")
BUFFERS = {name: Buffer(name) for name in ("shared_hbm", "private_hbm", "hbm", "sbuf", "psum")}
SHARED_HBM = BUFFERS["shared_hbm"]


class KernelTensor:
    """A tensor inside of a kernel.

    Args:
        data: its values.
        dtype: its dtype.
        buffer: where it lives.
        base: the tensor that a reshaped or reinterpreted one looks at.
    """

    def __init__(self, data: Tensor, dtype: DType, buffer: Buffer, base: KernelTensor | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.buffer = buffer
        self.base = base

    @property
    def shape(self) -> tuple[int, ...]:
        """Static sizes."""
        return tuple(int(size) for size in self.data.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    @property
    def root(self) -> KernelTensor:
        """The tensor that owns the memory."""
        return self if self.base is None else self.base.root

    def reshape(self, *shape: Any) -> KernelTensor:
        """The same memory in another shape."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return KernelTensor(self.data.view(tuple(sizes)), self.dtype, self.buffer, self)

    def view(self, dtype: DType) -> KernelTensor:
        """The same bytes as another dtype."""
        need(isinstance(dtype, DType), "view", f"reinterprets as an nki.language dtype, not {dtype!r}")
        return KernelTensor(self.data.view(dtype.carrier), dtype, self.buffer, self)

    def __repr__(self) -> str:
        return f"KernelTensor({list(self.shape)}, {self.dtype.name}, {self.buffer.name})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        broken("kernel", f"torch.{getattr(function, '__name__', function)} cannot run inside of a kernel")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        broken("kernel", "a wrapper kernel allocates, calls and returns; this double computes only in nkilib functions")

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __matmul__ = __neg__ = _refuse
    __getitem__ = __setitem__ = __bool__ = __iter__ = __len__ = __float__ = __int__ = _refuse


@dataclass
class Launch:
    """One running kernel.

    Attributes:
        kernel: its name.
        cores: physical cores of the grid.
        fake: shapes only, the operands are fake tensors.
        anchor: any operand, for its device and mode.
        owned: tensors made in this launch.
    """

    kernel: str
    cores: int
    fake: bool
    anchor: Tensor | None
    owned: list[KernelTensor] = field(default_factory=list)

    def allocate(self, shape: Iterable[int], dtype: DType, buffer: Buffer = SHARED_HBM) -> KernelTensor:
        """Memory that nothing has written yet."""
        sizes = tuple(shape)
        where = "nki.language.ndarray"
        need(isinstance(dtype, DType), where, f"dtype is an nki.language dtype, got {dtype!r}")
        need(isinstance(buffer, Buffer), where, f"buffer is one of {', '.join(BUFFERS)}, got {buffer!r}")
        fits = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
        need(fits, where, f"shape is positive integers known when the kernel is compiled, got {sizes}")
        anchor = torch.empty(0) if self.anchor is None else self.anchor
        data = unwritten(anchor, sizes, dtype.carrier)
        tensor = KernelTensor(data, dtype, buffer)
        self.owned.append(tensor)
        return tensor


def unwritten(anchor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Poison: NaN, or the simulator's integer."""
    if dtype in (torch.uint16, torch.uint32):
        return anchor.new_full(tuple(shape), UNWRITTEN_INT, dtype=torch.int64).to(dtype)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        return anchor.new_full(tuple(shape), float("nan"), dtype=torch.float32).to(dtype)
    return anchor.new_full(tuple(shape), float("nan") if dtype.is_floating_point else UNWRITTEN_INT, dtype=dtype)


class Language:
    """``nki.language`` as far as wrapper kernels need it; everything else is an AttributeError."""

    def __init__(self, double: Double) -> None:
        self._double = double
        for name, value in (*DTYPES.items(), *BUFFERS.items()):
            setattr(self, name, value)

    def ndarray(self, shape: Any, dtype: Any, *, buffer: Any = BUFFERS["sbuf"], name: str = "") -> KernelTensor:
        """Allocate; only inside of a kernel."""
        launch = self._double.current
        if launch is None:
            broken("nki.language.ndarray", "memory is allocated inside of a kernel")
        return launch.allocate(shape, dtype, buffer)

    def num_programs(self, axes: Any = 0) -> int:
        """Size of the launch grid."""
        launch = self._double.current
        if launch is None:
            broken("nki.language.num_programs", "is known inside of a kernel")
        need(axes == 0, "nki.language.num_programs", "the grid has one axis")
        return launch.cores

    def program_id(self, axis: Any = 0) -> NoReturn:
        """Not modelled."""
        broken("nki.language.program_id", "this double runs a kernel's body once, for all cores together")
