"""Bytes of the copies that the kernels read of weights; needs no Neuron stack and runs nothing.

H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.dense import DenseKernels
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, Experts
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.prepared import CountedWeights
from hf_neuron_moe.backends.spec import FFNWeights

_NO_LAUNCHER: Any = None
"""Preparing weights launches no kernel."""


def weight_copy_bytes(adapter: Adapter, block: Block, experts: int | None, ordered: bool, dtype: torch.dtype) -> int:
    """Return the bytes of the weight copies that the kernels' forward and backward of `block` need.

    `adapter` decides which generation's kernels read them; `experts` is E, None for a dense MLP. The parameters have
    `dtype`, and are `ordered` where gate and up are one tensor (dense), or weights ``[E, H, 2I]`` and ``[E, I, H]``.
    """
    counted, H, I = CountedWeights(), block.hidden, block.inner  # noqa: E741

    def weight(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if experts is None:
        gate, up = weight(2 * I, H).chunk(2) if ordered else (weight(I, H), weight(I, H))
        mlp = FFNWeights(gate, up, weight(H, I))
        DenseKernels(adapter, _NO_LAUNCHER, counted).prepare(mlp, block)
        return counted.nbytes
    shapes = ((H, 2 * I), (I, H)) if ordered else ((2 * I, H), (H, I))
    stack = Experts(weight(experts, *shapes[0]), weight(experts, *shapes[1]), ordered, block)
    ExpertKernels(adapter, _NO_LAUNCHER, counted).prepare(stack)
    return counted.nbytes
