"""Dense SwiGLU MLP with frozen MX weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hf_neuron_moe.backends.mx_weights import MXLayout
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.frozen_block import FrozenBlock, FrozenTensor
from hf_neuron_moe.modules.swiglu_mlp import DenseRoles


class FrozenSwiGLUMLP(FrozenBlock):
    """``down(silu(gate(x)) * up(x))`` with ``gate_up_proj.weight`` and ``down_proj.weight`` as MX codes.

    Args:
        original: the module to stand in for; its linear layers are left out.
        name: its name in the model, for messages.
        config: the resolved configuration.
        layouts: how the codes are stored.
        tensors: the tensors to hold, by their names in the module.
        roles: which attribute of `original` plays which part.
    """

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
