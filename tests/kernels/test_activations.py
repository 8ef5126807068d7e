"""The gate activations and their derivatives."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.reference.activations import BY_TYPE
from hf_neuron_moe.reference.moe_types import ActFnType
from tests.kernels.moe_oracle import ACTIVATIONS

KINDS = pytest.mark.parametrize("kind", list(ActFnType))
POINTS = torch.linspace(-12, 12, 4001, dtype=torch.float64)


def act(x: torch.Tensor, kind: ActFnType) -> torch.Tensor:
    return BY_TYPE[kind].value(x)


def act_grad(x: torch.Tensor, kind: ActFnType) -> torch.Tensor:
    return BY_TYPE[kind].grad_(x.clone())


@KINDS
def test_values_are_the_documented_formulas(kind: ActFnType) -> None:
    # float64 formulas written in two ways.
    assert (act(POINTS, kind) - ACTIVATIONS[kind.name](POINTS)).abs().max() <= 1e-14


@KINDS
def test_derivatives_equal_autograd(kind: ActFnType) -> None:
    x = POINTS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(act(x, kind).sum(), x)
    assert (act_grad(POINTS, kind) - gradient).abs().max() <= 1e-14


@KINDS
def test_fp32_is_as_exact_as_fp32_allows(kind: ActFnType) -> None:
    x = POINTS.float()
    for function in (act, act_grad):
        exact = function(x.double(), kind)
        # A few roundings, relative to values of up to 12 (or 144 for the square).
        assert (function(x, kind) - exact).abs().max() <= 4e-7 * exact.abs().max()


@KINDS
def test_in_place_variants_overwrite_their_argument(kind: ActFnType) -> None:
    for function, in_place in ((act, BY_TYPE[kind].value_), (act_grad, BY_TYPE[kind].grad_)):
        x = POINTS.float()
        kept = x.clone()
        expected = function(x, kind)
        assert torch.equal(x, kept)
        assert in_place(x) is x
        assert torch.equal(x, expected)
