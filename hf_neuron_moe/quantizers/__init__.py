"""Loads converted checkpoints through ``from_pretrained``: the quantization method ``"neuron_moe"`` of transformers.

``import hf_neuron_moe`` registers it (:mod:`hf_neuron_moe.quantizers.register`); nothing has to be imported from
here. The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_neuron_moe._lazy import lazy

if TYPE_CHECKING:
    from hf_neuron_moe.quantizers.quantization_config import NeuronMoEQuantizationConfig as NeuronMoEQuantizationConfig
    from hf_neuron_moe.quantizers.quantizer import NeuronMoEQuantizer as NeuronMoEQuantizer

__all__, __getattr__ = lazy(
    __name__, {"quantization_config": ("NeuronMoEQuantizationConfig",), "quantizer": ("NeuronMoEQuantizer",)}
)
