"""Fine-tune Hugging Face SwiGLU and mixture-of-experts models with the numerics and layouts of the Neuron kernels.

    >>> from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
    >>> report = patch_model(model, NeuronMoEConfig(precision="mxfp8"))

Importing the package imports neither torch nor transformers; the names below are loaded when they are first used. It
makes one thing known to transformers, now or when that is loaded: how to load a checkpoint that ``hf-neuron-moe
convert`` wrote (:mod:`hf_neuron_moe.quantizers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_neuron_moe._lazy import lazy
from hf_neuron_moe._version import __version__ as __version__
from hf_neuron_moe.quantizers.register import install as _register_quantizer

if TYPE_CHECKING:
    from hf_neuron_moe.activation_policy import (
        ActivationBudget as ActivationBudget,
        ActivationPolicy as ActivationPolicy,
    )
    from hf_neuron_moe.config import NeuronMoEConfig as NeuronMoEConfig
    from hf_neuron_moe.errors import NeuronMoEError as NeuronMoEError, NeuronMoEWarning as NeuronMoEWarning
    from hf_neuron_moe.modules.experts import register_experts_implementation as register_experts_implementation
    from hf_neuron_moe.patching import (
        PatchReport as PatchReport,
        patch_model as patch_model,
        refresh_weights as refresh_weights,
        set_activations as set_activations,
        set_backend as set_backend,
        unpatch_model as unpatch_model,
    )
    from hf_neuron_moe.patching.auto_model import AutoNeuronMoEModelForCausalLM as AutoNeuronMoEModelForCausalLM
    from hf_neuron_moe.training import (
        NeuronMoEArguments as NeuronMoEArguments,
        NeuronMoECallback as NeuronMoECallback,
        NeuronMoETrainer as NeuronMoETrainer,
        NeuronMoETrainerMixin as NeuronMoETrainerMixin,
        NeuronMoETrainingArguments as NeuronMoETrainingArguments,
    )

_NAMES, __getattr__ = lazy(
    __name__,
    {
        "activation_policy": ("ActivationBudget", "ActivationPolicy"),
        "config": ("NeuronMoEConfig",),
        "errors": ("NeuronMoEError", "NeuronMoEWarning"),
        "modules.experts": ("register_experts_implementation",),
        "patching": (
            "PatchReport",
            "patch_model",
            "refresh_weights",
            "set_activations",
            "set_backend",
            "unpatch_model",
        ),
        "patching.auto_model": ("AutoNeuronMoEModelForCausalLM",),
        "training": (
            "NeuronMoEArguments",
            "NeuronMoECallback",
            "NeuronMoETrainer",
            "NeuronMoETrainerMixin",
            "NeuronMoETrainingArguments",
        ),
    },
)
__all__ = ["__version__", *_NAMES]


def __dir__() -> list[str]:
    return sorted(__all__)


_register_quantizer()
