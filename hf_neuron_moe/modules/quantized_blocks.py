"""Blocks with MX weights: codes and scales as buffers, under the names that the converted files have.

They have no trainable weights and no float ones: one byte per weight (half a byte in FP4) and one per 32 weights.
Adapters go on other modules, or around the whole block. H hidden size, I intermediate size; both may be padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.backends.mx_weights import PERMUTED, MXExpertStack, MXLayout, held_form
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.formats.moe_mx import TILE, from_groups, to_groups
from hf_neuron_moe.modules.backend_choice import usable_backend
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.collectives import sum_gradients, sum_results
from hf_neuron_moe.modules.dense_checks import check_arguments, check_attributes, check_rank
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.experts import called
from hf_neuron_moe.modules.experts_calls import BY_EXPERT, IDENTITY
from hf_neuron_moe.modules.experts_form import ExpertsForm, check_constants, read_experts
from hf_neuron_moe.modules.quantized_ops import quantized_network
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.state_dict import halves_together
from hf_neuron_moe.modules.swiglu_mlp import three_biases

_FOR_INFERENCE = "For inference call the model in eval() and under torch.no_grad() or torch.inference_mode()."

GATE_UP, DOWN = "gate_up_proj", "down_proj"
UP = "up_proj"  # name of the first weight of experts without a gate, where others have gate_up
SCALE_SUFFIX = "_scale"


class QuantizedBlock(NeuronBlock):
    """Base of the blocks with MX weights.

    `original`, whose weights are not used, is usually on the meta device. The precision of `config` is that of the
    activations. `layouts` say by role how codes are stored. `tensors` are codes and scales by :meth:`tensor_names`, and
    biases in their original form where there are any. They are on the meta device until they are loaded; then biases
    of experts have gate's values first, whatever the original's order. `roles` are those of a dense MLP's attributes,
    None for experts.
    """

    weight_suffix = ""

    def __init__(
        self,
        original: nn.Module,
        name: str,
        config: NeuronMoEConfig,
        layouts: Mapping[str, MXLayout],
        tensors: Mapping[str, Tensor],
        roles: DenseRoles | None = None,
    ) -> None:
        super().__init__(original, name, config)
        self.neuron_keep = canonical_keep(config.activations, "bf16")  # the backward is that of the bf16 kernels
        self.neuron_layouts = dict(layouts)
        self.neuron_fallbacks_warned: set[str] = set()
        parts = read_experts(original) if roles is None else roles
        self.neuron_form, self.neuron_roles = (parts if isinstance(parts, ExpertsForm) else None), roles
        self.neuron_activation_name = parts.activation
        self._remember_activation(parts.activation, parts.gate)
        for replaced in parts.parameters if isinstance(parts, ExpertsForm) else parts.linears:
            self._parameters.pop(replaced, None)
            self._modules.pop(replaced.partition(".")[0], None)  # whose own code expects its parameters
        for key in (*self.tensor_names(parts.gate.gated), *parts.biases):
            self._hold(key, tensors[key])

    @property
    def neuron_shape(self) -> SavedBlock:
        stack = self.neuron_stack
        experts = None if self.neuron_form is None else len(stack.down_codes)
        sizes = (stack.hidden, stack.inner, self.neuron_top_k)
        config, gate = self.neuron_config, self.neuron_gate
        joined = () if self.neuron_roles is None else (stack.gate_up_bias, stack.down_bias)
        copied = sum(bias.nbytes for bias in joined if bias is not None)
        return SavedBlock("bf16", *sizes, config.backend, quantized=True, experts=experts, gate=gate, copied=copied)

    @classmethod
    def tensor_names(cls, gated: bool = True) -> tuple[str, str, str, str]:
        """Names of gate_up (or up) codes, gate_up scales, down codes and down scales within the module."""
        gate_up, down = (GATE_UP if gated else UP) + cls.weight_suffix, DOWN + cls.weight_suffix
        return gate_up, gate_up + SCALE_SUFFIX, down, down + SCALE_SUFFIX

    def _hold(self, key: str, tensor: Tensor) -> None:
        """Register `tensor` as the buffer `key`, making submodules on the way."""
        path, _, leaf = key.rpartition(".")
        if path and path not in self._modules:
            self.add_module(path, QuantizedProjection())
        self.get_submodule(path).register_buffer(leaf, tensor)

    def settle(self) -> None:
        """Bring loaded tensors into the form in which they are held; the values stay what they are."""
        names = self.tensor_names(self.neuron_gate.gated)
        for role, codes, scales in zip((GATE_UP, DOWN), names[::2], names[1::2]):
            held = held_form(self.get_buffer(codes), self.get_buffer(scales), self.neuron_layouts[role])
            self._hold(codes, held[0])
            self._hold(scales, held[1])
            self.neuron_layouts[role] = held[2]
        if self.neuron_form is not None and self.neuron_form.biased:
            biases, stack = self.neuron_form.biases, self.neuron_stack
            gate_up, down = map(self.get_buffer, biases)
            halves = halves_together(gate_up) if self.neuron_form.bias_interleaved else gate_up
            halves = halves.unflatten(-1, (self.neuron_gate.halves, -1))
            halves = F.pad(halves, (0, stack.inner - halves.shape[-1]))
            halves = to_groups(halves, min(stack.inner, TILE)) if self.permuted else halves
            self._hold(biases[0], halves.flatten(-2))
            self._hold(biases[1], F.pad(down, (0, stack.hidden - down.shape[-1])))

    def original_biases(self, hidden: int | None, inner: int | None) -> dict[str, Tensor]:
        """Return the biases as the original holds them, without zeros, by its parameters' names."""
        form = self.neuron_form
        if form is None or not form.biased:
            names = () if self.neuron_roles is None else self.neuron_roles.biases
            return {name: self.get_buffer(name).clone() for name in names}
        gate_up, down = map(self.get_buffer, form.biases)
        halves = gate_up.unflatten(-1, (form.gate.halves, -1))
        halves = (from_groups(halves, min(halves.shape[-1], TILE)) if self.permuted else halves)[..., :inner]
        halves = halves.transpose(-1, -2) if form.bias_interleaved else halves
        return dict(zip(form.biases, (halves.flatten(-2), down[..., :hidden].clone())))

    @property
    def permuted(self) -> bool:
        """Whether the words hold H and I permuted, so that their groups are those of a quantized source."""
        return self.neuron_layouts[GATE_UP].order == PERMUTED

    @property
    def neuron_stack(self) -> MXExpertStack:
        """The weights as the backend takes them."""
        gate_up, gate_up_scales, down, down_scales = map(self.get_buffer, self.tensor_names(self.neuron_gate.gated))
        form = self.neuron_form
        if form is not None and form.call == IDENTITY:
            # Experts that return their input have rows too, which nothing reads.
            gate_up, gate_up_scales = gate_up[: len(down)], gate_up_scales[: len(down)]
        layouts, biases = self.neuron_layouts, () if form is None else map(self.get_buffer, form.biases)
        codes = (gate_up, gate_up_scales, down, down_scales)
        stack = MXExpertStack(*codes, layouts[GATE_UP], layouts[DOWN], self.neuron_gate, *biases)
        roles = self.neuron_roles
        return stack if roles is None or not roles.biased else self._with_biases(stack, roles)

    def _with_biases(self, stack: MXExpertStack, roles: DenseRoles) -> MXExpertStack:
        """Return a dense MLP's network with its biases, zeros where the conversion added some to the weights."""
        own = [self.get_buffer(f"{name}.bias") if name in roles.biased else None for name in roles.linears]
        *halves, down_H = three_biases(roles, own)
        known, gate_up_2I = next((half_I for half_I in halves if half_I is not None), None), None
        if known is not None:
            both = (torch.zeros_like(known) if half_I is None else half_I for half_I in halves)
            gate_up_2I = torch.cat([F.pad(half_I, (0, stack.inner - len(half_I))) for half_I in both])
        down_H = None if down_H is None else F.pad(down_H, (0, stack.hidden - len(down_H)))
        return replace(stack, gate_up_bias=gate_up_2I, down_bias=down_H)

    def _compute(self, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None) -> Tensor:
        self._check_activation(self.neuron_activation_name)
        if self.neuron_form is not None:
            check_constants(self, self.neuron_form, self.neuron_name)
        stack, hidden = self.neuron_stack, x_TH.shape[1]
        if stack.hidden > hidden:  # zeros that the conversion added meet zeros here
            x_TH = F.pad(x_TH, (0, stack.hidden - hidden))
        if self.permuted:
            x_TH = to_groups(x_TH)
        # Whether a backward may come, now or in the second pass of a checkpointed one.
        inputs = [x_TH] if weight_TK is None else [x_TH, weight_TK]
        training = self.training or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))
        # Where PyTorch may not take over, a call that is too long is the backend's to refuse.
        tokens = x_TH.shape[0] if self.neuron_config.fallback == "torch" else 0
        backend = usable_backend(
            self.neuron_config,
            x_TH.device,
            type(self).__name__,
            lambda kernels: kernels.quantized_support(stack, tokens=tokens, training=training),
            self.neuron_fallbacks_warned,
            _FOR_INFERENCE if training else "",
        )
        options = {"backend": backend, "activations": self.neuron_keep}
        # Without gaps: gloo, which adds such outputs of several processes, takes no notice of strides.
        return quantized_network(x_TH, index_TK, weight_TK, stack, **options)[:, :hidden].contiguous()

    def extra_repr(self) -> str:
        """Show the element format and the sizes held."""
        stack, layout = self.neuron_stack, self.neuron_layouts[GATE_UP]
        order = ", permuted" if self.permuted else ""
        formats = " and ".join(dict.fromkeys((layout.fmt, self.neuron_layouts[DOWN].fmt)))
        return f"frozen {formats}, {layout.arrangement}{order}, H={stack.hidden}, I={stack.inner}"


class QuantizedProjection(nn.Module):
    """Holds the codes and scales of one dense projection under the names ``weight`` and ``weight_scale``."""

    in_features = out_features = 0  # for rules of a model's tensor-parallel plan, which are about another layer


class QuantizedExperts(QuantizedBlock):
    """Experts behind their stock call, ``gate_up_proj`` and ``down_proj`` being MX codes."""

    neuron_form: ExpertsForm

    @property
    def neuron_shape(self) -> SavedBlock:
        form, shape = self.neuron_form, super().neuron_shape
        by_pair = form.call == BY_EXPERT or form.post_norm is not None
        return replace(shape, rows=shape.top_k or 0) if by_pair else shape

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        gammas: Tensor | None = None,
    ) -> Tensor:
        """Return what the original's call does, in the shape and dtype of `hidden_states`.

        The others are what the original takes: ids and weights ``[T, K]``, weights alone in their place or by the name
        that shared experts have for them, or nothing. Ids of E and above add nothing.
        """
        routing = (each for each in (top_k_index, top_k_weights, gammas) if each is not None)
        count = len(self.get_buffer(DOWN))
        return called(self, self.neuron_form, self._compute, count, (hidden_states, *routing))


class QuantizedSwiGLUMLP(QuantizedBlock):
    """``down(silu(gate(x)) * up(x))`` with ``gate_up_proj.weight`` and ``down_proj.weight`` as MX codes."""

    weight_suffix = ".weight"
    neuron_roles: DenseRoles
    neuron_group: Any = None  # the processes among which I is divided

    def forward(self, hidden_states: Tensor, *unused: object, **unused_by_name: object) -> Tensor:
        """Apply the block to ``hidden_states`` ``[..., H]``; the result has its shape and dtype."""
        if unused or unused_by_name:
            check_arguments(self, self.neuron_roles, unused, unused_by_name)
        check_attributes(self, self.neuron_roles, layers=False)
        check_rank(self, self.neuron_roles, hidden_states)
        x_SH, group = hidden_states.reshape(-1, hidden_states.shape[-1]), self.neuron_group
        y_SH = self._compute(x_SH if group is None else sum_gradients(x_SH, group), None, None)
        return (y_SH if group is None else sum_results(y_SH, group)).reshape(hidden_states.shape)
