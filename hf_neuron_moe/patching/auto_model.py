"""Load and patch in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import naming
from hf_neuron_moe.patching.api import as_config, patch_model, unpatch_model
from hf_neuron_moe.patching.apply import report_of


class AutoNeuronMoEModelForCausalLM:
    """``AutoModelForCausalLM`` whose models come patched. It has no instances: call :meth:`from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        neuron_config: NeuronMoEConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what ``AutoModelForCausalLM.from_pretrained`` returns for these arguments, with the model patched.

        Args:
            pretrained_model_name_or_path: a folder or a Hub id; a folder that ``hf-neuron-moe convert`` wrote, too.
            *args: passed on.
            neuron_config: a :class:`NeuronMoEConfig`, a mapping of its options, or None. None are the defaults, and
                for a conversion the blocks that it was made for.
            **kwargs: passed on.

        Raises:
            NeuronMoEError: the options are wrong, which is found before anything is loaded, or the model cannot be
                patched. No model is returned then.
        """
        with naming("AutoNeuronMoEModelForCausalLM.from_pretrained"):
            config = as_config(neuron_config)
        loaded = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        converted = report_of(model) is not None or getattr(model, "is_quantized", False)
        if converted and neuron_config is None:
            return loaded
        if report_of(model) is not None:
            unpatch_model(model)
        patch_model(model, config)
        return loaded
