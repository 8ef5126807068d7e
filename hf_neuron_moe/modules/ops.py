"""The two blocks as ``torch.library`` operators: functional, shape-only fakes, backward as an operator of its own.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.

Saved for backward are the block's input (in the compute dtype), the routing, and what the activation policy keeps
(``keep``; see :class:`hf_neuron_moe.backends.base.Backend`); everything else is recomputed. Weights are saved as
references. No gradient is computed that nobody asked for. There are no second derivatives: the backwards refuse to be
differentiated.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import NOTHING
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.checks import check_multiple
from hf_neuron_moe.errors import GradientError, public
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_experts, check_mlp, check_no_transform

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_KEEPS = {precision: keep_strings(precision) for precision in COMPUTE_DTYPE}


@public
def swiglu_mlp(
    x_SH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    *,
    precision: str,
    backend: str,
    activations: str = "minimal",
    training: bool = False,
) -> Tensor:
    """``(silu(x Wg^T) * x Wu^T) Wd^T`` in `precision`, differentiable.

    Args:
        x_SH: ``[S, H]``, any float dtype; read in bf16 (fp32 for ``"fp32"``).
        gate_IH: ``[I, H]``.
        up_IH: ``[I, H]``.
        down_HI: ``[H, I]``.
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        backend: what :func:`hf_neuron_moe.backends.resolve_backend` returned.
        activations: what is kept for the backward: a preset's name or a canonical keep string, see
            :mod:`hf_neuron_moe.activation_policy`.
        training: compute what a recorded forward computes also where nothing is recorded, to the last bit: the first
            pass of a reentrant checkpoint is one. Otherwise inference may take a shorter way for few rows.

    Returns:
        ``[S, H]`` in the dtype of `x_SH`.

    Raises:
        ConfigError, DTypeError, ShapeError, DeviceError: an argument does not fit the others.
        GradientError: an argument belongs to a transform of ``torch.func``.
    """
    operands = (x_SH, gate_IH, up_IH, down_HI)
    check_no_transform(operands)
    if not training and _plain_inference(operands) and not torch.is_autocast_enabled(x_SH.device.type):
        y = get_backend(backend).mlp_few_rows(x_SH, gate_IH, up_IH, down_HI, precision)
        if y is not None:
            return y
    check_mlp(x_SH, gate_IH, up_IH, down_HI, precision)
    inputs = (x_SH.to(COMPUTE_DTYPE[precision]).contiguous(), gate_IH, up_IH, down_HI)
    if backend == "torch" and _plain_inference(inputs):
        with exact_dtypes(x_SH):
            y_SH, _ = get_backend(backend).mlp_forward(*inputs, precision, _UNRECORDED[training])
    else:
        y_SH = mlp_fwd(*inputs, precision, backend, _policy(inputs, activations, precision, training))[0]
    return y_SH.to(x_SH.dtype)


@public
def experts(
    x_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    transposed: bool,
    precision: str,
    block_size: int,
    backend: str,
    activations: str = "minimal",
    training: bool = False,
) -> Tensor:
    """``sum_k weight_k * expert_k(x)`` with gated SiLU experts in `precision`, differentiable.

    Args:
        x_TH: ``[T, H]``, any float dtype; read in bf16 (fp32 for ``"fp32"``).
        top_k_index_TK: integer expert ids ``[T, K]``; ids >= E are dropped.
        top_k_weights_TK: ``[T, K]``, any float dtype; read in fp32.
        gate_up: ``[E, 2I, H]`` (gate rows first), or ``[E, H, 2I]`` if `transposed`.
        down: ``[E, H, I]``, or ``[E, I, H]`` if `transposed`.
        transposed: which of the two layouts the weights have; never guessed from shapes.
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        block_size: tokens per block of the blockwise kernels; matters for mxfp8 weight gradients only.
        backend: what :func:`hf_neuron_moe.backends.resolve_backend` returned.
        activations: what is kept for the backward: a preset's name or a canonical keep string, see
            :mod:`hf_neuron_moe.activation_policy`.
        training: compute what a recorded forward computes also where nothing is recorded, to the last bit: the first
            pass of a reentrant checkpoint is one. Otherwise inference may take a shorter way for few rows.

    Returns:
        ``[T, H]`` in the dtype of `x_TH`.

    Raises:
        ConfigError, DTypeError, ShapeError, DeviceError: an argument does not fit the others.
        GradientError: an argument belongs to a transform of ``torch.func``.
    """
    check_no_transform((x_TH, top_k_weights_TK, gate_up, down))
    check_experts(x_TH, top_k_index_TK, top_k_weights_TK, gate_up, down, transposed, precision)
    if precision == "mxfp8":
        check_multiple(block_size, 128, "block_size of the plan", "MX groups need whole tiles")
    inputs = (x_TH.to(COMPUTE_DTYPE[precision]).contiguous(), top_k_index_TK, top_k_weights_TK, gate_up, down)
    if backend == "torch" and _plain_inference(inputs):
        with exact_dtypes(x_TH):
            keep = _UNRECORDED[training]
            y_TH, _ = get_backend(backend).experts_forward(*inputs, transposed, precision, block_size, keep)
    else:
        keep = _policy(inputs, activations, precision, training)
        # What is kept of the routing has one form, whatever the router's dtypes.
        routing = (top_k_index_TK.to(torch.int64), top_k_weights_TK.to(torch.float32))
        y_TH = moe_fwd(inputs[0], *routing, gate_up, down, transposed, precision, block_size, backend, keep)[0]
    return y_TH.to(x_TH.dtype)


_UNRECORDED = {False: NOTHING, True: "recompute"}
"""Policy where no backward will come: of those that keep nothing, the one that computes as training does."""


def _policy(inputs: tuple[Tensor, ...], activations: str, precision: str, training: bool) -> str:
    """The canonical keep string where a backward may come, else one that keeps nothing."""
    if activations not in _KEEPS[precision]:
        activations = canonical_keep(activations, precision)
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return activations if recording else _UNRECORDED[training]


def _plain_inference(inputs: tuple[Tensor, ...]) -> bool:
    """Whether the operator's dispatch can be skipped: nothing to record, nothing to trace, ordinary tensors.

    At one token the dispatch through ``torch.library`` is a noticeable share of the whole block.
    """
    if torch.compiler.is_compiling():
        return False
    recording = torch.is_grad_enabled()
    for tensor in inputs:
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or (recording and tensor.requires_grad):
            return False
    return True


def exact_dtypes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keep an enclosing autocast from changing the dtypes of the backend's own matmuls."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Grads = tuple[Tensor, Tensor, Tensor, Tensor]


@operator("hf_neuron_moe::mlp_fwd")
def mlp_fwd(
    x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, backend: str, keep: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the dense MLP; returns y and the four tensors that the policy keeps."""
    with exact_dtypes(x_SH):
        y_SH, saved = get_backend(backend).mlp_forward(x_SH, gate_IH, up_IH, down_HI, precision, keep)
    return y_SH, *saved


@operator("hf_neuron_moe::mlp_bwd")
def mlp_bwd(
    dout_SH: Tensor,
    x_SH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    saved_d: Tensor,
    precision: str,
    backend: str,
    keep: str,
    wants_input: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate, up and down; empty where not wanted."""
    saved = (saved_a, saved_b, saved_c, saved_d)
    with exact_dtypes(dout_SH):
        return get_backend(backend).mlp_backward(
            dout_SH, x_SH, gate_IH, up_IH, down_HI, saved, precision, keep, wants_input, wants_weights
        )


@fake_of(mlp_fwd)
def _(
    x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, backend: str, keep: str
) -> _Outputs:
    saved = get_backend(backend).fake_saved(x_SH, x_SH.shape[0], gate_IH.shape[0], keep)
    return x_SH.new_empty(x_SH.shape), *saved


@fake_of(mlp_bwd)
def _(dout: Tensor, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, *rest: Any) -> _Grads:
    *_, wants_input, wants_weights = rest
    d_gate, d_up, d_down = (_like(w, wants_weights, dout) for w in (gate_IH, up_IH, down_HI))
    return _like(dout, wants_input, dout), d_gate, d_up, d_down


def _mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_SH, *weights, ctx.precision, ctx.backend, ctx.keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the place of gradients that nobody computes
    ctx.save_for_backward(_kept_input(x_SH, ctx.keep), *weights, *output[1:])


def _mlp_backward(ctx: Any, dout_SH: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dout_SH is None:  # what uses the output has no gradient for it
        return (None,) * len(needs)
    wants_weights = any(needs[1:4])
    options = (ctx.precision, ctx.backend, ctx.keep)
    grads = mlp_bwd(dout_SH.contiguous(), *ctx.saved_tensors, *options, needs[0], wants_weights)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None, None, None


mlp_fwd.register_autograd(_mlp_backward, setup_context=_mlp_setup)


@public("backward of a patched block")
def refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    """Stand in for the autograd formula that the backwards do not have."""
    raise GradientError.about(
        "the backward itself",
        "differentiated at most once: the kernels have no second derivative",
        "a request for gradients of its gradients (create_graph=True and then another backward)",
        "Unpatch the model for a gradient penalty, a Hessian and the like, or pass exclude=[...].",
    )


mlp_bwd.register_autograd(refuse_second_derivative)


@operator("hf_neuron_moe::moe_fwd")
def moe_fwd(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    transposed: bool,
    precision: str,
    block_size: int,
    backend: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the experts; returns y and the four tensors that the policy keeps."""
    operands = (x_TH, index_TK, weight_TK, gate_up, down)
    with exact_dtypes(x_TH):
        y_TH, saved = get_backend(backend).experts_forward(*operands, transposed, precision, block_size, keep)
    return y_TH, *saved


@operator("hf_neuron_moe::moe_bwd")
def moe_bwd(
    dout_TH: Tensor,
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    saved_d: Tensor,
    transposed: bool,
    precision: str,
    block_size: int,
    backend: str,
    keep: str,
    wants_input: bool,
    wants_routing: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the routing weights, gate_up and down; empty where not wanted."""
    operands = (dout_TH, x_TH, index_TK, weight_TK, gate_up, down, (saved_a, saved_b, saved_c, saved_d))
    wants = (wants_input, wants_routing, wants_weights)
    with exact_dtypes(dout_TH):
        return get_backend(backend).experts_backward(*operands, transposed, precision, block_size, keep, *wants)


@fake_of(moe_fwd)
def _(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    transposed: bool,
    precision: str,
    block_size: int,
    backend: str,
    keep: str,
) -> _Outputs:
    operands = (x_TH, index_TK, gate_up, down)
    saved = get_backend(backend).fake_experts_saved(*operands, transposed, precision, block_size, keep)
    return x_TH.new_empty(x_TH.shape), *saved


@fake_of(moe_bwd)
def _(
    dout: Tensor, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, *rest: Any
) -> _Grads:
    *_, wants_input, wants_routing, wants_weights = rest
    return (
        _like(dout, wants_input, dout),
        _like(weight_TK, wants_routing, dout),
        _like(gate_up, wants_weights, dout),
        _like(down, wants_weights, dout),
    )


def _moe_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TH, *tensors, transposed, precision, block_size, backend, ctx.keep = inputs
    ctx.options = (transposed, precision, block_size, backend)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the place of gradients that nobody computes
    ctx.save_for_backward(_kept_input(x_TH, ctx.keep), *tensors, *output[1:])


def _moe_backward(ctx: Any, dout_TH: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dout_TH is None:
        return (None,) * len(needs)
    wants = (needs[0], needs[2], needs[3] or needs[4])
    d_x, d_weight, d_gate_up, d_down = moe_bwd(dout_TH.contiguous(), *ctx.saved_tensors, *ctx.options, ctx.keep, *wants)
    grads = (d_x, None, d_weight, d_gate_up, d_down)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), *(None,) * 5


moe_fwd.register_autograd(_moe_backward, setup_context=_moe_setup)
moe_bwd.register_autograd(refuse_second_derivative)


def _kept_input(x: Tensor, keep: str) -> Tensor:
    """The block's input as autograd saves it: not at all where the policy keeps it in another form."""
    return x if parse_keep(keep).keeps_input else x.new_empty(0)


def _like(tensor: Tensor, wanted: bool, anchor: Tensor) -> Tensor:
    """Fake of a gradient: contiguous, of `tensor`'s shape and dtype; or empty, in the dtype the backend gives."""
    return tensor.new_empty(tensor.shape) if wanted else anchor.new_empty(0)
