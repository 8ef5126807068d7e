"""The activations of the blockwise MoE kernels by their documented type, in fp32 (or fp64 for oracles)."""

from __future__ import annotations

from torch import Tensor

from hf_neuron_moe.backends.torch.gating import ACTIVATIONS
from hf_neuron_moe.reference.moe_types import ActFnType

_BY_TYPE = {
    ActFnType.SiLU: ACTIVATIONS["silu"],
    ActFnType.GELU: ACTIVATIONS["gelu"],
    ActFnType.GELU_Tanh_Approx: ACTIVATIONS["gelu_tanh"],
    ActFnType.Swish: ACTIVATIONS["swish"],
    ActFnType.SquaredReLU: ACTIVATIONS["squared_relu"],
}


def act(x: Tensor, kind: ActFnType) -> Tensor:
    """Return the activation of `x` (fp32 or fp64, any shape) in `x`'s dtype; `x` is kept. Differentiable."""
    return _BY_TYPE[kind].value(x)


def act_(x: Tensor, kind: ActFnType) -> Tensor:
    """Replace `x` by its activation and return it; see :func:`act`."""
    return _BY_TYPE[kind].value_(x)


def act_grad_(x: Tensor, kind: ActFnType) -> Tensor:
    """Replace `x` (fp32 or fp64, any shape) by the activation's derivative at it and return it."""
    return _BY_TYPE[kind].grad_(x)


def act_slope(x: Tensor, factor: Tensor, out: Tensor, kind: ActFnType) -> Tensor:
    """Write ``factor * act'(x)`` into `out` and return it; all fp32 (or fp64), of one shape."""
    return _BY_TYPE[kind].slope(x, factor, out)
