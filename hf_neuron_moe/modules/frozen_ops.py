"""The networks with MX weights as one ``torch.library`` operator and its backward.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order (R = T for a
dense MLP).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout
from hf_neuron_moe.kernels.checks import check_dtype, check_shape
from hf_neuron_moe.modules.ops import exact_dtypes

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)


def frozen_network(
    x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack, *, backend: str
) -> Tensor:
    """A SwiGLU MLP, or the weighted sum of SwiGLU experts, whose weights are MX codes; differentiable, without them.

    Args:
        x_TH: ``[T, H]``, any float dtype; read in bf16.
        index_TK: integer expert ids ``[T, K]``, ids of E and above add nothing; None for a dense MLP.
        weight_TK: ``[T, K]`` routing weights; None for a dense MLP.
        stack: the weights.
        backend: what :func:`hf_neuron_moe.backends.resolve_backend` returned.

    Returns:
        ``[T, H]`` in the dtype of `x_TH`.

    Raises:
        DTypeError, ShapeError: an argument does not fit the weights.
    """
    where = "frozen_network"
    check_dtype(x_TH, _FLOATS, where=where, argument="x_TH")
    check_shape(x_TH, (None, stack.hidden), "[T, H]", where=where, argument="x_TH")
    if index_TK is not None and weight_TK is not None:
        check_dtype(index_TK, (torch.int64, torch.int32), where=where, argument="index_TK")
        check_dtype(weight_TK, _FLOATS, where=where, argument="weight_TK")
        check_shape(index_TK, (len(x_TH), None), "[T, K]", where=where, argument="index_TK")
        check_shape(weight_TK, tuple(index_TK.shape), "[T, K]", where=where, argument="weight_TK")
    inputs = [tensor for tensor in (x_TH, weight_TK) if tensor is not None]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    y_TH, _, _ = frozen_fwd(
        x_TH.to(torch.bfloat16),
        index_TK,
        weight_TK,
        stack.gate_up_codes,
        stack.gate_up_scales,
        stack.down_codes,
        stack.down_scales,
        "|".join((stack.gate_up_layout.key, stack.down_layout.key, backend)),
        keep,
    )
    return y_TH.to(x_TH.dtype)


@torch.library.custom_op("hf_neuron_moe::frozen_fwd", mutates_args=())
def frozen_fwd(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    names: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; returns y, gate and up.

    `names` are both layouts and the backend, joined by ``|``.
    """
    stack = _stack((gate_up_codes, gate_up_scales, down_codes, down_scales), names)
    with exact_dtypes(x_TH):
        return get_backend(_backend_of(names)).frozen_forward(x_TH, index_TK, weight_TK, stack, keep)


@torch.library.custom_op("hf_neuron_moe::frozen_bwd", mutates_args=())
def frozen_bwd(
    dout_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    gate_RI: Tensor,
    up_RI: Tensor,
    names: str,
    wants_input: bool,
    wants_routing: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the routing weights; empty where not wanted."""
    stack = _stack((gate_up_codes, gate_up_scales, down_codes, down_scales), names)
    wants = (wants_input, wants_routing)
    with exact_dtypes(dout_TH):
        return get_backend(_backend_of(names)).frozen_backward(
            dout_TH, index_TK, weight_TK, stack, (gate_RI, up_RI), *wants
        )


@frozen_fwd.register_fake
def _(x_TH: Tensor, index_TK: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, names, keep = rest[1:]
    rows = x_TH.shape[0] if index_TK is None else index_TK.numel()
    shape = (rows, _stack(tuple(tensors), names).inner) if keep else (0,)
    return x_TH.new_empty(x_TH.shape), x_TH.new_empty(shape), x_TH.new_empty(shape)


@frozen_bwd.register_fake
def _(dout_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, wants_input, wants_routing = rest
    d_x = dout_TH.new_empty(dout_TH.shape if wants_input else (0,))
    if wants_routing and weight_TK is not None:
        return d_x, weight_TK.new_empty(weight_TK.shape)
    return d_x, dout_TH.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, index, weight, *tensors, ctx.names, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.routed = index is not None
    routing = (index, weight) if ctx.routed else ()
    ctx.save_for_backward(*routing, *tensors, *output[1:])


def _backward(ctx: Any, dout_TH: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved, needs = list(ctx.saved_tensors), ctx.needs_input_grad
    routing = [saved.pop(0), saved.pop(0)] if ctx.routed else [None, None]
    wants = (needs[0], ctx.routed and needs[2])
    d_x, d_weight = frozen_bwd(dout_TH.contiguous(), *routing, *saved, ctx.names, *wants)
    return d_x if wants[0] else None, None, d_weight if wants[1] else None, *(None,) * 6


frozen_fwd.register_autograd(_backward, setup_context=_setup)


def _stack(tensors: tuple[Tensor, ...], names: str) -> MXExpertStack:
    gate_up, down, _ = names.split("|")
    gate_up_codes, gate_up_scales, down_codes, down_scales = tensors
    layouts = MXLayout.from_key(gate_up), MXLayout.from_key(down)
    return MXExpertStack(gate_up_codes, gate_up_scales, down_codes, down_scales, *layouts)


def _backend_of(names: str) -> str:
    return names.rpartition("|")[2]
