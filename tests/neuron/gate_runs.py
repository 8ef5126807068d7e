"""Blocks with any gate and biases on one backend. T tokens, H hidden, I intermediate, E experts, K per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants

T, H, I, E, K, B = 37, 96, 160, 3, 2, 256  # noqa: E741
BF16 = 2e-2  # of the largest value: nki-library's own tolerance of its bf16 kernels
CLAMPED = Gate(gate_max=1.0, up_max=1.0, up_min=-1.0)
SHIFTED = Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0)
OFFSET = Gate(up_offset=1.0)
CAPPED = Gate(act_max=0.75, up_max=0.75, up_min=-0.75)
SQUARED = Gate("squared_relu", gated=False)


def neuron() -> Any:
    return get_backend(resolve_backend("neuron", torch.device("cpu")))


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def routing() -> Routing:
    index = torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)])  # some pairs belong to another rank
    return Routing(index, torch.rand(T, K))


def stack(spec: BlockSpec, *, biased: bool = True) -> ExpertWeights:
    """Experts whose biases are as large as their products."""
    rows = 2 * I if spec.gate.gated else I
    gate_up, down = normal(E, rows, H, scale=0.1), normal(E, H, I, scale=0.1)
    if spec.transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    return ExpertWeights(gate_up, down, *((normal(E, rows), normal(E, H)) if biased else ()))


def network(*biased: bool) -> FFNWeights:
    """A dense MLP with biases of gate, up and down where asked for."""
    biases = [normal(size) if there else None for size, there in zip((I, I, H), biased or (False,) * 3, strict=True)]
    return FFNWeights(normal(I, H, scale=0.1), normal(I, H, scale=0.1), normal(H, I, scale=0.1), *biases)


def results(backend: Any, x: Tensor, given: Any, weights: Any, spec: BlockSpec, keep: str) -> list[Tensor]:
    """Output and every gradient of experts, or of a dense MLP where no routing is `given`."""
    dout, policy = torch.roll(x, 1, 0), parse_keep(keep)
    call = BackwardCall(spec, policy, Wants())
    source = x.new_empty(0) if policy.fp8 else x
    if given is None:
        y, saved = backend.mlp_forward(x, weights, spec, policy)
        shape = BlockShape("mlp", H, I)
        grads = backend.mlp_backward(dout, source, weights, saved, call)
    else:
        y, saved = backend.experts_forward(x, given, weights, spec, policy)
        shape = BlockShape("experts", H, I, E, K)
        grads = backend.experts_backward(dout, source, given, weights, saved, call)
    if backend.name == "neuron":
        fakes = backend.fake_saved(x, shape, spec, policy)
        assert [(t.shape, t.dtype) for t in fakes] == [(t.shape, t.dtype) for t in saved]
    return [y, *grads]


def deviations(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Largest difference of each pair, in parts of the largest value; 0 for gradients of what is not there."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and mine.is_contiguous()
    pairs = [(mine.float(), theirs.float()) for mine, theirs in zip(found, expected, strict=True) if theirs.numel()]
    return [float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs]


def compared(spec: BlockSpec, given: Any, weights: Any, *keeps: str) -> list[float]:
    """Deviations of a block from the torch backend with the first policy; others must give the same gradients."""
    x = normal(T, H, dtype=torch.bfloat16)
    first, *others = (results(neuron(), x, given, weights, spec, keep) for keep in keeps)
    for found in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[1:], first[1:])), "policies differ"
    return deviations(first, results(get_backend("torch"), x, given, weights, spec, keeps[0]))
