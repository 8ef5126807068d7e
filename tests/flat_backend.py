"""A backend whose blocks are called with plain arguments: weights, options and wishes one by one."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants


class FlatBackend:
    """Passes calls on to `backend`; everything else is read from it and written to it."""

    def __init__(self, backend: Any) -> None:
        vars(self)["backend"] = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.backend, name, value)

    def fake_mlp_saved(self, x: Tensor, inner: int, keep: str) -> Any:
        shape = BlockShape("mlp", x.shape[1], inner)
        return self.backend.fake_saved(x, shape, BlockSpec("mxfp8"), parse_keep(keep))

    def fake_experts_saved(
        self,
        x: Tensor,
        index: Tensor,
        gate_up: Tensor,
        down: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
    ) -> Any:
        inner = down.shape[1] if transposed else down.shape[2]
        shape = BlockShape("experts", x.shape[1], inner, len(down), index.shape[1])
        return self.backend.fake_saved(x, shape, BlockSpec(precision, block_size, transposed), parse_keep(keep))

    def mlp_forward(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, precision: str, keep: str) -> Any:
        return self.backend.mlp_forward(x, FFNWeights(gate, up, down), BlockSpec(precision), parse_keep(keep))

    def mlp_backward(
        self, dout: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, saved: Any, *rest: Any
    ) -> Any:
        precision, keep, wants_input, wants_weights = rest
        call = BackwardCall(BlockSpec(precision), parse_keep(keep), Wants(wants_input, False, wants_weights))
        return self.backend.mlp_backward(dout, x, FFNWeights(gate, up, down), saved, call)

    def experts_forward(
        self, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, *options: Any
    ) -> Any:
        transposed, precision, block_size, keep = options
        spec = BlockSpec(precision, block_size, transposed)
        weights = ExpertWeights(gate_up, down)
        return self.backend.experts_forward(x, Routing(index, weight), weights, spec, parse_keep(keep))

    def experts_backward(
        self, dout: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, *rest: Any
    ) -> Any:
        saved, transposed, precision, block_size, keep, *wants = rest
        operands = (dout, x, Routing(index, weight), ExpertWeights(gate_up, down), saved)
        spec = BlockSpec(precision, block_size, transposed)
        return self.backend.experts_backward(*operands, BackwardCall(spec, parse_keep(keep), Wants(*wants)))

    def quantized_forward(self, x: Tensor, index: Tensor | None, weight: Tensor | None, stack: Any, keep: str) -> Any:
        routing = None if index is None or weight is None else Routing(index, weight)
        return self.backend.quantized_forward(x, routing, stack, parse_keep(keep))


@functools.cache
def flat(backend: Any) -> Any:
    """Return the one :class:`FlatBackend` of a backend."""
    return FlatBackend(backend)
