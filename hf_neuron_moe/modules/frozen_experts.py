"""Routed SwiGLU experts with frozen MX weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hf_neuron_moe.backends.mx_weights import MXLayout
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.frozen_block import DOWN, GATE_UP, FrozenBlock, FrozenTensor


class FrozenExperts(FrozenBlock):
    """Experts behind transformers' experts call, ``gate_up_proj`` and ``down_proj`` being MX codes.

    Args:
        original: the experts module to stand in for; its parameters are left out.
        name: its name in the model, for messages.
        config: the resolved configuration.
        layouts: how the codes are stored.
        tensors: the tensors to hold, by their names in the module.
    """

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
