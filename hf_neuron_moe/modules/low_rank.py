"""LoRA on the linear layers of a dense MLP, computed by the MLP's operator as a change of their weights.

The operator multiplies with ``W + scaling * B A``, as merging makes it: the results are those of the merged block in
every precision. (Of several active adapters the sum is rounded once here, in merging once per adapter.) The changed
weights are not kept for the backward but made again there.

Legend: S tokens, H hidden, I intermediate, O and N outputs and inputs of one linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.errors import public
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.engine import local
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_mlp, check_no_transform
from hf_neuron_moe.modules.structure import has_call_hooks


class LowRank(NamedTuple):
    """A linear layer's weight and what its active adapters add to it."""

    weight_ON: Tensor  # the base weight
    a_RN: Tensor | None = None  # factor applied to the input; None where nothing is added
    b_OR: Tensor | None = None  # factor applied after it
    scaling: float = 1.0  # factor of their product

    @property
    def effective(self) -> Tensor:
        """The weight with what is added to it, ``[O, N]`` in the weight's dtype.

        As in peft's merging the product is formed in the factors' dtype (on CPUs in fp32 for half types), then added.
        """
        if self.a_RN is None or self.b_OR is None:
            return self.weight_ON
        return (self.weight_ON + self.product).to(self.weight_ON.dtype)

    @property
    def product(self) -> Tensor:
        """What is added to the weight."""
        _, a_RN, b_OR, scaling = self
        assert a_RN is not None and b_OR is not None
        dtype = b_OR.dtype
        if b_OR.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            return ((b_OR.float() @ a_RN.float()) * scaling).to(dtype)
        return (b_OR @ a_RN) * scaling


def is_lora_linear(layer: Any) -> bool:
    """Return whether `layer` is peft's LoRA wrapper of a linear layer (peft itself need not be installed)."""
    kind = type(layer)
    return (kind.__module__, kind.__qualname__) == ("peft.tuners.lora.layer", "Linear")


def base_of(layer: Any) -> Any:
    """Return the linear layer inside a LoRA wrapper, or `layer` itself."""
    return layer.base_layer if is_lora_linear(layer) else layer


def _active(layer: Any) -> list[str]:
    """Names of the adapters that add something now."""
    if layer.disable_adapters or layer.merged:
        return []
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def unsupported_reason_low_rank(layer: Any) -> str | None:
    """Return why a LoRA `layer` does more than add a low-rank product to its base layer's weight, or None."""
    if has_call_hooks(layer):
        return "a LoRA layer with hooks"
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


def low_rank_of(layer: Any, part: Callable[[Tensor], Tensor] = lambda whole: whole) -> LowRank:
    """Return a layer's weight and adapters; it is plain or one that :func:`unsupported_reason_low_rank` takes.

    `part` is applied to each parameter of adapters.
    """
    if not is_lora_linear(layer):
        return LowRank(local(layer.weight))
    weight_ON, active = local(layer.base_layer.weight), _active(layer)
    factors = [(part(layer.lora_A[name].weight), part(layer.lora_B[name].weight)) for name in active]
    if len(active) < 2:
        return LowRank(weight_ON, *factors[0], layer.scaling[active[0]]) if active else LowRank(weight_ON)
    # Several are stacked to one adapter of the ranks' sum.
    scaled_b = [b_OR * layer.scaling[name] for name, (_, b_OR) in zip(active, factors, strict=True)]
    return LowRank(weight_ON, torch.cat([a_RN for a_RN, _ in factors]), torch.cat(scaled_b, dim=1))


@public("swiglu_mlp")
def low_rank_mlp(
    x_SH: Tensor,
    layers: Sequence[LowRank],
    *,
    precision: str,
    gate: Gate,
    activations: str,
    training: bool,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    **where: Any,
) -> Tensor:
    """Return an MLP with this `gate` and `biases` whose weights have adapters, in `precision`, differentiable.

    `layers` are gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]``; or gate_up ``[2I, H]``, gate rows first, and down.
    Other arguments and the result are those of :func:`hf_neuron_moe.modules.ops.swiglu_mlp`; `where` has `backend` and
    `cache_weights`, `activations` is a canonical keep string.
    """
    check_no_transform((x_SH,))
    tensors = [tensor for layer in layers for tensor in layer[:3]]
    learned = [tensor for tensor in (x_SH, *biases, *tensors) if tensor is not None]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in learned):
        options: dict[str, Any] = {"precision": precision, "gate": gate, "activations": activations, **where}
        options["biases"] = biases
        return ops.swiglu_mlp(x_SH, *_effective_weights(layers, x_SH), training=training, **options)
    check_mlp(x_SH, *three_weights([layer.weight_ON for layer in layers]), precision)
    compute_SH = x_SH.to(COMPUTE_DTYPE[precision])
    call = BlockCall(BlockSpec(precision, gate=gate), parse_keep(activations), **where).encode()
    y_SH: Tensor = _LowRankMLP.apply(compute_SH, tuple(layer.scaling for layer in layers), call, *biases, *tensors)
    return y_SH.to(x_SH.dtype)


class _LowRankMLP(torch.autograd.Function):
    """The operator on changed weights; in `tensors`, weight, a and b of each layer follow the three biases."""

    @staticmethod
    def forward(ctx: Any, x_SH: Tensor, scalings: tuple[float, ...], call: str, *tensors: Tensor | None) -> Tensor:
        ctx.scalings, ctx.call = scalings, call
        weights = _effective_weights(_layers(tensors[3:], scalings), x_SH)
        y_SH, *saved = ops.mlp_fwd(x_SH, *weights, *tensors[:3], call)
        saved_SH = x_SH if BlockCall.decode(call).keep.keeps_input else x_SH.new_empty(0)
        ctx.save_for_backward(saved_SH, *tensors, *saved)
        return y_SH

    @staticmethod
    def backward(ctx: Any, dout_SH: Tensor) -> tuple[Tensor | None, ...]:
        x_SH, gate_bias, up_bias, down_bias, *rest = ctx.saved_tensors
        biases, count = (gate_bias, up_bias, down_bias), 3 * len(ctx.scalings)
        layers, saved, needs = _layers(rest[:count], ctx.scalings), rest[count:], ctx.needs_input_grad[6:]
        needs_bias = ctx.needs_input_grad[3:6]
        wants = (ctx.needs_input_grad[0], any(needs) or any(needs_bias))
        weights = _effective_weights(layers, dout_SH)
        found = ops.mlp_bwd(dout_SH.contiguous(), x_SH, *weights, *biases, *saved, ctx.call, *wants)
        dx, *d_weights = found[:4]
        d_biases = [grad if needed else None for grad, needed in zip(found[4:], needs_bias, strict=True)]
        if len(layers) == 2 and wants[1]:
            d_weights = [torch.cat(d_weights[:2]), d_weights[2]]
        with ops.exact_dtypes(dout_SH):
            per_layer = zip(d_weights, layers, (needs[:3], needs[3:6], needs[6:]))
            grads = [grad for arguments in per_layer for grad in _layer_grads(*arguments)]
        return dx if wants[0] else None, None, None, *d_biases, *grads


def _layers(tensors: Sequence[Any], scalings: Sequence[float]) -> list[LowRank]:
    return [LowRank(*parts) for parts in zip(tensors[::3], tensors[1::3], tensors[2::3], scalings)]


def _layer_grads(d_weight_ON: Tensor, layer: LowRank, needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of a layer's weight and factors, from that of their sum; None where not asked for."""
    _, a_RN, b_OR, scaling = layer
    d_a = d_b = None
    if a_RN is not None and b_OR is not None:
        d_product_ON = d_weight_ON.to(b_OR.dtype) if any(needs[1:]) else d_weight_ON
        d_a = b_OR.T @ d_product_ON * scaling if needs[1] else None
        d_b = d_product_ON @ a_RN.T * scaling if needs[2] else None
    return [d_weight_ON if needs[0] else None, d_a, d_b]


def _effective_weights(layers: Sequence[LowRank], anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with ops.exact_dtypes(anchor):  # no autocast of the factors' product
        return three_weights([layer.effective for layer in layers])


def three_weights(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up and down of three weights, or of a fused one ``[2I, H]`` and down."""
    if len(weights) == 3:
        return weights[0], weights[1], weights[2]
    gate_up = weights[0]
    # unbind of a view: its backward writes both gradients into one tensor, where two slices would add two full ones.
    gate_IH, up_IH = gate_up.view(2, gate_up.shape[0] // 2, gate_up.shape[1]).unbind(0)
    return gate_IH, up_IH, weights[1]
