"""The two blocks as ``torch.library`` operators: functional, shape-only fakes, backward as an operator of its own.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.

Saved for backward are the block's input (in the compute dtype), the routing, and what the activation policy keeps (see
:class:`hf_neuron_moe.backends.base.Backend`); everything else is recomputed. Weights are saved as references. No
gradient is computed that nobody asked for. There are no second derivatives: the backwards refuse to be differentiated.

Operators take a :class:`~hf_neuron_moe.backends.spec.BlockCall` as one string, `call`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep, canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.backends import get_backend, is_traceable
from hf_neuron_moe.backends.base import NOTHING, Backend
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.backends.spec import BlockCall, BlockShape, BlockSpec, FFNWeights, Routing, Wants
from hf_neuron_moe.checks import check_multiple
from hf_neuron_moe.errors import GradientError, public
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_experts, check_mlp, check_no_transform

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_KEEPS = {precision: {keep: parse_keep(keep) for keep in keep_strings(precision)} for precision in COMPUTE_DTYPE}


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
    cache_weights: bool = True,
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
        cache_weights: whether the backend may keep copies of the weights for the next call.

    Returns:
        ``[S, H]`` in the dtype of `x_SH`.
    """
    operands = (x_SH, gate_IH, up_IH, down_HI)
    check_no_transform(operands)
    if not training and _plain_inference(operands) and not torch.is_autocast_enabled(x_SH.device.type):
        y = get_backend(backend).mlp_decode(x_SH, gate_IH, up_IH, down_HI, precision)
        if y is not None:
            return y
    check_mlp(x_SH, gate_IH, up_IH, down_HI, precision)
    inputs = (x_SH.to(COMPUTE_DTYPE[precision]).contiguous(), gate_IH, up_IH, down_HI)
    spec, kernels = BlockSpec(precision), _without_dispatch(inputs, backend)
    if kernels is not None:
        with exact_dtypes(x_SH):
            y_SH, _ = kernels.mlp_forward(inputs[0], FFNWeights(*inputs[1:]), spec, _UNRECORDED[training])
    else:
        keep = _policy(inputs, activations, precision, training)
        y_SH = mlp_fwd(*inputs, BlockCall(spec, keep, backend, cache_weights).encode())[0]
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
    cache_weights: bool = True,
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
        backend: as in :func:`swiglu_mlp`.
        activations: as in :func:`swiglu_mlp`.
        training: as in :func:`swiglu_mlp`.
        cache_weights: as in :func:`swiglu_mlp`.

    Returns:
        ``[T, H]`` in the dtype of `x_TH`.
    """
    check_no_transform((x_TH, top_k_weights_TK, gate_up, down))
    check_experts(x_TH, top_k_index_TK, top_k_weights_TK, gate_up, down, transposed, precision)
    if precision == "mxfp8":
        check_multiple(block_size, 128, "block_size of the plan", "MX groups need whole tiles")
    inputs = (x_TH.to(COMPUTE_DTYPE[precision]).contiguous(), top_k_index_TK, top_k_weights_TK, gate_up, down)
    spec, kernels = BlockSpec(precision, block_size, transposed), _without_dispatch(inputs, backend)
    if kernels is not None:
        with exact_dtypes(x_TH):
            routing = Routing(top_k_index_TK, top_k_weights_TK)
            y_TH, _ = kernels.experts_forward(inputs[0], routing, (gate_up, down), spec, _UNRECORDED[training])
    else:
        keep = _policy(inputs, activations, precision, training)
        # What is saved of the routing has one form, whatever the router's dtypes.
        routing = Routing(top_k_index_TK.to(torch.int64), top_k_weights_TK.to(torch.float32))
        y_TH = moe_fwd(inputs[0], *routing, gate_up, down, BlockCall(spec, keep, backend, cache_weights).encode())[0]
    return y_TH.to(x_TH.dtype)


_UNRECORDED = {False: NOTHING, True: parse_keep("recompute")}
"""Policy where no backward will come: of those that keep nothing, the one that computes as training does."""


def _policy(inputs: tuple[Tensor, ...], activations: str, precision: str, training: bool) -> Keep:
    """The policy where a backward may come, else one that keeps nothing."""
    if activations not in _KEEPS[precision]:
        activations = canonical_keep(activations, precision)
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return _KEEPS[precision][activations] if recording else _UNRECORDED[training]


def _without_dispatch(inputs: tuple[Tensor, ...], backend: str) -> Backend | None:
    """The backend where it can be called without the operator around, whose dispatch is a share of one token's time."""
    if not _plain_inference(inputs):
        return None
    kernels = get_backend(backend)
    return None if kernels.traceable else kernels


def _plain_inference(inputs: tuple[Tensor, ...]) -> bool:
    """Whether there is nothing to record, nothing to trace, and the tensors are ordinary ones."""
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


def called(text: str) -> tuple[BlockCall, Backend]:
    """Return what an operator's string argument says, and the backend that computes it."""
    call = BlockCall.decode(text)
    kernels = get_backend(call.backend)
    return call, kernels if call.cache_weights else kernels.without_copies


def traced_into(text: str) -> bool:
    """Return whether programs may trace into the body of an operator with this string argument."""
    return is_traceable(BlockCall.decode(text).backend)


_Grads = tuple[Tensor, Tensor, Tensor, Tensor]


@operator("hf_neuron_moe::mlp_fwd", traced_into)
def mlp_fwd(
    x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the dense MLP; returns y and the four tensors that the policy keeps."""
    (spec, keep, *_), kernels = called(call)
    with exact_dtypes(x_SH):
        y_SH, saved = kernels.mlp_forward(x_SH, FFNWeights(gate_IH, up_IH, down_HI), spec, keep)
    return y_SH, *saved


@operator("hf_neuron_moe::mlp_bwd", traced_into)
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
    call: str,
    wants_input: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate, up and down; empty where not wanted."""
    (spec, keep, *_), kernels = called(call)
    weights, saved = FFNWeights(gate_IH, up_IH, down_HI), (saved_a, saved_b, saved_c, saved_d)
    with exact_dtypes(dout_SH):
        wants = Wants(wants_input, False, wants_weights)
        return kernels.mlp_backward(dout_SH, x_SH, weights, saved, spec, keep, wants)


@fake_of(mlp_fwd)
def _(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, call: str) -> tuple[Tensor, ...]:
    (spec, keep, *_), kernels = called(call)
    saved = kernels.fake_saved(x_SH, BlockShape("mlp", *down_HI.shape), spec, keep)
    return x_SH.new_empty(x_SH.shape), *saved


@fake_of(mlp_bwd)
def _(dout: Tensor, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, *rest: Any) -> _Grads:
    *_, wants_input, wants_weights = rest
    d_gate, d_up, d_down = (_like(w, wants_weights, dout) for w in (gate_IH, up_IH, down_HI))
    return _like(dout, wants_input, dout), d_gate, d_up, d_down


@operator("hf_neuron_moe::moe_fwd", traced_into)
def moe_fwd(
    x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the experts; returns y and the four tensors that the policy keeps."""
    (spec, keep, *_), kernels = called(call)
    with exact_dtypes(x_TH):
        y_TH, saved = kernels.experts_forward(x_TH, Routing(index_TK, weight_TK), (gate_up, down), spec, keep)
    return y_TH, *saved


@operator("hf_neuron_moe::moe_bwd", traced_into)
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
    call: str,
    wants_input: bool,
    wants_routing: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the routing weights, gate_up and down; empty where not wanted."""
    (spec, keep, *_), kernels = called(call)
    routing, saved = Routing(index_TK, weight_TK), (saved_a, saved_b, saved_c, saved_d)
    with exact_dtypes(dout_TH):
        wants = Wants(wants_input, wants_routing, wants_weights)
        return kernels.experts_backward(dout_TH, x_TH, routing, (gate_up, down), saved, spec, keep, wants)


@fake_of(moe_fwd)
def _(
    x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, call: str
) -> tuple[Tensor, ...]:
    (spec, keep, *_), kernels = called(call)
    hidden, inner = down.shape[:0:-1] if spec.transposed else down.shape[1:]
    shape = BlockShape("experts", hidden, inner, len(down), index_TK.shape[1])
    return x_TH.new_empty(x_TH.shape), *kernels.fake_saved(x_TH, shape, spec, keep)


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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *tensors, ctx.call = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the place of gradients that nobody computes
    ctx.save_for_backward(saved_input(x, BlockCall.decode(ctx.call).keep), *tensors, *output[1:])


def _mlp_backward(ctx: Any, dout_SH: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dout_SH is None:  # what uses the output has no gradient for it
        return (None,) * len(needs)
    grads = mlp_bwd(dout_SH.contiguous(), *ctx.saved_tensors, ctx.call, needs[0], any(needs[1:4]))
    return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None


def _moe_backward(ctx: Any, dout_TH: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if dout_TH is None:
        return (None,) * len(needs)
    wants = (needs[0], needs[2], needs[3] or needs[4])
    d_x, d_weight, d_gate_up, d_down = moe_bwd(dout_TH.contiguous(), *ctx.saved_tensors, ctx.call, *wants)
    grads = (d_x, None, d_weight, d_gate_up, d_down)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None


@public("backward of a patched block")
def refuse_second_derivative(ctx: Any, *grads: Any) -> Any:
    """Stand in for the autograd formula that the backwards do not have."""
    raise GradientError.about(
        "the backward itself",
        "differentiated at most once: the kernels have no second derivative",
        "a request for gradients of its gradients (create_graph=True and then another backward)",
        "Unpatch the model for a gradient penalty, a Hessian and the like, or pass exclude=[...].",
    )


mlp_fwd.register_autograd(_mlp_backward, setup_context=_setup)
mlp_bwd.register_autograd(refuse_second_derivative)
moe_fwd.register_autograd(_moe_backward, setup_context=_setup)
moe_bwd.register_autograd(refuse_second_derivative)


def saved_input(x: Tensor, keep: Keep) -> Tensor:
    """Return the block's input as autograd saves it: not at all where the policy keeps it in another form."""
    return x if keep.keeps_input else x.new_empty(0)


def _like(tensor: Tensor, wanted: bool, anchor: Tensor) -> Tensor:
    """Fake of a gradient: contiguous, of `tensor`'s shape and dtype; or empty, in the dtype the backend gives."""
    return tensor.new_empty(tensor.shape) if wanted else anchor.new_empty(0)
