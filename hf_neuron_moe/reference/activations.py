"""The gate activations of the blockwise MoE kernels and their derivatives, in fp32 (or fp64 for oracles).

=================  =====================================  ==========================================
ActFnType          value                                  derivative
=================  =====================================  ==========================================
SiLU               ``x s(x)``, s the logistic function    ``s (1 + x (1 - s))``
Swish              ``x s(1.702 x)``                       ``s (1 + 1.702 x (1 - s))``
GELU               ``x P(x)``, P the normal distribution  ``P(x) + x p(x)``, p its density
GELU_Tanh_Approx   ``x/2 (1 + tanh q) = x s(2q)``         ``s (1 + 2 x q' (1 - s))``
SquaredReLU        ``max(x, 0)^2``                        ``2 max(x, 0)``
=================  =====================================  ==========================================

``q = sqrt(2/pi) (x + 0.044715 x^3)``.

Source: nki-library 2.29 and 2.33 ``common_types.ActFnType`` and its torch reference.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.reference.moe_types import ActFnType

SWISH_BETA = 1.702
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def act(x: Tensor, kind: ActFnType) -> Tensor:
    """Return the activation of `x` (fp32 or fp64, any shape) in `x`'s dtype; `x` is kept. Differentiable."""
    if kind is ActFnType.SiLU:
        return F.silu(x)
    if kind is ActFnType.Swish:
        return x * torch.sigmoid(x * SWISH_BETA)
    if kind is ActFnType.SquaredReLU:
        return x.clamp(min=0).square()
    return F.gelu(x, approximate="tanh" if kind is ActFnType.GELU_Tanh_Approx else "none")


def act_(x: Tensor, kind: ActFnType) -> Tensor:
    """Replace `x` by its activation and return it; see :func:`act`."""
    return F.silu(x, inplace=True) if kind is ActFnType.SiLU else x.copy_(act(x, kind))


def act_grad_(x: Tensor, kind: ActFnType) -> Tensor:
    """Replace `x` (fp32 or fp64, any shape) by the activation's derivative at it and return it."""
    if kind is ActFnType.SquaredReLU:
        return x.clamp_(min=0).mul_(2)
    if kind in (ActFnType.SiLU, ActFnType.Swish):
        beta = SWISH_BETA if kind is ActFnType.Swish else 1.0
        x.mul_(beta)
        return _logistic_grad_(x, x.clone())
    if kind is ActFnType.GELU:
        density = x.square().mul_(-0.5).exp_().mul_(x).mul_(1 / math.sqrt(2 * math.pi))
        return x.mul_(1 / math.sqrt(2)).erf_().add_(1).mul_(0.5).add_(density)
    # x/2 (1 + tanh q) = x s(2q), so that the derivative has the form of the other two.
    square = x.square()
    exponent = square.mul(_TANH_CUBE).add_(1).mul_(x).mul_(2 * _TANH_SCALE)
    return _logistic_grad_(x.mul_(square.mul_(3 * _TANH_CUBE).add_(1).mul_(2 * _TANH_SCALE)), exponent)


def _logistic_grad_(x: Tensor, exponent: Tensor) -> Tensor:
    """Replace `x` by ``s (1 + x (1 - s))``, s the logistic function of `exponent`, which is overwritten too.

    ``1 - s`` is taken as the logistic function of the negative: the difference would cancel for large arguments.
    """
    s = torch.sigmoid(exponent)
    return x.mul_(exponent.neg_().sigmoid_()).add_(1).mul_(s)
