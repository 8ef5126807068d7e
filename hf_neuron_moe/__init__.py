"""Fine-tune Hugging Face SwiGLU and mixture-of-experts models with the Neuron kernels' numbers and layouts.

    >>> from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
    >>> report = patch_model(model, NeuronMoEConfig(precision="mxfp8"))

Importing the package imports neither torch nor transformers; the names below are loaded when they are first used. It
makes one thing known to transformers, now or when that is loaded: how to load a checkpoint that ``hf-neuron-moe
convert`` wrote (:mod:`hf_neuron_moe.quantizers`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.quantizers.register import install as _register_quantizer

if TYPE_CHECKING:
    from hf_neuron_moe.activation_policy import ActivationBudget, ActivationPolicy
    from hf_neuron_moe.config import NeuronMoEConfig
    from hf_neuron_moe.errors import NeuronMoEError, NeuronMoEWarning
    from hf_neuron_moe.patching import (
        PatchReport,
        patch_model,
        refresh_weights,
        set_activations,
        set_backend,
        unpatch_model,
    )
    from hf_neuron_moe.training import (
        NeuronMoEArguments,
        NeuronMoECallback,
        NeuronMoETrainer,
        NeuronMoETrainerMixin,
        NeuronMoETrainingArguments,
    )

__all__ = [
    "ActivationBudget",
    "ActivationPolicy",
    "NeuronMoEArguments",
    "NeuronMoECallback",
    "NeuronMoEConfig",
    "NeuronMoEError",
    "NeuronMoETrainer",
    "NeuronMoETrainerMixin",
    "NeuronMoETrainingArguments",
    "NeuronMoEWarning",
    "PatchReport",
    "__version__",
    "patch_model",
    "refresh_weights",
    "set_activations",
    "set_backend",
    "unpatch_model",
]

_HOME = {
    "ActivationBudget": "hf_neuron_moe.activation_policy",
    "ActivationPolicy": "hf_neuron_moe.activation_policy",
    "NeuronMoEArguments": "hf_neuron_moe.training",
    "NeuronMoECallback": "hf_neuron_moe.training",
    "NeuronMoEConfig": "hf_neuron_moe.config",
    "NeuronMoEError": "hf_neuron_moe.errors",
    "NeuronMoETrainer": "hf_neuron_moe.training",
    "NeuronMoETrainerMixin": "hf_neuron_moe.training",
    "NeuronMoETrainingArguments": "hf_neuron_moe.training",
    "NeuronMoEWarning": "hf_neuron_moe.errors",
    "PatchReport": "hf_neuron_moe.patching",
    "patch_model": "hf_neuron_moe.patching",
    "refresh_weights": "hf_neuron_moe.patching",
    "set_activations": "hf_neuron_moe.patching",
    "set_backend": "hf_neuron_moe.patching",
    "unpatch_model": "hf_neuron_moe.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_register_quantizer()
