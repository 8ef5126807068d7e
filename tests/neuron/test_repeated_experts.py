"""A token that names an expert twice: the kernels get it once, with both weights. T tokens, K per token, E experts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.backends.neuron.static_plan import plan_blocks, route
from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.modules import ops

Start = Callable[..., SimpleNamespace]
EXPERTS = 4


def results(
    backend: str, precision: str, hidden: int, block_size: int, index_TK: Tensor, weight_TK: Tensor
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(index_TK), hidden, generator=generator).bfloat16().requires_grad_()
    gate_up, down = (
        (torch.randn(EXPERTS, *shape, generator=generator) * hidden**-0.5).bfloat16().requires_grad_()
        for shape in ((256, hidden), (hidden, 128))
    )
    weight = weight_TK.clone().requires_grad_()
    y = ops.experts(
        x,
        index_TK,
        weight,
        gate_up,
        down,
        transposed=False,
        precision=precision,
        block_size=block_size,
        backend=backend,
        training=True,
    )
    grads = torch.autograd.grad(y, (x, weight, gate_up, down), torch.randn(y.shape, generator=generator).bfloat16())
    return dict(zip(("y", "x", "weight", "gate_up", "down"), (y.detach(), *grads), strict=True))


@pytest.mark.parametrize(
    ("target", "precision", "hidden", "block_size"), [("trn2", "bf16", 512, 256), ("trn3", "mxfp8", 128, 128)]
)
def test_both_weights_count(target: str, precision: str, hidden: int, block_size: int, machine: Start) -> None:
    index = torch.tensor([[2, 2], [0, 1], [3, 3], [EXPERTS, EXPERTS], [1, 0]])
    weight = torch.tensor([[0.25, 0.5], [0.5, 0.5], [1.0, -0.5], [0.5, 0.5], [0.25, 0.75]])
    twice = index[:, 0] == index[:, 1]
    once = index.clone()
    once[twice, 1] = EXPERTS
    summed = torch.stack([weight[:, 0] + weight[:, 1] * twice, weight[:, 1] * ~twice], 1)
    reference = results("torch", precision, hidden, block_size, index, weight)
    machine(target=target)
    found = results("neuron", precision, hidden, block_size, index, weight)
    same = results("neuron", precision, hidden, block_size, once, summed)
    for name in ("y", "x", "gate_up", "down"):
        assert torch.equal(found[name], same[name]), name
        # The torch backend's two slots round twice; the bounds are the tolerances of nki-library's own tests.
        bound = 2e-2 if precision == "bf16" else 5e-2
        assert (found[name] - reference[name]).abs().max() <= bound * reference[name].abs().max(), name
    assert torch.equal(found["weight"][:, 0], same["weight"][:, 0])
    assert torch.equal(found["weight"][[0, 2], 0], found["weight"][[0, 2], 1]) and found["weight"][0].ne(0).all()
    assert found["weight"][3].eq(0).all()


def test_the_sum_needs_no_values() -> None:
    """A device's program is traced: the same operations must make the sum there."""
    index, weight = torch.tensor([[1, 1]]), torch.tensor([[0.25, 0.5]])
    options = {"sink": True, "dtype": torch.bfloat16}
    affinities = route(plan_blocks(index, 2, 128, 1), Routing(index, weight), 2, **options).expert_affinities_masked
    assert affinities.flatten().tolist() == [0, 0.75, 0, 0]
    with FakeTensorMode() as mode:
        fake = Routing(mode.from_tensor(index), mode.from_tensor(weight))
        made = route(plan_blocks(fake.index_TK, 2, 128, 1), fake, 2, **options).expert_affinities_masked
        assert made.shape == (4, 1) and made.dtype == torch.bfloat16
