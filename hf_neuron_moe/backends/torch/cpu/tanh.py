"""tanh by oneDNN: with AVX-512 in a sixth of the time of torch's, which takes each number by itself on most processors.

oneDNN works on tensors of its own, and copies from and to them would take longer than tanh. So a buffer is both: a
tensor of oneDNN's, and a dense one with the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import MOST_HELD, SharedBuffer, call_scratch, without_values

_BEFORE_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Values of ``ONEDNN_MAX_CPU_ISA``."""


def takes_tanh(values: Tensor) -> bool:
    """Whether :func:`scaled_tanh` can compute these, in less time than others."""
    real = values.is_cpu and values.dtype == torch.float32 and values.numel() > 0 and not without_values()
    return real and _is_fast()


@functools.cache
def _is_fast() -> bool:
    held = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return torch.cpu._is_avx512_supported() and held not in _BEFORE_AVX512 and shares_memory()


def scaled_tanh(values: Tensor, scale: float, name: str) -> Tensor:
    """Return ``tanh(scale * values)`` of fp32 numbers, each within 2**-22 of itself; ends are 1 and -1 exactly.

    The result is valid until the thread asks for `name` again.
    """
    size, held = values.numel(), call_scratch(values.device).shared
    key = name, (size - 1).bit_length()
    buffer = held.get(key)
    if buffer is None:
        buffer = _shared_buffer(1 << key[1])
        if buffer.dense.nbytes <= MOST_HELD:
            held[key] = buffer
    result = torch.mul(values, scale, out=buffer.dense[:size].view(values.shape))
    torch.tanh_(buffer.opaque)
    return result


def _shared_buffer(size: int) -> SharedBuffer:
    with torch.inference_mode(False):
        opaque = torch.zeros(size).to_mkldnn()
        memory = (ctypes.c_float * size).from_address(torch.ops.mkldnn.data_ptr(opaque))
        memory.owner = opaque  # type: ignore[attr-defined]  # the dense tensor keeps `memory`
        return SharedBuffer(opaque, torch.frombuffer(memory, dtype=torch.float32))


@functools.cache
def shares_memory() -> bool:
    """Whether a tensor of oneDNN's is plain memory, as far as a small one shows."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return False
    values = torch.linspace(-2, 2, 37)
    if torch.ops.mkldnn._nbytes(values.to_mkldnn()) != values.nbytes:
        return False
    buffer = _shared_buffer(len(values))
    buffer.dense.copy_(values)
    torch.tanh_(buffer.opaque)
    return torch.allclose(buffer.dense, values.tanh(), rtol=1e-6)
