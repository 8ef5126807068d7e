"""tanh by oneDNN: with AVX-512 in a sixth of the time of torch's, which takes each number by itself on most processors.

oneDNN works on tensors of its own, and copies from and to them would take longer than tanh. So a buffer is both: a
tensor of oneDNN's, and a dense one with the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_neuron_moe.backends.torch.compute import Scratch, SharedBuffer, call_scratch, without_values

MOST = 1 << 20
"""Numbers that are computed at a time: 4 MiB."""
_BEFORE_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Values of ``ONEDNN_MAX_CPU_ISA``."""


def takes_tanh(values: Tensor) -> bool:
    """Whether :func:`scaled_tanh` can compute these, in less time than others."""
    real = values.is_cpu and values.dtype == torch.float32 and values.numel() > 0 and not without_values()
    return real and bool(torch.backends.mkldnn.enabled) and _is_fast()


@functools.cache
def _is_fast() -> bool:
    held = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return torch.cpu._is_avx512_supported() and held not in _BEFORE_AVX512 and shares_memory()


def scaled_tanh(values: Tensor, scale: float, name: str) -> Tensor:
    """Return ``tanh(scale * values)`` of fp32 numbers, each within 2**-22 of itself; ends are 1 and -1 exactly.

    The result is valid until the thread asks for `name` again.
    """
    scratch = call_scratch(values.device)
    if values.numel() <= MOST:
        return _tanh_of_piece(values, scale, name, scratch)
    out = scratch.get(name, values.shape, values.dtype)
    for piece, place in zip(values.reshape(-1).split(MOST), out.view(-1).split(MOST), strict=True):
        place.copy_(_tanh_of_piece(piece, scale, "tanh_piece", scratch))
    return out


def _tanh_of_piece(values: Tensor, scale: float, name: str, scratch: Scratch) -> Tensor:
    buffer = scratch.shared_views.get(name)
    if buffer is None or buffer.dense.shape != values.shape:
        buffer = scratch.shared_views[name] = _view(values.shape, name, scratch)
    torch.mul(values, scale, out=buffer.dense)
    _tanh_(buffer)
    return buffer.dense


def _view(shape: tuple[int, ...], name: str, scratch: Scratch) -> SharedBuffer:
    """Buffers are as large as the next power of two, so that chunks of about the same size have the same."""
    size = math.prod(shape)
    key = name, (size - 1).bit_length()
    if key not in scratch.shared:
        scratch.shared[key] = _shared_buffer(1 << key[1])
    buffer = scratch.shared[key]
    with torch.inference_mode(False):
        return SharedBuffer(buffer.opaque, buffer.dense[:size].view(shape))


def _tanh_(buffer: SharedBuffer) -> None:
    if torch._C._len_torch_dispatch_stack():  # a mode may look at memory that a tensor of oneDNN's does not show
        with _disable_current_modes():
            torch.tanh_(buffer.opaque)
    else:
        torch.tanh_(buffer.opaque)


def _shared_buffer(size: int) -> SharedBuffer:
    with torch.inference_mode(False), _disable_current_modes():
        opaque = torch.zeros(size, dtype=torch.float32, device="cpu").to_mkldnn()
        assert torch.ops.mkldnn._nbytes(opaque) == 4 * size
        memory = (ctypes.c_float * size).from_address(torch.ops.mkldnn.data_ptr(opaque))
        memory.owner = opaque  # type: ignore[attr-defined]  # the dense tensor keeps `memory`
        return SharedBuffer(opaque, torch.frombuffer(memory, dtype=torch.float32))


@functools.cache
def shares_memory() -> bool:
    """Whether a tensor of oneDNN's is plain memory, as far as a small one shows."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return False
    values = torch.linspace(-2, 2, 37, dtype=torch.float32, device="cpu")
    with _disable_current_modes():
        if torch.ops.mkldnn._nbytes(values.to_mkldnn()) != values.nbytes:
            return False
    buffer = _shared_buffer(len(values))
    buffer.dense.copy_(values)
    _tanh_(buffer)
    return torch.allclose(buffer.dense, values.tanh(), rtol=1e-6)
