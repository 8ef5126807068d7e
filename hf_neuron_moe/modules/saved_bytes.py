"""What a block keeps for its backward and what it computes again, per token of its input, from shapes alone.

H hidden size, I intermediate size, K experts per token (1 for a dense MLP).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from hf_neuron_moe.activation_policy import kept_up_columns, parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE

ROUTING_BYTES = torch.int64.itemsize + torch.float32.itemsize
"""A kept token-expert pair: its expert's id and its weight."""

_TOKENS = 128
"""Tokens to look at: the kernels' backends keep whole tiles of so many."""

_SILU_FLOPS = 4
"""Exponential, addition, division, product: enough to rank an elementwise pass among the others."""


@dataclass(frozen=True)
class BlockShape:
    """What the bytes and operations of one block depend on.

    Attributes:
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        hidden: H.
        intermediate: I.
        top_k: K of routed experts; None for a dense MLP; 0 where it is not known.
        backend: a name that :func:`~hf_neuron_moe.backends.resolve_backend` returned.
        frozen: whether the weights are MX codes, which have no gradient that would read the input.
    """

    precision: str
    hidden: int
    intermediate: int
    top_k: int | None = None
    backend: str = "torch"
    frozen: bool = False


@functools.cache
def saved_bytes(shape: BlockShape, keep: str) -> float:
    """Return the bytes per token that the block's operator keeps: input, routing and checkpoints.

    A model that also keeps the block's input or its routing elsewhere, as most do, pays for those once.

    Args:
        shape: the block.
        keep: a canonical keep string.

    Returns:
        A whole number, or NaN where `shape` does not know the number of experts per token.
    """
    if shape.top_k == 0:
        return math.nan
    rows = _TOKENS * (1 if shape.top_k is None else shape.top_k)
    x = torch.empty((_TOKENS, shape.hidden), dtype=COMPUTE_DTYPE[shape.precision], device="meta")
    backend, kept = get_backend(shape.backend), parse_keep(keep)
    make = backend.frozen_fake_saved if shape.frozen else backend.fake_saved
    tensors: list[torch.Tensor] = [*make(x, rows, shape.intermediate, keep)]
    if kept.keeps_input_frozen if shape.frozen else kept.keeps_input:
        tensors.append(x)
    routing = 0 if shape.top_k is None else shape.top_k * ROUTING_BYTES
    return sum(tensor.nbytes for tensor in tensors) / _TOKENS + routing


def recomputed_flops(shape: BlockShape, keep: str) -> int:
    """Return the floating-point operations per token that the backward spends on what was not kept.

    A multiplication and its addition count as two.
    """
    kept, inner = parse_keep(keep), shape.intermediate
    up = inner if kept.whole_up or shape.frozen else kept_up_columns(inner)
    columns = (0 if "gate_pre" in kept.names else inner) + (inner - up if "up" in kept.names else inner)
    elementwise = 0 if "gate_act" in kept.names else _SILU_FLOPS * inner
    elementwise += 0 if "intermediate" in kept.names else inner
    decoding = 2 * inner if kept.fp8 else 0
    return (2 * shape.hidden * columns + elementwise + decoding) * (shape.top_k or 1)
