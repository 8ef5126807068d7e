"""The networks with MX weights as one ``torch.library`` operator and its backward.

Legend: T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import WORDS, MXExpertStack
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec, Routing, Wants
from hf_neuron_moe.checks import check_dtype, check_float, check_shape
from hf_neuron_moe.errors import ConfigError, ShapeError, public
from hf_neuron_moe.modules.op_watch import watched
from hf_neuron_moe.modules.ops import called, exact_dtypes, recorded_policy, set_derivative, traced_into
from hf_neuron_moe.modules.ops_checks import check_no_transform

_SPEC = BlockSpec("bf16")


@public
def quantized_network(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    stack: MXExpertStack,
    *,
    backend: str,
    activations: str = "minimal",
) -> Tensor:
    """Return an MLP of `x_TH`, or the weighted sum of experts, whose weights are MX codes: ``[T, H]``.

    `x_TH` is ``[T, H]`` in any float dtype, read in bf16; the result has its dtype and is differentiable by `x_TH` and
    `weight_TK`. `index_TK` are integer expert ids ``[T, K]``, of which those of E and above add nothing, `weight_TK`
    the routing weights ``[T, K]``; both are None for a dense MLP. `backend` and `activations` are those of
    :func:`~hf_neuron_moe.modules.ops.swiglu_mlp` for the bf16 kernels, whose backward this one is. The input is kept
    only where gate or up is made again from it, since the weights have no gradient.
    """
    check_no_transform((x_TH,) if weight_TK is None else (x_TH, weight_TK))
    check_float(x_TH, "x_TH")
    check_shape(x_TH, (None, stack.hidden), "[T, H]", argument="x_TH")
    if index_TK is not None and weight_TK is not None:
        check_dtype(index_TK, (torch.int64, torch.int32), argument="index_TK")
        check_float(weight_TK, "weight_TK")
        check_shape(index_TK, (len(x_TH), None), "[T, K]", argument="index_TK")
        check_shape(weight_TK, tuple(index_TK.shape), "[T, K]", argument="weight_TK")
        index_TK, weight_TK = index_TK.to(torch.int64), weight_TK.to(torch.float32)
    _check_stack(stack)
    inputs = (x_TH,) if weight_TK is None else (x_TH, weight_TK)
    keep = recorded_policy(inputs, activations, _SPEC.precision)
    call = BlockCall(
        _SPEC._replace(gate=stack.gate), keep, backend, layouts=(stack.gate_up_layout, stack.down_layout)
    ).encode()
    codes = (stack.gate_up_codes, stack.gate_up_scales, stack.down_codes, stack.down_scales)
    biases = (stack.gate_up_bias, stack.down_bias)
    y_TH = frozen_fwd(x_TH.to(torch.bfloat16).contiguous(), index_TK, weight_TK, *codes, *biases, call)[0]
    return y_TH.to(x_TH.dtype)


def _check_stack(stack: MXExpertStack) -> None:
    if stack.down.shape[1] < stack.inner:
        expected = f"at least {stack.inner} columns, as {stack.gate.title} has of up"
        fix = "Pass the gate with which the codes were made."
        raise ShapeError.about("down_codes", expected, stack.down.shape[1], fix)
    experts = stack.gate_up_codes.dim() > (4 if stack.gate_up_layout.arrangement == WORDS else 2)
    leading = stack.gate_up_codes.shape[:1] if experts else ()
    sizes = (stack.gate.halves * stack.inner, stack.hidden)
    for name, bias, size in zip(
        ("gate_up_bias", "down_bias"), (stack.gate_up_bias, stack.down_bias), sizes, strict=True
    ):
        if bias is None:
            continue
        check_float(bias, name)
        check_shape(bias, (*leading, size), "the projection's rows", argument=name)
        if bias.requires_grad:
            fix = "Pass bias.detach(), or train weights that are not MX codes."
            raise ConfigError.about(name, "a tensor that needs no gradient", "one that needs it", fix)


def _routing(index_TK: Tensor | None, weight_TK: Tensor | None) -> Routing | None:
    return None if index_TK is None or weight_TK is None else Routing(index_TK, weight_TK)


@operator("hf_neuron_moe::frozen_fwd", traced_into)
def frozen_fwd(
    x_TH: Tensor,
    index_TK: Tensor | None,
    weight_TK: Tensor | None,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; returns y and the two tensors that the policy keeps."""
    what, kernels = called(call)
    codes = (gate_up_codes, gate_up_scales, down_codes, down_scales)
    gate_up_layout, down_layout = what.layouts
    stack = MXExpertStack(*codes, gate_up_layout, down_layout, what.spec.gate, gate_up_bias, down_bias)
    routing = _routing(index_TK, weight_TK)
    with exact_dtypes(x_TH):
        y_TH, *saved = kernels.quantized_forward(x_TH, routing, stack, what.keep)
        watched(what, x_TH, routing, stack, saved, (y_TH,))
    return y_TH, saved[0], saved[1]


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
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved_a: Tensor,
    saved_b: Tensor,
    call: str,
    wants_input: bool,
    wants_routing: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the routing weights; empty where not wanted."""
    what, kernels = called(call)
    codes = (gate_up_codes, gate_up_scales, down_codes, down_scales)
    gate_up_layout, down_layout = what.layouts
    stack = MXExpertStack(*codes, gate_up_layout, down_layout, what.spec.gate, gate_up_bias, down_bias)
    routing, saved = _routing(index_TK, weight_TK), (saved_a, saved_b)
    wants = Wants(wants_input, wants_routing, False)
    with exact_dtypes(dout_TH):
        grads = kernels.quantized_backward(dout_TH, x_TH, routing, stack, saved, what.keep, wants)
        watched(what, x_TH, routing, stack, saved, grads, dout_TH)
    return grads


@fake_of(frozen_fwd)
def _(x_TH: Tensor, index_TK: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, *tensors, _, _, call = rest
    rows = x_TH.shape[0] if index_TK is None else index_TK.numel()
    what, kernels = called(call)
    gate = what.spec.gate
    inner = replace(MXExpertStack(*tensors, *what.layouts), gate=gate).inner
    saved = kernels.quantized_fake_saved(x_TH, rows, inner, what.keep, gate)
    return x_TH.new_empty(x_TH.shape), *saved


set_derivative(frozen_fwd, frozen_bwd, ((0,), (2,)), lambda keep: keep.keeps_input_quantized)
