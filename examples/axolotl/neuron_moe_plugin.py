"""A plugin for axolotl: patches the model before adapters are attached.

    plugins: [neuron_moe_plugin.NeuronMoEPlugin]
    neuron_moe: {precision: mxfp8, activations: minimal}

Needs axolotl 0.21, with transformers 5.20.1. ``scripts/check_axolotl.sh`` runs it.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from hf_neuron_moe import patch_model


class NeuronMoEArgs(BaseModel):
    """The key that the plugin adds to axolotl's configuration: options of NeuronMoEConfig."""

    neuron_moe: dict[str, Any] | None = None


class NeuronMoEPlugin(BasePlugin):
    """Patches MLPs and experts with the numerics of the Neuron kernels."""

    def get_input_args(self) -> str:
        """Return the name of the class with the added keys."""
        return "neuron_moe_plugin.NeuronMoEArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch the loaded model, which has no adapters yet."""
        print(patch_model(model, dict(cfg.neuron_moe or {})))
