"""One block on random input by one backend: its output and every gradient.

T tokens, H hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock


class Inputs(NamedTuple):
    """Random operands of one call: normal rows as a norm layer makes them, and a routing for experts."""

    x: Tensor  # [T, H] bf16
    routing: tuple[Tensor, ...]  # ids int64 [T, K] and weights fp32 [T, K] that sum to 1; empty for a dense MLP
    grad: Tensor  # [T, H] bf16, the gradient that arrives


def random_inputs(block: NeuronBlock, tokens: int, seed: int) -> Inputs:
    """Make the operands of a call, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = block.neuron_shape
    x, grad = (torch.randn(tokens, shape.hidden, generator=generator).bfloat16() for _ in range(2))
    if shape.top_k is None or shape.experts is None:
        return Inputs(x, (), grad)
    scores = torch.rand(tokens, shape.experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(min(max(shape.top_k, 1), shape.experts), -1)
    return Inputs(x, (ids, weights / weights.sum(-1, keepdim=True)), grad)


def run_block(
    block: NeuronBlock, inputs: Inputs, backend: str, device: torch.device
) -> tuple[dict[str, Tensor], float]:
    """Compute a block's output and, unless its weights are frozen codes, every gradient.

    The block is moved to `device` for the time of the call. Returns the results by name, on the CPU, and the seconds
    they took, compilation included.
    """
    frozen = isinstance(block, QuantizedBlock)
    with _as(block, backend, device, training=not frozen), torch.set_grad_enabled(not frozen):
        x = inputs.x.to(device).requires_grad_(not frozen)
        routing = [tensor.to(device) for tensor in inputs.routing]
        wanted = {"input": x}
        if routing and not frozen:
            wanted["routing weights"] = routing[1].requires_grad_()
        wanted |= dict(block.named_parameters()) if not frozen else {}
        begin = time.perf_counter()
        y = block(x, *routing)
        results = {"output": y}
        if not frozen:
            grads = torch.autograd.grad(y, list(wanted.values()), inputs.grad.to(device), allow_unused=True)
            results |= {f"grad {name}": grad for name, grad in zip(wanted, grads) if grad is not None}
        done = {name: tensor.detach().to("cpu") for name, tensor in results.items()}
        return done, time.perf_counter() - begin


@contextmanager
def _as(block: NeuronBlock, backend: str, device: torch.device, *, training: bool) -> Iterator[None]:
    """The block with another backend, mode and device, and no other one in its place; all as before afterwards."""
    config, mode, home = block.neuron_config, block.training, next(block.buffers(), next(block.parameters(), None))
    block.neuron_config = replace(config, backend=backend, fallback="refuse")
    block.train(training)
    try:
        block.to(device)
        yield
    finally:
        block.neuron_config = config
        block.train(mode)
        if home is not None:
            block.to(home.device)
