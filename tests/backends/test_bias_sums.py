"""Sums over a group's rows for the gradients of gate's and up's biases, in the backward by bf16 products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hf_neuron_moe.backends.spec import Routing, Wants
from hf_neuron_moe.backends.torch.biases import BiasGrads
from hf_neuron_moe.backends.torch.grouped_backward import GroupedBackward
from hf_neuron_moe.backends.torch.tiles import make_loader

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("rows", (0, 1, 700))
@pytest.mark.parametrize(
    ("gate", "up", "dtype"),
    [(BF16, BF16, BF16), (None, BF16, BF16), (FP32, FP32, FP32), (FP32, BF16, FP32), (BF16, FP32, FP32)],
)
def test_the_sum_has_the_precision_of_the_biases(
    rows: int, gate: torch.dtype | None, up: torch.dtype, dtype: torch.dtype
) -> None:
    """One rounding of the fp32 sum where both are bf16. 700 rows are more than are copied to fp32 at a time."""
    generator = torch.Generator().manual_seed(rows)
    values = (torch.randn(rows, 600, generator=generator) * 2 ** torch.randint(-9, 9, (600,), generator=generator)).to(
        BF16
    )
    biases = [None if kind is None else torch.zeros(1, 300, dtype=kind) for kind in (gate, up)]
    weights = SimpleNamespace(gate_bias_GI=biases[0], up_bias_GI=biases[1])
    backward = SimpleNamespace(weights=weights, loader=make_loader("bf16", torch.device("cpu"), 512, BF16))
    found = GroupedBackward._sum_of_rows(cast(Any, backward), values)
    assert found.dtype == dtype and found.shape == (1, 600)
    exact, size = values.double().sum(0), values.double().abs().sum(0)
    # A sum in fp32 is within 2**-20 of the sum of magnitudes for 700 rows; bf16 rounds it to within 2**-8 of itself.
    bound = size * 2**-20 + (exact.abs() * 2**-8 if dtype == BF16 else 0)
    assert ((found[0].double() - exact).abs() <= bound).all()


def test_the_bias_of_down_gets_the_sum_in_fp32() -> None:
    dout = torch.randn(300, 16, generator=torch.Generator().manual_seed(1)).to(BF16)
    weights: Any = SimpleNamespace(down_bias_GH=torch.zeros(2, 16), biased=False)
    grads, share = BiasGrads(weights, Wants(), dout), torch.full((300, 1), 1 / 3)
    routing = Routing(torch.arange(300)[:, None] % 2, share)
    rows, pairs = grads.down_of_rows(dout), grads.down_of_pairs(dout, routing)
    assert rows is not None and pairs is not None
    exact = torch.stack([dout[expert::2].double().sum(0) for expert in range(2)])
    torch.testing.assert_close(rows.double(), exact.sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(pairs.double(), exact / 3, rtol=1e-5, atol=1e-4)
