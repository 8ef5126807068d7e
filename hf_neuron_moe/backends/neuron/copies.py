"""Bytes of the copies that the kernels read of weights; needs no Neuron stack and runs nothing.

H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.dense import DenseKernels
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, Experts
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.prepared import CountedWeights

_NO_LAUNCHER: Any = None
"""Preparing weights launches no kernel."""


def weight_copy_bytes(adapter: Adapter, block: Block, experts: int | None, ordered: bool, dtype: torch.dtype) -> int:
    """Return the bytes of the weight copies that the kernels' forward and backward of `block` need.

    Args:
        adapter: decides which generation's kernels read them.
        block: one that the kernels compute.
        experts: E; None for a dense MLP.
        ordered: gate and up are one tensor (dense), or weights are ``[E, H, 2I]`` and ``[E, I, H]`` (experts).
        dtype: of the parameters.
    """
    counted, hidden, inner = CountedWeights(), block.hidden, block.inner
    if experts is None:
        both = torch.empty((2 * inner, hidden), dtype=dtype, device="meta")
        gate, up = both.chunk(2) if ordered else (torch.empty_like(half) for half in both.chunk(2))
        down = torch.empty((hidden, inner), dtype=dtype, device="meta")
        DenseKernels(adapter, _NO_LAUNCHER, counted).prepare(gate, up, down, block)
    else:
        shapes = ((hidden, 2 * inner), (inner, hidden)) if ordered else ((2 * inner, hidden), (hidden, inner))
        gate_up, down = (torch.empty((experts, *shape), dtype=dtype, device="meta") for shape in shapes)
        ExpertKernels(adapter, _NO_LAUNCHER, counted).prepare(Experts(gate_up, down, ordered, block))
    return counted.nbytes
