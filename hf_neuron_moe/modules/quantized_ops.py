"""The networks with MX weights as one ``torch.library`` operator and its backward.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order (R = T for a
dense MLP).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.backends.base import NOTHING
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec, Routing, Wants
from hf_neuron_moe.checks import check_dtype, check_shape
from hf_neuron_moe.errors import public
from hf_neuron_moe.modules.ops import called, exact_dtypes, refuse_second_derivative, traced_into
from hf_neuron_moe.modules.ops_checks import check_no_transform

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)
_SPEC = BlockSpec("bf16")
_KEEPS = {keep: parse_keep(keep) for keep in keep_strings(_SPEC.precision)}


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
        activations = canonical_keep(activations, _SPEC.precision)
    inputs = [tensor for tensor in (x_TH, weight_TK) if tensor is not None]
    recording = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    keep, layouts = _KEEPS[activations] if recording else NOTHING, (stack.gate_up_layout, stack.down_layout)
    y_TH, _, _ = frozen_fwd(
        x_TH.to(torch.bfloat16).contiguous(),
        index_TK,
        weight_TK,
        stack.gate_up_codes,
        stack.gate_up_scales,
        stack.down_codes,
        stack.down_scales,
        BlockCall(_SPEC, keep, backend, layouts=layouts).encode(),
    )
    return y_TH.to(x_TH.dtype)


@operator("hf_neuron_moe::frozen_fwd", traced_into)
def frozen_fwd(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    call: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; returns y and the two tensors that the policy keeps."""
    what, kernels = called(call)
    stack = MXExpertStack(gate_up_codes, gate_up_scales, down_codes, down_scales, *what.layouts)
    with exact_dtypes(x_TH):
        return kernels.quantized_forward(x_TH, _routing(index_TK, weight_TK), stack, what.keep)


@operator("hf_neuron_moe::frozen_bwd", traced_into)
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
    call: str,
    wants_input: bool,
    wants_routing: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the routing weights; empty where not wanted."""
    what, kernels = called(call)
    stack = MXExpertStack(gate_up_codes, gate_up_scales, down_codes, down_scales, *what.layouts)
    operands = (dout_TH, x_TH, _routing(index_TK, weight_TK), stack, (saved_a, saved_b), what.keep)
    with exact_dtypes(dout_TH):
        return kernels.quantized_backward(*operands, Wants(wants_input, wants_routing, False))


@fake_of(frozen_fwd)
def _(x_TH: Tensor, index_TK: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, *tensors, call = rest
    rows = x_TH.shape[0] if index_TK is None else index_TK.numel()
    what, kernels = called(call)
    saved = kernels.quantized_fake_saved(x_TH, rows, MXExpertStack(*tensors, *what.layouts).inner, what.keep)
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
    x_TH, index, weight, *tensors, ctx.call = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.routed = index is not None
    routing = (index, weight) if ctx.routed else ()
    kept_x = x_TH if BlockCall.decode(ctx.call).keep.keeps_input_frozen else x_TH.new_empty(0)
    ctx.save_for_backward(kept_x, *routing, *tensors, *output[1:])


def _backward(ctx: Any, dout_TH: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (x_TH, *saved), needs = ctx.saved_tensors, ctx.needs_input_grad
    routing, tensors = (saved[:2], saved[2:]) if ctx.routed else ([None, None], saved)
    wants = (needs[0], ctx.routed and needs[2])
    d_x, d_weight = frozen_bwd(dout_TH.contiguous(), x_TH, *routing, *tensors, ctx.call, *wants)
    return d_x if wants[0] else None, None, d_weight if wants[1] else None, *(None,) * 5


frozen_fwd.register_autograd(_backward, setup_context=_setup)
frozen_bwd.register_autograd(refuse_second_derivative)


def _routing(index_TK: Tensor | None, weight_TK: Tensor | None) -> Routing | None:
    return None if index_TK is None or weight_TK is None else Routing(index_TK, weight_TK)
