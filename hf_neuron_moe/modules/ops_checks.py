"""Argument checks of the operators' public functions; letters as in :mod:`hf_neuron_moe.modules.ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.checks import (
    FLOATS,
    check_dtype,
    check_float,
    check_layouts,
    check_multiple,
    check_same_device,
    check_shape,
)
from hf_neuron_moe.errors import DTypeError, GradientError, ShapeError, naming, not_one_of, public

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "mxfp8": torch.bfloat16, "fp32": torch.float32}
_FLOAT_SET = frozenset(FLOATS)


def check_no_transform(tensors: tuple[Tensor | None, ...]) -> None:
    """Raise for tensors inside ``torch.func``'s transforms, for which the operators have no rules."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    if any(torch._C._functorch.is_functorch_wrapped_tensor(each) for each in tensors if each is not None):
        expected = "a tensor outside of torch.func's transforms, for which the operators have no rules"
        fix = "Use backward() or torch.autograd.grad, or call unpatch_model(model) first."
        raise GradientError.about("every argument", expected, "one inside of grad, vjp, jvp, vmap or another one", fix)


def check_hidden_states(hidden_states: Any, weight: Tensor, axis: int, name: str) -> None:
    """Raise, in a block's `name`, for hidden states that do not fit its `weight`, whose `axis` has H entries."""
    if (
        isinstance(hidden_states, Tensor)
        and hidden_states.dim()
        and hidden_states.shape[-1] == weight.shape[axis]
        and hidden_states.dtype in _FLOAT_SET
        and weight.dtype in _FLOAT_SET
    ):
        return
    with naming(name):
        if not isinstance(hidden_states, Tensor):
            check_float(hidden_states, "hidden_states")
        hidden, given = weight.shape[axis], list(hidden_states.shape)
        if not given or given[-1] != hidden:
            expected = f"a tensor of shape [..., H] with H={hidden}"
            raise ShapeError.about("hidden_states", expected, str(given), "Its last axis has the features.")
        cast = f"Convert it, for example with .to({weight.dtype})."
        if weight.dtype not in _FLOAT_SET:
            cast = "Cast the model to one of these, for example model.to(torch.bfloat16)."
        for argument, tensor in (("hidden_states", hidden_states), ("the weights", weight)):
            if tensor.dtype not in _FLOAT_SET:
                floats = " or ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
                raise DTypeError.about(argument, f"of dtype {floats}", str(tensor.dtype), cast)


def _check_precision_and_floats(precision: str, tensors: Mapping[str, Tensor | None]) -> None:
    if precision not in COMPUTE_DTYPE:
        raise not_one_of("precision", precision, COMPUTE_DTYPE)
    for name, tensor in tensors.items():
        check_float(tensor, name)


@public("swiglu_mlp")
def check_mlp(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str) -> None:
    """Check the arguments of :func:`~hf_neuron_moe.modules.ops.swiglu_mlp` against each other."""
    if (
        precision in COMPUTE_DTYPE
        and all(isinstance(tensor, Tensor) for tensor in (x_SH, gate_IH, up_IH, down_HI))
        and x_SH.dim() == gate_IH.dim() == 2
        and gate_IH.shape == up_IH.shape == down_HI.shape[::-1]
        and gate_IH.shape[1] == x_SH.shape[1]
        and {x_SH.dtype, gate_IH.dtype, up_IH.dtype, down_HI.dtype} <= _FLOAT_SET
        and x_SH.device == gate_IH.device == up_IH.device == down_HI.device
    ):
        return  # the usual case in a few microseconds; what follows finds out what is wrong
    tensors: dict[str, Tensor | None] = {"x_SH": x_SH, "gate_IH": gate_IH, "up_IH": up_IH, "down_HI": down_HI}
    _check_precision_and_floats(precision, tensors)
    check_layouts(tensors, {"x_SH": "[S, H]", "gate_IH": "[I, H]", "up_IH": "[I, H]", "down_HI": "[H, I]"})
    check_same_device(tensors)


@public("experts")
def check_experts(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    transposed: bool,
    precision: str,
    halves: int = 2,
) -> None:
    """Check the arguments of :func:`~hf_neuron_moe.modules.ops.experts` against each other.

    `halves` is 1 where there is no gate, so that gate_up has I rows per expert.
    """
    if (
        precision in COMPUTE_DTYPE
        and all(isinstance(tensor, Tensor) for tensor in (x_TH, index_TK, weights_TK, gate_up, down))
        and x_TH.dim() == index_TK.dim() == 2
        and gate_up.dim() == 3
        and index_TK.shape == weights_TK.shape
        and index_TK.dtype in (torch.int64, torch.int32)
        and {x_TH.dtype, weights_TK.dtype, gate_up.dtype, down.dtype} <= _FLOAT_SET
        and x_TH.device == index_TK.device == weights_TK.device == gate_up.device == down.device
        and (*index_TK.shape[:1], *gate_up.shape) == _expected_sizes(x_TH, down, transposed, halves)
    ):
        return
    floats = {"x_TH": x_TH, "top_k_weights_TK": weights_TK, "gate_up": gate_up, "down": down}
    _check_precision_and_floats(precision, floats)
    check_dtype(index_TK, (torch.int64, torch.int32), "top_k_index_TK")
    tensors = {**floats, "top_k_index_TK": index_TK}
    layouts = {"x_TH": "[T, H]", "top_k_index_TK": "[T, K]", "top_k_weights_TK": "[T, K]"}
    both = "2I" if halves == 2 else "I"
    sizes = check_layouts(tensors, {**layouts, "gate_up": f"[E, H, {both}]" if transposed else f"[E, {both}, H]"})
    sizes["I"] = sizes[both] // halves
    check_layouts(tensors, {"down": "[E, I, H]" if transposed else "[E, H, I]"}, **sizes)
    check_multiple(sizes[both], halves, "2I of gate_up", "gate and up have the same size")
    check_same_device(tensors)


def _expected_sizes(x_TH: Tensor, down: Tensor, transposed: bool, halves: int) -> tuple[int, ...]:
    """Return T and the shape of gate_up that `x_TH` and `down` ask for; empty if those two do not fit each other."""
    tokens, hidden = x_TH.shape
    if down.dim() != 3 or down.shape[2 if transposed else 1] != hidden:
        return ()
    inner = down.shape[1 if transposed else 2]
    both = halves * inner
    return (tokens, len(down), hidden, both) if transposed else (tokens, len(down), both, hidden)


def check_biases(biases: Mapping[str, tuple[Tensor | None, tuple[int, ...]]], anchor: Tensor) -> None:
    """Check biases, by argument name with the shape that each must have, against the weights' device."""
    for name, (bias, shape) in biases.items():
        if bias is None:
            continue
        check_float(bias, name)
        check_shape(bias, shape, str(list(shape)), name)
        check_same_device({"x": anchor, name: bias})
