"""Loads converted checkpoints through ``from_pretrained``: the quantization method ``"neuron_moe"`` of transformers.

``import hf_neuron_moe`` registers it (:mod:`hf_neuron_moe.quantizers.register`); nothing has to be imported from
here. The names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_neuron_moe.quantizers.quantization_config import NeuronMoEQuantizationConfig
    from hf_neuron_moe.quantizers.quantizer import NeuronMoEQuantizer

__all__ = ["NeuronMoEQuantizationConfig", "NeuronMoEQuantizer"]

_HOME = {"NeuronMoEQuantizationConfig": "quantization_config", "NeuronMoEQuantizer": "quantizer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
