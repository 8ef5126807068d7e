"""The networks with MX weights as one ``torch.library`` operator and its backward.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order (R = T for a
dense MLP).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import NOTHING
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.checks import check_dtype, check_shape
from hf_neuron_moe.errors import public
from hf_neuron_moe.modules.ops import exact_dtypes, refuse_second_derivative
from hf_neuron_moe.modules.ops_checks import check_no_transform

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)
_KEEPS = keep_strings("bf16")


@public
def frozen_network(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    stack: MXExpertStack,
    *,
    backend: str,
    activations: str = "minimal",
) -> Tensor:
    """A SwiGLU MLP, or the weighted sum of SwiGLU experts, whose weights are MX codes; differentiable, without them.

    Args:
        x_TH: ``[T, H]``, any float dtype; read in bf16.
        index_TK: integer expert ids ``[T, K]``, ids of E and above add nothing; None for a dense MLP.
        weight_TK: ``[T, K]`` routing weights; None for a dense MLP.
        stack: the weights.
        backend: what :func:`hf_neuron_moe.backends.resolve_backend` returned.
        activations: what is kept for the backward, which is that of the bf16 kernels: a preset's name or a canonical
            keep string, see :mod:`hf_neuron_moe.activation_policy`. The input is kept only where gate or up is made
            again from it, since the weights have no gradient.

    Returns:
        ``[T, H]`` in the dtype of `x_TH`.

    Raises:
        ConfigError, DTypeError, ShapeError: an argument does not fit the weights.
        GradientError: an argument belongs to a transform of ``torch.func``.
    """
    check_no_transform((x_TH,) if weight_TK is None else (x_TH, weight_TK))
    check_dtype(x_TH, _FLOATS, argument="x_TH")
    check_shape(x_TH, (None, stack.hidden), "[T, H]", argument="x_TH")
    if index_TK is not None and weight_TK is not None:
        check_dtype(index_TK, (torch.int64, torch.int32), argument="index_TK")
        check_dtype(weight_TK, _FLOATS, argument="weight_TK")
        check_shape(index_TK, (len(x_TH), None), "[T, K]", argument="index_TK")
        check_shape(weight_TK, tuple(index_TK.shape), "[T, K]", argument="weight_TK")
        index_TK, weight_TK = index_TK.to(torch.int64), weight_TK.to(torch.float32)
    if activations not in _KEEPS:
        activations = canonical_keep(activations, "bf16")
    inputs = [tensor for tensor in (x_TH, weight_TK) if tensor is not None]
    recording = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    y_TH, _, _ = frozen_fwd(
        x_TH.to(torch.bfloat16).contiguous(),
        index_TK,
        weight_TK,
        stack.gate_up_codes,
        stack.gate_up_scales,
        stack.down_codes,
        stack.down_scales,
        "|".join((stack.gate_up_layout.key, stack.down_layout.key, backend)),
        activations if recording else NOTHING,
    )
    return y_TH.to(x_TH.dtype)


@operator("hf_neuron_moe::frozen_fwd")
def frozen_fwd(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    names: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; returns y and the two tensors that the policy keeps.

    `names` are both layouts and the backend, joined by ``|``.
    """
    stack = _stack((gate_up_codes, gate_up_scales, down_codes, down_scales), names)
    with exact_dtypes(x_TH):
        return get_backend(_backend_of(names)).frozen_forward(x_TH, index_TK, weight_TK, stack, keep)


@operator("hf_neuron_moe::frozen_bwd")
def frozen_bwd(
    dout_TH: Tensor,
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    saved_a: Tensor,
    saved_b: Tensor,
    names: str,
    keep: str,
    wants_input: bool,
    wants_routing: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the routing weights; empty where not wanted."""
    stack = _stack((gate_up_codes, gate_up_scales, down_codes, down_scales), names)
    operands = (dout_TH, x_TH, index_TK, weight_TK, stack, (saved_a, saved_b), keep)
    with exact_dtypes(dout_TH):
        return get_backend(_backend_of(names)).frozen_backward(*operands, wants_input, wants_routing)


@fake_of(frozen_fwd)
def _(x_TH: Tensor, index_TK: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, names, keep = rest[1:]
    rows = x_TH.shape[0] if index_TK is None else index_TK.numel()
    inner = _stack(tuple(tensors), names).inner
    saved = get_backend(_backend_of(names)).frozen_fake_saved(x_TH, rows, inner, keep)
    return x_TH.new_empty(x_TH.shape), *saved


@fake_of(frozen_bwd)
def _(
    dout_TH: Tensor, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    *_, wants_input, wants_routing = rest
    d_x = dout_TH.new_empty(dout_TH.shape if wants_input else (0,))
    if wants_routing and weight_TK is not None:
        return d_x, weight_TK.new_empty(weight_TK.shape)
    return d_x, dout_TH.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TH, index, weight, *tensors, ctx.names, ctx.keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.routed = index is not None
    routing = (index, weight) if ctx.routed else ()
    kept_x = x_TH if parse_keep(ctx.keep).keeps_input_frozen else x_TH.new_empty(0)
    ctx.save_for_backward(kept_x, *routing, *tensors, *output[1:])


def _backward(ctx: Any, dout_TH: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (x_TH, *saved), needs = ctx.saved_tensors, ctx.needs_input_grad
    routing, tensors = (saved[:2], saved[2:]) if ctx.routed else ([None, None], saved)
    wants = (needs[0], ctx.routed and needs[2])
    d_x, d_weight = frozen_bwd(dout_TH.contiguous(), x_TH, *routing, *tensors, ctx.names, ctx.keep, *wants)
    return d_x if wants[0] else None, None, d_weight if wants[1] else None, *(None,) * 6


frozen_fwd.register_autograd(_backward, setup_context=_setup)
frozen_bwd.register_autograd(refuse_second_derivative)


def _stack(tensors: tuple[Tensor, ...], names: str) -> MXExpertStack:
    gate_up, down, _ = names.split("|")
    gate_up_codes, gate_up_scales, down_codes, down_scales = tensors
    layouts = MXLayout.from_key(gate_up), MXLayout.from_key(down)
    return MXExpertStack(gate_up_codes, gate_up_scales, down_codes, down_scales, *layouts)


def _backend_of(names: str) -> str:
    return names.rpartition("|")[2]
