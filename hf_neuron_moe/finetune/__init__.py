"""Fine-tuning from a YAML file, on TRL's SFTTrainer and DPOTrainer with this package's patched blocks.

``hf-neuron-moe train CONFIG.yaml`` is the command. From Python::

    from hf_neuron_moe.finetune import finetune, read_options

    metrics = finetune(read_options(["CONFIG.yaml", "--max_steps", "10"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_neuron_moe._lazy import lazy

if TYPE_CHECKING:
    from hf_neuron_moe.finetune.reading import read_options
    from hf_neuron_moe.finetune.train_options import Options
    from hf_neuron_moe.finetune.train_run import check, finetune

__all__ = ["Options", "check", "finetune", "read_options"]

_LAZY, __getattr__ = lazy(
    __name__, {"train_options": ("Options",), "reading": ("read_options",), "train_run": ("check", "finetune")}
)
