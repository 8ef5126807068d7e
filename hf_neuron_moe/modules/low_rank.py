"""LoRA on the linear layers of a dense MLP, computed by the MLP's operator as a change of their weights.

The operator multiplies with ``W + scaling * B A``, which is what merging the adapter makes of W, so that the block with
an adapter and the block with it merged have the same numbers in every precision. (With several active adapters the sum
is rounded once here and once per adapter in merging.) Nothing of a weight's size is kept for the backward: the changed
weights are made again there.

Legend: S tokens, H hidden, I intermediate, O and N outputs and inputs of one linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.errors import public
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_mlp, check_no_transform
from hf_neuron_moe.modules.structure import has_call_hooks

_LORA_LINEAR = ("peft.tuners.lora.layer", "Linear")


@dataclass(frozen=True)
class LowRank:
    """A linear layer's weight and what its active adapters add to it."""

    weight_ON: Tensor
    """The base weight."""
    a_RN: Tensor | None = None
    """Factor applied to the input; None where nothing is added."""
    b_OR: Tensor | None = None
    """Factor applied after it; None where nothing is added."""
    scaling: float = 1.0
    """Factor of their product."""

    @property
    def effective(self) -> Tensor:
        """The weight with what is added to it, ``[O, N]`` in the weight's dtype."""
        return _effective(self.weight_ON, self.a_RN, self.b_OR, self.scaling)


def is_lora_linear(layer: Any) -> bool:
    """Return whether `layer` is peft's LoRA wrapper of a linear layer (peft itself need not be installed)."""
    kind = type(layer)
    return (kind.__module__, kind.__qualname__) == _LORA_LINEAR


def why_not_low_rank(layer: Any) -> str | None:
    """Return why a LoRA `layer` does more than add a product of low rank to its weight, or None.

    The base layer itself and hooks on the LoRA layer are the caller's matter.
    """
    if layer.disable_adapters or layer.merged:
        return None
    for adapter in _active(layer):
        if adapter in layer.lora_variant:
            return f"a LoRA layer of the variant {type(layer.lora_variant[adapter]).__name__}"
        if layer.lora_bias.get(adapter):
            return "a LoRA layer with a bias"
        dropout = layer.lora_dropout[adapter]
        if layer.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1.0) > 0:
            return "a LoRA layer with dropout, which acts on the input of the adapter alone"
        factors = (layer.lora_A[adapter], layer.lora_B[adapter])
        if layer.fan_in_fan_out or any(type(factor) is not nn.Linear or has_call_hooks(factor) for factor in factors):
            return "a LoRA layer whose factors are not plain linear layers"
    return None


def low_rank_of(layer: Any) -> LowRank:
    """Return the weight and the adapters of a plain linear layer or of a LoRA one that :func:`why_not_low_rank` takes.

    Several active adapters are stacked to one of the ranks' sum.
    """
    if not is_lora_linear(layer):
        return LowRank(layer.weight)
    weight_ON = layer.base_layer.weight
    active = [] if layer.disable_adapters or layer.merged else _active(layer)
    if not active:
        return LowRank(weight_ON)
    factors_a = [layer.lora_A[adapter].weight for adapter in active]
    factors_b = [layer.lora_B[adapter].weight for adapter in active]
    scalings = [layer.scaling[adapter] for adapter in active]
    if len(active) == 1:
        return LowRank(weight_ON, factors_a[0], factors_b[0], scalings[0])
    scaled_b = [factor * scaling for factor, scaling in zip(factors_b, scalings)]
    return LowRank(weight_ON, torch.cat(factors_a), torch.cat(scaled_b, dim=1))


@public("swiglu_mlp")
def low_rank_mlp(
    x_SH: Tensor, layers: Sequence[LowRank], *, precision: str, activations: str, training: bool, **where: Any
) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` whose weights have adapters, in `precision`, differentiable.

    `layers` are gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]``; or gate_up ``[2I, H]``, gate rows first, and down.
    Other arguments and the result are those of :func:`hf_neuron_moe.modules.ops.swiglu_mlp`; `where` has `backend` and
    `cache_weights`, `activations` is a canonical keep string.
    """
    check_no_transform((x_SH,))
    learned = [tensor for layer in layers for tensor in (layer.weight_ON, layer.a_RN, layer.b_OR) if tensor is not None]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (x_SH, *learned)):
        with ops.exact_dtypes(x_SH):  # no autocast of the factors' product
            weights = _three([layer.effective for layer in layers])
        return ops.swiglu_mlp(x_SH, *weights, precision=precision, activations=activations, training=training, **where)
    check_mlp(x_SH, *_three([layer.weight_ON for layer in layers]), precision)
    tensors = [tensor for layer in layers for tensor in (layer.weight_ON, layer.a_RN, layer.b_OR)]
    scalings = tuple(layer.scaling for layer in layers)
    compute_SH = x_SH.to(COMPUTE_DTYPE[precision])
    call = BlockCall(BlockSpec(precision), parse_keep(activations), **where).encode()
    y_SH: Tensor = _LowRankMLP.apply(compute_SH, scalings, call, *tensors)
    return y_SH.to(x_SH.dtype)


class _LowRankMLP(torch.autograd.Function):
    """The operator on changed weights, which are made again for its backward."""

    @staticmethod
    def forward(ctx: Any, x_SH: Tensor, scalings: tuple[float, ...], call: str, *tensors: Tensor | None) -> Tensor:
        ctx.scalings, ctx.call = scalings, call
        weights = _three(_all_effective(tensors, scalings, x_SH))
        y_SH, *saved = ops.mlp_fwd(x_SH, *weights, call)
        kept_SH = ops.saved_input(x_SH, BlockCall.decode(call).keep)
        ctx.save_for_backward(kept_SH, *tensors, *saved)
        return y_SH

    @staticmethod
    def backward(ctx: Any, dout_SH: Tensor) -> tuple[Tensor | None, ...]:
        x_SH, *rest = ctx.saved_tensors
        tensors, saved = rest[:-_SAVED], rest[-_SAVED:]
        needs = ctx.needs_input_grad[3:]
        weights = _three(_all_effective(tensors, ctx.scalings, dout_SH))
        wants = (ctx.needs_input_grad[0], any(needs))
        dx, *d_weights = ops.mlp_bwd(dout_SH.contiguous(), x_SH, *weights, *saved, ctx.call, *wants)
        grads: list[Tensor | None] = []
        if len(tensors) == 6 and wants[1]:
            d_weights = [torch.cat(d_weights[:2]), d_weights[2]]
        with ops.exact_dtypes(dout_SH):
            for place, scaling in enumerate(ctx.scalings):
                some = slice(3 * place, 3 * place + 3)
                grads += _layer_grads(d_weights[place], tensors[some], needs[some], scaling)
        return dx if wants[0] else None, None, None, *grads


_SAVED = 4
"""Number of tensors that the operator saves."""


def _layer_grads(
    d_weight_ON: Tensor, tensors: Sequence[Tensor | None], needs: Sequence[bool], scaling: float
) -> list[Tensor | None]:
    """Gradients of a layer's weight and factors, from that of their sum; None where not asked for."""
    _, a_RN, b_OR = tensors
    d_a = d_b = None
    if a_RN is not None and b_OR is not None:
        d_product_ON = d_weight_ON.to(b_OR.dtype) if any(needs[1:]) else d_weight_ON
        d_a = b_OR.T @ d_product_ON * scaling if needs[1] else None
        d_b = d_product_ON @ a_RN.T * scaling if needs[2] else None
    return [d_weight_ON if needs[0] else None, d_a, d_b]


def _all_effective(tensors: Sequence[Tensor | None], scalings: Sequence[float], anchor: Tensor) -> list[Tensor]:
    weights = []
    with ops.exact_dtypes(anchor):
        for place, scaling in enumerate(scalings):
            weight_ON, a_RN, b_OR = tensors[3 * place : 3 * place + 3]
            if weight_ON is not None:
                weights.append(_effective(weight_ON, a_RN, b_OR, scaling))
    return weights


def _effective(weight_ON: Tensor, a_RN: Tensor | None, b_OR: Tensor | None, scaling: float) -> Tensor:
    """The sum as peft's merging forms it: a product in the factors' dtype (on CPUs fp32 for half types), then added."""
    if a_RN is None or b_OR is None:
        return weight_ON
    dtype = b_OR.dtype
    if b_OR.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        product_ON = ((b_OR.float() @ a_RN.float()) * scaling).to(dtype)
    else:
        product_ON = (b_OR @ a_RN) * scaling
    return (weight_ON + product_ON).to(weight_ON.dtype)


def _three(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of three weights, or of a fused one and down."""
    if len(weights) == 3:
        return weights[0], weights[1], weights[2]
    gate_IH, up_IH = weights[0].chunk(2)
    return gate_IH, up_IH, weights[1]


def _active(layer: Any) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
