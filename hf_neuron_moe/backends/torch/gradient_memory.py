"""Memory of weight gradients on CPUs that the next step uses again.

The C library gives memory back to the system: a block of 32 MiB or more when it is freed, and the end of its heap when
that is free for more than twice the largest block so far. A step's gradients are then new pages, each of which costs a
page fault: on the machine of docs/performance.md ten times as long as the write. A tensor made here holds a NumPy
array, a view of the kept memory that nothing else refers to. When the last tensor that shares the memory is gone, so is
the array, and the memory is free for the next tensor of its size. What is free is never more than gradients took at one
time. It is released when a block leaves training mode or is deleted; tensors that were in use then give their memory
back to the system. Experts computed by a registered implementation, without a block, release nothing.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import without_values

SMALLEST = 1 << 20  # bytes; of smaller blocks a step seldom has enough for the C library to give them back


class GradientMemory:
    """Hands out uninitialized tensors in memory that earlier ones had."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._releases = 0

    def empty_like(self, weight: Tensor) -> Tensor:
        """Return an uninitialized contiguous tensor with the shape, dtype and device of `weight`."""
        return self.empty(weight.shape, weight.dtype, weight.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized contiguous tensor."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < SMALLEST or without_values():
            return torch.empty(shape, dtype=dtype, device=device)
        try:
            memory = self._free[size].pop()  # another thread may take the last one
        except IndexError:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
        array = memory.numpy()[:]
        weakref.finalize(array, self._take_back, memory, self._releases).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes that no tensor uses."""
        return sum(memory.nbytes for free in list(self._free.values()) for memory in free)

    def release(self) -> None:
        """Give the free memory back; what is in use follows when its tensors are gone."""
        self._releases += 1
        self._free = defaultdict(list)  # in one step, as other threads may be taking memory

    def _take_back(self, memory: Tensor, releases: int) -> None:
        """Keep the memory of a tensor that is gone, unless all was released since it was made."""
        if releases == self._releases:
            self._free[memory.nbytes].append(memory)


@functools.cache
def gradient_memory() -> GradientMemory:
    """Return that of this process."""
    return GradientMemory()
