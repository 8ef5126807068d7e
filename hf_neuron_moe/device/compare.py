"""One block computed twice: by the Neuron kernels and by PyTorch, forward and backward, and how far apart they are.

T tokens, H hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.frozen_block import FrozenBlock

EQUAL, PASS, CLOSE, FAIL, ERROR, NOT_RUN = "equal", "pass", "close", "fail", "error", "not run"
WRONG = (FAIL, ERROR)


class Bounds(NamedTuple):
    """Where a comparison stops being good.

    Attributes:
        good_db: from this signal-to-noise ratio on, the two differ by single roundings.
        least_db: below this one they are different functions.
        relative: largest difference, relative to the largest value, that is still good.
    """

    good_db: float
    least_db: float
    relative: float


BOUNDS = {"bf16": Bounds(36.0, 24.0, 2e-2), "mxfp8": Bounds(30.0, 20.0, 1.0)}
"""By precision. 2e-2 is the documented tolerance of the bf16 kernels; 36 dB is that of a sum that is rounded to bf16 at
three more places. MXFP8's own error is 25 to 31 dB per operand, and the same rounding rule gives the same codes but for
values on a border: 30 dB is better than another rule would give, 20 dB worse. A wrong layout gives about 0 dB."""


@dataclass(frozen=True)
class TensorResult:
    """One result of both backends.

    Attributes:
        name: ``"output"``, ``"grad input"``, ``"grad routing weights"`` or ``"grad "`` and the parameter's name.
        max_relative: largest difference divided by the reference's largest value; None where one is not finite.
        sqnr_db: signal-to-noise ratio in dB; None where not finite, infinite (``"inf"`` in JSON) where equal.
        verdict: ``"equal"``, ``"pass"``, ``"close"`` (worth a look) or ``"fail"``.
        note: what is wrong with the values themselves.
    """

    name: str
    max_relative: float | None
    sqnr_db: float | None
    verdict: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; JSON has no infinity."""
        equal = self.sqnr_db == math.inf
        return asdict(self) | {"sqnr_db": "inf" if equal else self.sqnr_db}


def compare(name: str, found: Tensor, expected: Tensor, bounds: Bounds) -> TensorResult:
    """Compare a result of the kernels with the reference; both are brought to fp64 on the CPU."""
    mine, theirs = (tensor.detach().to("cpu", torch.float64) for tensor in (found, expected))
    if mine.shape != theirs.shape:
        return TensorResult(name, None, None, FAIL, f"shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}")
    bad = int((~torch.isfinite(mine)).sum())
    if bad:
        return TensorResult(name, None, None, FAIL, f"{bad} of {mine.numel()} values are not finite")
    if torch.equal(mine, theirs):
        return TensorResult(name, 0.0, math.inf, EQUAL)
    noise, signal = float((mine - theirs).square().sum()), float(theirs.square().sum())
    largest = float(theirs.abs().max())
    if signal == 0.0:
        return TensorResult(name, None, None, FAIL, "not zero where the reference is")
    relative = float((mine - theirs).abs().max()) / largest
    sqnr = 10 * math.log10(signal / noise)
    if not mine.any():
        return TensorResult(name, relative, sqnr, FAIL, "all zeros: nothing was written")
    good = sqnr >= bounds.good_db and relative <= bounds.relative
    return TensorResult(name, relative, sqnr, PASS if good else CLOSE if sqnr >= bounds.least_db else FAIL)


class Inputs(NamedTuple):
    """Random operands of one call: normal rows as a norm layer makes them, and a routing for experts.

    Attributes:
        x: ``[T, H]`` bf16.
        routing: ids int64 ``[T, K]`` and weights fp32 ``[T, K]`` that sum to 1; empty for a dense MLP.
        grad: ``[T, H]`` bf16, the gradient that arrives.
    """

    x: Tensor
    routing: tuple[Tensor, ...]
    grad: Tensor


def random_inputs(block: NeuronBlock, tokens: int, seed: int) -> Inputs:
    """Make the operands of a call, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape, experts = block.neuron_shape, _experts(block)
    x, grad = (torch.randn(tokens, shape.hidden, generator=generator).bfloat16() for _ in range(2))
    top_k = shape.top_k
    if top_k is None or experts is None:
        return Inputs(x, (), grad)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(min(max(top_k, 1), experts), -1)
    return Inputs(x, (ids, weights / weights.sum(-1, keepdim=True)), grad)


def _experts(block: NeuronBlock) -> int | None:
    if isinstance(block, FrozenBlock):
        codes = block.neuron_stack.gate_up_codes
        return int(codes.shape[0]) if codes.dim() > 2 else None
    down = block._parameters.get("down_proj")
    return int(down.shape[0]) if down is not None and down.dim() == 3 else None


def run_block(
    block: NeuronBlock, inputs: Inputs, backend: str, device: torch.device
) -> tuple[dict[str, Tensor], float]:
    """Compute a block's output and, unless its weights are frozen codes, every gradient.

    The block is moved to `device` for the time of the call.

    Args:
        block: a patched block.
        inputs: of :func:`random_inputs`.
        backend: name of the backend that computes.
        device: where.

    Returns:
        The results by name, on the CPU, and the seconds they took, compilation included.
    """
    frozen = isinstance(block, FrozenBlock)
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
    """The block with another backend, mode and device; all as before afterwards."""
    config, mode, home = block.neuron_config, block.training, next(block.buffers(), next(block.parameters(), None))
    block.neuron_config = replace(config, backend=backend)
    block.train(training)
    try:
        block.to(device)
        yield
    finally:
        block.neuron_config = config
        block.train(mode)
        if home is not None:
            block.to(home.device)
