"""How a precision is computed on a device: which dtype the matmuls see, where values are rounded."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

FEW_ROWS = 12
"""Rows per expert up to which a bf16 matrix-vector product beats casting the weights, without bf16 instructions."""


@dataclass(frozen=True)
class Compute:
    """One precision on one device.

    Attributes:
        operand: dtype of the matmuls' operands and results in memory. bf16 values are exact in fp32, so fp32 matmuls of
            bf16 (or MXFP8) values compute the same products; only the order of the fp32 sums differs.
        rounded: dtype that values between matmuls are rounded to (bf16), or fp32 for no rounding.
        mx: whether both operands of every matmul are rounded to MXFP8 along its contraction axis first.
        row_chunk: rows processed at a time; bounds the temporaries and keeps them in cache.
    """

    operand: torch.dtype
    rounded: torch.dtype
    mx: bool
    row_chunk: int


_FP32 = Compute(torch.float32, torch.float32, mx=False, row_chunk=1024)
_MXFP8 = Compute(torch.float32, torch.bfloat16, mx=True, row_chunk=512)
_BF16_NATIVE = Compute(torch.bfloat16, torch.bfloat16, mx=False, row_chunk=4096)
_BF16_FEW_ROWS = Compute(torch.bfloat16, torch.bfloat16, mx=False, row_chunk=512)
_BF16_IN_FP32 = Compute(torch.float32, torch.bfloat16, mx=False, row_chunk=1024)


def choose_compute(
    precision: str, device: torch.device, *, rows_per_expert: float, weight_dtype: torch.dtype
) -> Compute:
    """Pick the way to compute `precision` ("bf16", "mxfp8" or "fp32") on `device`.

    bf16 matmuls run natively where they are fast (see :func:`bf16_matmul_is_fast`) and where there are so few rows
    that casting the weights would cost more than the product itself.
    """
    if precision == "fp32":
        return _FP32
    if precision == "mxfp8":
        return _MXFP8
    if rows_per_expert <= FEW_ROWS and weight_dtype == torch.bfloat16:
        return _BF16_FEW_ROWS
    return _BF16_NATIVE if bf16_matmul_is_fast(device) else _BF16_IN_FP32


def bf16_matmul_is_fast(device: torch.device) -> bool:
    """Whether a bf16 matmul on `device` is at least as fast as the same one in fp32."""
    return True if device.type != "cpu" else _cpu_bf16_matmul_is_fast()


@functools.cache
def _cpu_bf16_matmul_is_fast() -> bool:
    """Ask oneDNN whether it has bf16 kernels for this CPU; if so, confirm with one small product in either dtype.

    The question settles the common case without a measurement that other load could disturb: without bf16
    instructions (or held to AVX2 by ONEDNN_MAX_CPU_ISA) torch's bf16 matmul is 5-100 times slower than its fp32 one.
    The measurement, a few milliseconds once per process, catches CPUs on which oneDNN emulates bf16.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False

    def best_time(dtype: torch.dtype) -> float:
        left, right = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(left, right.t())
            torch.mm(left, right)
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.no_grad():
        return best_time(torch.bfloat16) <= best_time(torch.float32)


@dataclass
class Scratch:
    """Named buffers that the tiles and experts of one call share, and on CPUs the calls of one thread.

    Fresh large temporaries cost as much as the arithmetic around the matmuls (page faults), so each name is allocated
    once at the largest size asked for and viewed afterwards.
    """

    device: torch.device
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor of `shape`, valid until `name` and `dtype` are asked for again."""
        size = 1
        for extent in shape:
            size *= extent
        key = f"{name}:{dtype}"
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < size:
            self.buffers.pop(key, None)
            # An inference tensor could not be written to by a later call outside of inference mode.
            with torch.inference_mode(False):
                buffer = self.buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return buffer[:size].view(shape)


_per_thread = threading.local()


def call_scratch(device: torch.device) -> Scratch:
    """Return the scratch for one call on `device`.

    On CPUs it is the calling thread's own and stays allocated (:func:`release_scratch` frees it); elsewhere torch's
    caching allocators make fresh buffers cheap.
    """
    if device.type != "cpu":
        return Scratch(device)
    scratch: Scratch | None = getattr(_per_thread, "scratch", None)
    if scratch is None:
        scratch = _per_thread.scratch = Scratch(device)
    return scratch


def release_scratch() -> None:
    """Free the calling thread's scratch buffers: a few tiles of the largest block it has computed."""
    _per_thread.__dict__.pop("scratch", None)
