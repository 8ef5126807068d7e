"""What a block saves for its backward and what it computes again, per token of its input, from shapes alone.

H hidden size, I intermediate size, K experts per token (1 for a dense MLP).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep, saved_up_columns
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import Backend
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec
from hf_neuron_moe.config import DEFAULT_BACKEND
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE

ROUTING_BYTES = torch.int64.itemsize + torch.float32.itemsize
"""A kept token-expert pair: its expert's id and its weight."""

_TILE = 512
"""The kernels' backends keep whole tiles or blocks of dense MLPs' tokens, none larger than this, and of experts' tokens
an even number of whole blocks."""

_SILU_FLOPS = 4
"""Exponential, addition, division, product: enough to rank an elementwise pass among the others."""


@dataclass(frozen=True)
class SavedBlock:
    """What the bytes and operations of one block depend on."""

    precision: str  # "bf16", "mxfp8" or "fp32"
    hidden: int  # H
    intermediate: int  # I
    top_k: int | None = None  # K of routed experts; None for a dense MLP; 0 where it is not known
    backend: str = DEFAULT_BACKEND  # a name that `resolve_backend` returned
    quantized: bool = False  # whether the weights are MX codes, which have no gradient that would read the input
    experts: int | None = None  # E; None for a dense MLP
    block_size: int = _TILE  # tokens per block, read for experts
    gate: Gate = SWIGLU
    rows: int | None = None  # rows per token that the operator gets, where each pair of token and expert is one
    beside: float = 0.0  # bytes that each of these rows saves next to the operator
    reads_input: bool = False  # whether what is next to the operator saves the input, too
    copied: int = 0  # bytes of parameters that each call puts in another order and saves so

    @property
    def kernels(self) -> Any:
        """The backend itself."""
        return get_backend(self.backend)


def saved_bytes(shape: SavedBlock, keep: str) -> float:
    """Return the bytes per token that the operator saves, input and routing included; NaN where K is not known.

    A model that also keeps the block's input or its routing elsewhere, as most do, pays for those once.
    """
    return _line(shape.kernels, shape, keep)[0]


def saved_bytes_per_call(shape: SavedBlock, keep: str) -> float:
    """Return the bytes that every call saves whatever its tokens, on top of :func:`saved_bytes` per token.

    Kernels of experts keep whole blocks, as many as the worst routing needs: E - 1 more than full ones would be. The
    figure holds for calls whose tokens fill whole blocks; others keep up to a tile or a block per expert more or less.
    """
    return _line(shape.kernels, shape, keep)[1]


@functools.cache
def _line(backend: Backend, shape: SavedBlock, keep: str) -> tuple[float, float]:
    """Bytes per token and per call, of calls whose tokens fill whole tiles and an even number of whole blocks.

    What the kernels keep depends on their release, so the backend is part of the question.
    """
    if shape.top_k == 0:
        return math.nan, math.nan
    step = 2 * max(_TILE, shape.block_size)
    once, twice = (saved_bytes_of_call(shape, keep, count * step) for count in (1, 2))
    return (twice - once) / step, 2.0 * once - twice


def saved_bytes_of_call(shape: SavedBlock, keep: str, tokens: int) -> int:
    """Return the bytes that the operator saves of a call with so many tokens; `shape` knows K."""
    kept, backend, K = parse_keep(keep), shape.kernels, shape.top_k
    if shape.rows is not None:
        tokens, K = tokens * shape.rows, 1
    x = torch.empty((tokens, shape.hidden), dtype=COMPUTE_DTYPE[shape.precision], device="meta")
    if shape.quantized:
        tensors = [*backend.quantized_fake_saved(x, tokens * (K or 1), shape.intermediate, kept, shape.gate)]
    else:
        sizes = BlockShape("mlp" if K is None else "experts", shape.hidden, shape.intermediate, shape.experts, K)
        tensors = [*backend.fake_saved(x, sizes, BlockSpec(shape.precision, shape.block_size, gate=shape.gate), kept)]
    if shape.reads_input or (kept.keeps_input_quantized if shape.quantized else kept.keeps_input):
        tensors.append(x)
    routing = (K or 0) * ROUTING_BYTES * tokens
    return sum(tensor.nbytes for tensor in tensors) + routing + round(shape.beside * tokens) + shape.copied


def recomputed_flops(shape: SavedBlock, keep: str) -> int:
    """Return the operations per token that the backward spends on recomputing; a multiply-add counts as two.

    Not counted is what ``PreActivations`` multiplies again of alternating columns, though it was saved.
    """
    kept, inner = parse_keep(keep), shape.intermediate
    up = inner if kept.whole_up or shape.quantized else saved_up_columns(inner)
    columns = (0 if "gate_pre" in kept.names else inner) + (inner - up if "up" in kept.names else inner)
    if not shape.gate.gated:  # up is kept whole, the activation never
        columns = 0 if "up" in kept.names else inner
        decoding = inner if kept.fp8 else 0
        return (2 * shape.hidden * columns + _SILU_FLOPS * inner + decoding) * (shape.rows or shape.top_k or 1)
    elementwise = 0 if "gate_act" in kept.names else _SILU_FLOPS * inner
    elementwise += 0 if "intermediate" in kept.names else inner
    decoding = 2 * inner if kept.fp8 else 0
    return (2 * shape.hidden * columns + elementwise + decoding) * (shape.rows or shape.top_k or 1)


def saved_beside(function: Callable[[Tensor], Tensor], hidden: int, dtype: torch.dtype) -> float:
    """Return the bytes that autograd saves per row of ``[R, H]`` through `function`, whose modules are on meta."""

    def of(rows: int) -> int:
        kept: list[torch.UntypedStorage] = []  # alive, so that no other one gets the address of one of them
        x = torch.empty((rows, hidden), dtype=dtype, device="meta", requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda saved: kept.append(saved.untyped_storage()), lambda _: x
        )
        with torch.enable_grad(), hooks:
            function(x)
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values())

    return (of(4) - of(2)) / 2
