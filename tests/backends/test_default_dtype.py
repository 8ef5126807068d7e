"""Blocks compute the same whatever ``torch.get_default_dtype()`` is: ``from_pretrained`` sets it while it loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch import gating
from hf_neuron_moe.backends.torch.compute import release_scratch
from hf_neuron_moe.modules import ops
from tests.backends.test_gates import GATES

T, H, I, E, K = 70, 64, 96, 3, 2  # noqa: E741


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def results(gate: Gate, precision: str, backend: str, activations: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output of experts and every gradient."""
    release_scratch()
    gating.gating_of.cache_clear()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * shape[-1] ** -0.5
        return values.to(dtype).requires_grad_()

    rows = 2 * I if gate.gated else I
    x, gate_up, down = draw(T, H), draw(E, rows, H), draw(E, H, I)
    biases = (draw(E, rows), draw(E, H))
    index = torch.arange(T * K).view(T, K).remainder(E)
    scores = torch.linspace(0.1, 0.9, T * K, dtype=torch.float32).view(T, K).requires_grad_()
    options = {"precision": precision, "block_size": 512, "backend": backend, "activations": activations, "gate": gate}
    y = ops.experts(x, index, scores, gate_up, down, transposed=False, biases=biases, **options)
    leaves = [x, scores, gate_up, down, *biases]
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]


@pytest.mark.parametrize("backend", ["torch", "torch-grouped"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("name", GATES)
def test_experts(name: str, precision: str, backend: str, other: torch.dtype) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for activations in ("minimal", "recompute", "fp8"):
        given = (GATES[name], precision, backend, activations, dtype)
        expected = results(*given)
        torch.set_default_dtype(other)
        found = results(*given)
        torch.set_default_dtype(torch.float32)
        assert [part.dtype for part in found] == [part.dtype for part in expected]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
