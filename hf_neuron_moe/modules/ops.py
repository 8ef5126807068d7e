"""The two blocks as ``torch.library`` operators: functional, shape-only fakes, backward as an operator of its own.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.

Saved for backward are the block's input (in the compute dtype), the routing, what the activation policy keeps (see
:class:`hf_neuron_moe.backends.base.Backend`), and references to the weights. Operators take a
:class:`~hf_neuron_moe.backends.spec.BlockCall` as one string, `call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep, canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.backends import get_backend, is_traceable
from hf_neuron_moe.backends.base import NOTHING, Backend, BackwardCall
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.operator_registration import fake_of, operator
from hf_neuron_moe.backends.spec import BlockCall, BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants
from hf_neuron_moe.checks import PLAIN_TENSORS, check_multiple
from hf_neuron_moe.errors import GradientError, public
from hf_neuron_moe.modules.op_watch import watched
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_biases, check_experts, check_mlp, check_no_transform

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
    gate: Gate = SWIGLU,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """Return ``h Wd^T + bd``, h what `gate` makes of ``x Wg^T + bg`` and ``x Wu^T + bu``; differentiable.

    `x_SH` is ``[S, H]`` in any float dtype, read in bf16 (fp32 for `precision` ``"fp32"``; others are ``"bf16"`` and
    ``"mxfp8"``). `gate_IH` and `up_IH` are ``[I, H]``, `down_HI` is ``[H, I]``. `biases` are ``[I]`` for gate and up,
    ``[H]`` for down. The result is ``[S, H]`` in the dtype of `x_SH`. `backend` is what
    :func:`hf_neuron_moe.backends.resolve_backend` returned. `activations` says what is saved for the backward, as a
    preset's name or a canonical keep string (:mod:`hf_neuron_moe.activation_policy`). `cache_weights` lets the backend
    keep copies of the weights for the next call.

    With `training` the result is that of a recorded forward to the last bit also where nothing is recorded, as in the
    first pass of a reentrant checkpoint. Otherwise inference may take a shorter way for few rows.
    """
    operands = (x_SH, gate_IH, up_IH, down_HI)
    check_no_transform((*operands, *biases))
    plain = gate.reads_up_as_it_is and biases == (None, None, None)
    if plain and not training and _plain_inference(operands) and not torch.is_autocast_enabled(x_SH.device.type):
        y = get_backend(backend).mlp_decode(x_SH, gate_IH, up_IH, down_HI, precision, gate)
        if y is not None:
            return y
    check_mlp(x_SH, gate_IH, up_IH, down_HI, precision)
    I, H = gate_IH.shape  # noqa: E741
    check_biases({"gate_bias": (biases[0], (I,)), "up_bias": (biases[1], (I,)), "down_bias": (biases[2], (H,))}, x_SH)
    inputs = (x_SH.to(COMPUTE_DTYPE[precision]).contiguous(), gate_IH, up_IH, down_HI, *biases)
    spec, kernels = BlockSpec(precision, gate=gate), _without_dispatch(inputs, backend)
    if kernels is not None:
        with exact_dtypes(x_SH):
            y_SH, _ = kernels.mlp_forward(inputs[0], FFNWeights(*inputs[1:]), spec, _UNRECORDED[training])
    else:
        keep = recorded_policy(inputs, activations, precision, training)
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
    gate: Gate = SWIGLU,
    interleaved: bool = False,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return ``sum_k weight_k * expert_k(x)``, ``[T, H]`` in the dtype of `x_TH`; differentiable.

    `x_TH` is ``[T, H]``; `top_k_index_TK` integer expert ids ``[T, K]``, of which those >= E are dropped;
    `top_k_weights_TK` ``[T, K]`` in any float dtype, read in fp32. `gate_up` is ``[E, 2I, H]`` (gate rows first) and
    `down` ``[E, H, I]``; if `transposed`, which is never guessed from shapes, ``[E, H, 2I]`` and ``[E, I, H]``. If
    `interleaved`, rows (or columns) of gate_up alternate, the gate's first. Without a gate there is I for 2I. `biases`
    are those of gate_up, ``[E, 2I]`` in its order, and of down, ``[E, H]``.
    `block_size`, tokens per block of the blockwise kernels, matters for mxfp8 weight gradients only. The other
    arguments are those of :func:`swiglu_mlp`.
    """
    check_no_transform((x_TH, top_k_weights_TK, gate_up, down, *biases))
    check_experts(x_TH, top_k_index_TK, top_k_weights_TK, gate_up, down, transposed, precision, gate.halves)
    E, columns = len(gate_up), gate_up.shape[2 if transposed else 1]
    check_biases({"gate_up_bias": (biases[0], (E, columns)), "down_bias": (biases[1], (E, x_TH.shape[1]))}, x_TH)
    if precision == "mxfp8":
        check_multiple(block_size, 128, "block_size of the plan", "MX groups need whole tiles")
    inputs = (x_TH.to(COMPUTE_DTYPE[precision]).contiguous(), top_k_index_TK, top_k_weights_TK, gate_up, down, *biases)
    spec = BlockSpec(precision, block_size, transposed, gate, interleaved)
    kernels = _without_dispatch(inputs, backend)
    if kernels is not None:
        with exact_dtypes(x_TH):
            routing = Routing(top_k_index_TK, top_k_weights_TK)
            weights = ExpertWeights(gate_up, down, *biases)
            y_TH, _ = kernels.experts_forward(inputs[0], routing, weights, spec, _UNRECORDED[training])
    else:
        keep = recorded_policy(inputs, activations, precision, training)
        # What is saved of the routing has one form, whatever the router's dtypes.
        routing = Routing(top_k_index_TK.to(torch.int64), top_k_weights_TK.to(torch.float32))
        call = BlockCall(spec, keep, backend, cache_weights).encode()
        y_TH = moe_fwd(inputs[0], *routing, gate_up, down, *biases, call)[0]
    return y_TH.to(x_TH.dtype)


_UNRECORDED = {False: NOTHING, True: parse_keep("recompute")}
"""Policy where no backward will come: of those that keep nothing, the one that computes as training does."""


def recorded_policy(
    inputs: tuple[Tensor | None, ...], activations: str, precision: str, training: bool = False
) -> Keep:
    """Return the policy where a backward may come, else one that keeps nothing."""
    keep = _KEEPS[precision].get(activations) or parse_keep(canonical_keep(activations, precision))
    recording = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return keep if recording else _UNRECORDED[training]


def _without_dispatch(inputs: tuple[Tensor | None, ...], backend: str) -> Backend | None:
    """The backend where it can be called without the operator around, whose dispatch is a share of one token's time."""
    if not _plain_inference([tensor for tensor in inputs if tensor is not None]):
        return None
    kernels = get_backend(backend)
    return None if kernels.traceable else kernels


def _plain_inference(inputs: Iterable[Tensor]) -> bool:
    """Whether there is nothing to record, nothing to trace, and the tensors are ordinary ones."""
    if torch.compiler.is_compiling():
        return False
    recording = torch.is_grad_enabled()
    for tensor in inputs:
        if type(tensor) not in PLAIN_TENSORS or tensor.is_meta or (recording and tensor.requires_grad):
            return False
    return True


def exact_dtypes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keep an enclosing autocast from changing the dtypes of the backend's own matmuls."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def called(text: str) -> tuple[BlockCall, Backend]:
    """Return what an operator's string argument says, and the backend that computes it."""
    call = BlockCall.decode(text)
    kernels = get_backend(call.backend)
    return call, kernels if call.cache_weights else kernels.without_copies


def traced_into(text: str) -> bool:
    """Return whether programs may trace into the body of an operator with this string argument."""
    return is_traceable(BlockCall.decode(text).backend)


@operator("hf_neuron_moe::mlp_fwd", traced_into)
def mlp_fwd(
    x_SH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    gate_bias_I: Tensor | None,
    up_bias_I: Tensor | None,
    down_bias_H: Tensor | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the dense MLP; returns y and the four tensors that the policy keeps."""
    (spec, keep, *_), kernels = called(call)
    weights = FFNWeights(gate_IH, up_IH, down_HI, gate_bias_I, up_bias_I, down_bias_H)
    with exact_dtypes(x_SH):
        y_SH, saved = kernels.mlp_forward(x_SH, weights, spec, keep)
        watched(BlockCall.decode(call), x_SH, None, weights, saved, (y_SH,))
    return y_SH, *saved


@operator("hf_neuron_moe::mlp_bwd", traced_into)
def mlp_bwd(
    dout_SH: Tensor,
    x_SH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    gate_bias_I: Tensor | None,
    up_bias_I: Tensor | None,
    down_bias_H: Tensor | None,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    saved_d: Tensor,
    call: str,
    wants_input: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate, up, down and their biases; empty where not wanted."""
    (spec, keep, *_), kernels = called(call)
    weights = FFNWeights(gate_IH, up_IH, down_HI, gate_bias_I, up_bias_I, down_bias_H)
    saved = (saved_a, saved_b, saved_c, saved_d)
    with exact_dtypes(dout_SH):
        wanted = BackwardCall(spec, keep, Wants(wants_input, False, wants_weights))
        grads = kernels.mlp_backward(dout_SH, x_SH, weights, saved, wanted)
        watched(BlockCall.decode(call), x_SH, None, weights, saved, grads, dout_SH)
    return grads


@fake_of(mlp_fwd)
def _(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (spec, keep, *_), kernels = called(rest[-1])
    saved = kernels.fake_saved(x_SH, BlockShape("mlp", *down_HI.shape), spec, keep)
    return x_SH.new_empty(x_SH.shape), *saved


@operator("hf_neuron_moe::moe_fwd", traced_into)
def moe_fwd(
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward of the experts; returns y and the four tensors that the policy keeps."""
    (spec, keep, *_), kernels = called(call)
    routing, weights = Routing(index_TK, weight_TK), ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    with exact_dtypes(x_TH):
        y_TH, saved = kernels.experts_forward(x_TH, routing, weights, spec, keep)
        watched(BlockCall.decode(call), x_TH, routing, weights, saved, (y_TH,))
    return y_TH, *saved


@operator("hf_neuron_moe::moe_bwd", traced_into)
def moe_bwd(
    dout_TH: Tensor,
    x_TH: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved_a: Tensor,
    saved_b: Tensor,
    saved_c: Tensor,
    saved_d: Tensor,
    call: str,
    wants_input: bool,
    wants_routing: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, the routing weights, gate_up, down and their biases; empty where not wanted."""
    (spec, keep, *_), kernels = called(call)
    routing, saved = Routing(index_TK, weight_TK), (saved_a, saved_b, saved_c, saved_d)
    with exact_dtypes(dout_TH):
        wanted = BackwardCall(spec, keep, Wants(wants_input, wants_routing, wants_weights))
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        grads = kernels.experts_backward(dout_TH, x_TH, routing, weights, saved, wanted)
        watched(BlockCall.decode(call), x_TH, routing, weights, saved, grads, dout_TH)
    return grads


@fake_of(moe_fwd)
def _(
    x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    (spec, keep, *_), kernels = called(rest[-1])
    hidden, inner = down.shape[:0:-1] if spec.transposed else down.shape[1:]
    shape = BlockShape("experts", hidden, inner, len(down), index_TK.shape[1])
    return x_TH.new_empty(x_TH.shape), *kernels.fake_saved(x_TH, shape, spec, keep)


@public("backward of a patched block")
def _refuse_second_derivative(ctx: Any, *grads: object) -> Any:
    expected = "differentiated at most once: the kernels have no second derivative"
    got = "a request for gradients of its gradients (create_graph=True and then another backward)"
    fix = "Unpatch the model for a gradient penalty, a Hessian and the like, or pass exclude=[...]."
    raise GradientError.about("the backward itself", expected, got, fix)


def set_derivative(
    forward: Any, backward: Any, wanted: tuple[tuple[int, ...], ...], keeps_input: Callable[[Keep], bool]
) -> None:
    """Make the operator `backward` the derivative of `forward`, and refuse to differentiate it once more.

    `forward` takes the block's input first and the call last, and returns the result and what it saves. `backward`
    takes the result's gradient, the inputs of `forward` but the call, what it saved, the call, and a flag for each
    entry of `wanted`. Entries are places of inputs, whose gradients it returns in this order, empty where not asked
    for. `keeps_input` says whether a policy keeps the input for the backward as it came.
    """
    places = [(place, flag) for flag, group in enumerate(wanted) for place in group]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *tensors, ctx.call = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros in the place of gradients that nobody computes
        saved_x = x if keeps_input(BlockCall.decode(ctx.call).keep) else x.new_empty(0)
        ctx.save_for_backward(saved_x, *tensors, *output[1:])

    def differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(needs)
        if dout is not None:  # else what uses the output has no gradient for it
            flags = [any(needs[place] for place in group) for group in wanted]
            found = backward(dout.contiguous(), *ctx.saved_tensors, ctx.call, *flags)
            for (place, _flag), grad in zip(places, found, strict=True):
                grads[place] = grad if needs[place] else None
        return tuple(grads)

    @fake_of(backward)
    def _(dout: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        inputs, flags = (dout, *rest), rest[-len(wanted) :]  # x, which may be saved empty, has a gradient like dout
        asked = ((inputs[place], flags[flag]) for place, flag in places)
        return tuple(
            each.new_empty(each.shape) if wants and each is not None else dout.new_empty(0) for each, wants in asked
        )

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(_refuse_second_derivative)


set_derivative(mlp_fwd, mlp_bwd, ((0,), (1, 2, 3, 4, 5, 6)), lambda keep: keep.keeps_input)
set_derivative(moe_fwd, moe_bwd, ((0,), (2,), (3, 4, 5, 6)), lambda keep: keep.keeps_input)
