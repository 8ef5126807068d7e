"""What blocks with frozen MX weights share: codes and scales as buffers, under the names the converted files have.

A frozen block has no trainable weights and no float ones either: one byte per weight (half a byte in FP4) and one per
32 weights. It computes with exactly these codes. Adapters go on other modules, or around the whole block.

H hidden size, I intermediate size; both may be padded in the stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout, held_form
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.backend_choice import usable_backend
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_ops import frozen_network
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.swiglu_mlp import DenseRoles

_FOR_INFERENCE = "For inference call the model in eval() and under torch.no_grad() or torch.inference_mode()."

GATE_UP, DOWN = "gate_up_proj", "down_proj"
SCALE_SUFFIX = "_scale"


@dataclass(frozen=True)
class FrozenTensor:
    """What is known of a stored tensor before its values are loaded."""

    dtype: torch.dtype
    """Dtype in the file."""
    shape: tuple[int, ...]
    """Shape in the file."""


class FrozenBlock(NeuronBlock):
    """Base of the frozen blocks.

    Args:
        original: the module to stand in for, usually on the meta device; its weights are not used.
        name: its name in the model, for messages.
        config: the resolved configuration; its precision is that of the activations.
        layouts: how the codes of ``gate_up_proj`` and of ``down_proj`` are stored.
        activation: name of the activation's attribute, None where forward calls the function itself.
    """

    weight_suffix = ""

    def __init__(
        self,
        original: nn.Module,
        name: str,
        config: NeuronMoEConfig,
        layouts: Mapping[str, MXLayout],
        activation: str | None,
    ) -> None:
        super().__init__(original, name, config)
        self.neuron_layouts = dict(layouts)
        self.neuron_told: set[str] = set()
        self.neuron_activation = activation
        self._remember_activation(activation)

    @property
    def neuron_shape_precision(self) -> str:
        """The backward is that of the bf16 kernels, with the codes' values as weights."""
        return "bf16"

    @property
    def neuron_shape(self) -> SavedBlock:
        """What the block's kept bytes depend on."""
        stack, backend = self.neuron_stack, self.neuron_config.backend
        return SavedBlock("bf16", stack.hidden, stack.inner, self.neuron_top_k, backend, frozen=True)

    def _hold_all(self, tensors: Mapping[str, FrozenTensor]) -> None:
        """Register the four tensors, still without values, by their names in the module."""
        for key in self.tensor_names():
            self._hold(key, torch.empty(tensors[key].shape, dtype=tensors[key].dtype, device="meta"))

    @classmethod
    def tensor_names(cls) -> tuple[str, str, str, str]:
        """Names of gate_up codes, gate_up scales, down codes and down scales within the module."""
        gate_up, down = GATE_UP + cls.weight_suffix, DOWN + cls.weight_suffix
        return gate_up, gate_up + SCALE_SUFFIX, down, down + SCALE_SUFFIX

    def _hold(self, key: str, tensor: Tensor) -> None:
        """Register `tensor` as the buffer `key`, making submodules on the way."""
        path, _, leaf = key.rpartition(".")
        home: nn.Module = self
        if path:
            if path not in self._modules:
                self.add_module(path, FrozenProjection())
            home = self.get_submodule(path)
        home.register_buffer(leaf, tensor)

    def settle(self) -> None:
        """Bring loaded tensors into the form in which they are held; the values stay what they are."""
        names = self.tensor_names()
        for role, codes, scales in zip((GATE_UP, DOWN), names[::2], names[1::2]):
            held = held_form(self.get_buffer(codes), self.get_buffer(scales), self.neuron_layouts[role])
            self._hold(codes, held[0])
            self._hold(scales, held[1])
            self.neuron_layouts[role] = held[2]

    @property
    def neuron_stack(self) -> MXExpertStack:
        """The weights as the backend takes them."""
        gate_up, gate_up_scales, down, down_scales = map(self.get_buffer, self.tensor_names())
        layouts = self.neuron_layouts
        return MXExpertStack(gate_up, gate_up_scales, down, down_scales, layouts[GATE_UP], layouts[DOWN])

    def _compute(self, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None) -> Tensor:
        self._check_activation(self.neuron_activation)
        stack, hidden = self.neuron_stack, x_TH.shape[1]
        if stack.hidden > hidden:  # zeros that the conversion added meet zeros here
            x_TH = F.pad(x_TH, (0, stack.hidden - hidden))
        training = self._may_train(x_TH, weight_TK)
        # Where PyTorch may not take over, a call that is too long is the backend's to refuse.
        tokens = x_TH.shape[0] if self.neuron_config.fallback == "torch" else 0
        backend = usable_backend(
            self.neuron_config,
            x_TH.device,
            type(self).__name__,
            lambda kernels: kernels.quantized_support(stack, tokens=tokens, training=training),
            self.neuron_told,
            _FOR_INFERENCE if training else "",
        )
        keep = self.neuron_keep
        return frozen_network(x_TH, index_TK, weight_TK, stack, backend=backend, activations=keep)[:, :hidden]

    def _may_train(self, *inputs: Tensor | None) -> bool:
        """Whether a backward may come, now or in the second pass of a checkpointed one."""
        recorded = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        return self.training or recorded

    def extra_repr(self) -> str:
        """Show the element format and the sizes held."""
        stack = self.neuron_stack
        return (
            f"frozen {stack.gate_up_layout.fmt}, {stack.gate_up_layout.arrangement}, H={stack.hidden}, I={stack.inner}"
        )


class FrozenProjection(nn.Module):
    """Holds the codes and scales of one dense projection under the names ``weight`` and ``weight_scale``."""


class FrozenExperts(FrozenBlock):
    """Experts behind transformers' experts call, ``gate_up_proj`` and ``down_proj`` being MX codes."""

    def __init__(
        self,
        original: nn.Module,
        name: str,
        config: NeuronMoEConfig,
        layouts: Mapping[str, MXLayout],
        tensors: Mapping[str, FrozenTensor],
    ) -> None:
        super().__init__(original, name, config, layouts, "act_fn")
        for key in (GATE_UP, DOWN):
            del self._parameters[key]
        self._hold_all(tensors)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: ``[T, K]`` integer expert ids; ids of E and above add nothing.
            top_k_weights: ``[T, K]`` routing weights.

        Returns:
            ``[T, H]`` in the dtype of `hidden_states`.
        """
        return self._compute(hidden_states, top_k_index, top_k_weights)


class FrozenSwiGLUMLP(FrozenBlock):
    """``down(silu(gate(x)) * up(x))`` with ``gate_up_proj.weight`` and ``down_proj.weight`` as MX codes."""

    weight_suffix = ".weight"

    def __init__(
        self,
        original: nn.Module,
        name: str,
        config: NeuronMoEConfig,
        layouts: Mapping[str, MXLayout],
        tensors: Mapping[str, FrozenTensor],
        roles: DenseRoles,
    ) -> None:
        super().__init__(original, name, config, layouts, roles.activation)
        for child in roles.linears:
            del self._modules[child]
        self._hold_all(tensors)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the block to ``hidden_states`` ``[..., H]``; the result has its shape and dtype."""
        x_SH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._compute(x_SH, None, None).reshape(hidden_states.shape)
