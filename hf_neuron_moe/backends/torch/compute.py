"""How a precision is computed on a device: which dtype the matmuls see, where values are rounded."""

from __future__ import annotations

import functools
import os
import platform
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe import environment
from hf_neuron_moe.environment import environment_option

FEW_ROWS = 12
"""Rows per expert up to which a bf16 matrix-vector product beats casting the weights, without bf16 instructions."""


@dataclass(frozen=True)
class Compute:
    """One precision on one device."""

    operand: torch.dtype
    """Dtype of the matmuls' operands and results in memory. bf16 values are exact in fp32, so fp32 matmuls of bf16 (or
    MXFP8) values compute the same products; only the order of the fp32 sums differs."""
    rounded: torch.dtype
    """Dtype that values between matmuls are rounded to (bf16), or fp32 for no rounding."""
    mx: bool
    """Whether both operands of every matmul are rounded to MXFP8 along its contraction axis first."""
    row_chunk: int
    """Rows processed at a time; bounds the temporaries and keeps them in cache."""


_IN_FP32 = {
    "fp32": Compute(torch.float32, torch.float32, mx=False, row_chunk=1024),
    "bf16": Compute(torch.float32, torch.bfloat16, mx=False, row_chunk=1024),
    "mxfp8": Compute(torch.float32, torch.bfloat16, mx=True, row_chunk=512),
}
_IN_BF16 = {
    "bf16": Compute(torch.bfloat16, torch.bfloat16, mx=False, row_chunk=4096),
    "mxfp8": Compute(torch.bfloat16, torch.bfloat16, mx=True, row_chunk=4096),
}
OPTION = environment.BF16_PRODUCTS
"""Environment variable: ``native`` or ``fp32`` overrides what the processor decides; ``auto`` or unset does not."""
_BEFORE_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN has no bf16 instructions."""


def fp32_products(precision: str) -> Compute:
    """Return the way to compute `precision` ("bf16", "mxfp8" or "fp32") by products of fp32 operands."""
    return _IN_FP32[precision]


def operands_in_bf16(precision: str) -> Compute:
    """Return the way to compute `precision` ("bf16" or "mxfp8") by products of bf16 operands."""
    return _IN_BF16[precision]


def grouped_operands(precision: str) -> Compute:
    """Return the way to compute `precision` by products of all groups at once, on any device."""
    return _IN_BF16.get(precision, _IN_FP32[precision])


def choose_compute(
    precision: str, device: torch.device, *, rows_per_expert: float, weight_dtype: torch.dtype
) -> Compute:
    """Pick the way a block computes `precision` ("bf16", "mxfp8" or "fp32") on `device`.

    bf16 operands are multiplied as such where that is fast (see :func:`bf16_matmul_is_fast`). In bf16 blocks they also
    are where there are so few rows that casting the weights would cost more than the product itself.
    """
    few = precision == "bf16" and rows_per_expert <= FEW_ROWS and weight_dtype == torch.bfloat16
    return _IN_BF16[precision] if precision != "fp32" and (few or bf16_matmul_is_fast(device)) else _IN_FP32[precision]


GROUPED = environment.GROUPED
"""Environment variable: with ``1`` all experts of a layer are computed at once on every device, with ``0`` on none;
``auto`` or unset leaves it to device and sizes."""
MANY_EXPERTS, SMALL_EXPERT, FEW_PAIRS = 32, 1 << 16, 64
"""On CPUs so many experts of so few elements per projection are computed at once for so few token-expert pairs each.
There the calls of one expert after the other take more time than what they compute (``benchmarks/blocks.py``)."""


def most_pairs(precision: str) -> int:
    """Return for how many pairs per expert, on average, CPUs compute all experts at once.

    They are twice as many where one expert after the other takes more than bf16 products: quantizing, casting, or fp32.
    There the peak of memory is up to 1.64 times that of one expert after the other, and beyond it would grow further.
    """
    return FEW_PAIRS if precision == "bf16" and bf16_matmul_is_fast(torch.device("cpu")) else 2 * FEW_PAIRS


def never_waits(device: torch.device) -> bool:
    """Whether the backend ``"torch"`` may read no value of `device` on the host."""
    option = environment_option(GROUPED)
    return device.type != "cpu" if option == "auto" else option == "1"


def computes_at_once(precision: str, device: torch.device, experts: int, elements: int, pairs: int = 0) -> bool:
    """Whether the backend ``"torch"`` computes all experts of a layer at once; `elements` of one projection of one."""
    small = experts >= MANY_EXPERTS and elements <= SMALL_EXPERT and pairs <= most_pairs(precision) * experts
    return never_waits(device) or (small and environment_option(GROUPED) == "auto")


def bf16_matmul_is_fast(device: torch.device) -> bool:
    """Whether a bf16 matmul on `device` is at least as fast as the same one in fp32.

    Processor, build and the environment variable :data:`OPTION` decide, never a measurement: all processes of a run,
    and a run and its continuation, compute the same.
    """
    option = environment_option(OPTION)
    if option != "auto":
        return option == "native"
    return True if device.type != "cpu" else _cpu_bf16_matmul_is_fast()


@functools.cache
def _cpu_bf16_matmul_is_fast() -> bool:
    """Whether oneDNN multiplies bf16 by instructions for it.

    Without them (or held to an older instruction set) torch's bf16 matmul is 5-100 times slower than its fp32 one.
    oneDNN says that it supports bf16 also where AVX-512 emulates it, so the processor is asked as well.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    held = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if held in _BEFORE_BF16:
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def describe_products(precision: str, device: torch.device) -> str:
    """Return in words which products compute `precision` on `device` where there are many rows."""
    if precision == "fp32":
        return "fp32 products"
    return "bf16 products" if bf16_matmul_is_fast(device) else "fp32 products of bf16 values"


class SharedBuffer(NamedTuple):
    """Memory that is a tensor of oneDNN's and a dense one."""

    opaque: Tensor
    dense: Tensor


@dataclass
class Scratch:
    """Named buffers that the tiles and experts of one call share, and on CPUs the calls of one thread.

    Fresh large temporaries cost as much as the arithmetic around the matmuls (page faults). So each name is allocated
    once at the largest size asked for, and viewed afterwards. Beyond :data:`MOST_HELD` bytes it is allocated for its
    call only.
    """

    device: torch.device
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    constants: dict[tuple[float, torch.dtype], Tensor] = field(default_factory=dict)
    shared: dict[tuple[str, int], SharedBuffer] = field(default_factory=dict)
    """By name and binary logarithm of the size."""
    shared_views: dict[str, SharedBuffer] = field(default_factory=dict)
    """What of them each name had last."""
    views: dict[tuple[str, torch.dtype], Tensor] | None = None
    """What each buffer was last viewed as, where the calls of a thread share them: most ask for the same again."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor of `shape`, valid until `name` and `dtype` are asked for again."""
        key = name, dtype
        if self.views and (view := self.views.pop(key, None)) is not None and view.shape == shape:
            self.views[key] = view
            return view
        size = 1
        for extent in shape:
            size *= extent
        if size * dtype.itemsize > MOST_HELD:
            return torch.empty(shape, dtype=dtype, device=self.device)
        buffer = self.buffers.get(key)
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False):
            if buffer is None or buffer.numel() < size:
                self.buffers.pop(key, None)
                buffer = self.buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
            view = buffer[:size].view(shape)
        if self.views is not None:
            self.views[key] = view
        return view

    def constant(self, value: float, dtype: torch.dtype) -> Tensor:
        """Return `value` as a scalar tensor, made once and not to be written to."""
        key = value, dtype
        scalar = self.constants.get(key)
        if scalar is None:
            with torch.inference_mode(False):
                scalar = self.constants[key] = torch.full((), value, dtype=dtype, device=self.device)
        return scalar


class FreshScratch(Scratch):
    """Makes every buffer anew, so that none outlives its use: for the few large ones of a grouped call."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)


MOST_HELD = 1 << 26
"""Bytes up to which a scratch buffer is held for the next call."""
_per_thread = threading.local()


def without_values() -> bool:
    """Whether tensors that are made now have no values: under a FakeTensorMode, after which none may be left behind."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def call_scratch(device: torch.device) -> Scratch:
    """Return the scratch for one call on `device`.

    On CPUs it is the calling thread's own and stays allocated (:func:`release_scratch` frees it); elsewhere torch's
    caching allocators make fresh buffers cheap.
    """
    if device.type != "cpu" or without_values():
        return Scratch(device)
    scratch: Scratch | None = getattr(_per_thread, "scratch", None)
    if scratch is None:
        scratch = _per_thread.scratch = Scratch(device, views={})
    return scratch


def release_scratch() -> None:
    """Free the calling thread's scratch buffers: a few tiles of the largest block it has computed."""
    _per_thread.__dict__.pop("scratch", None)
