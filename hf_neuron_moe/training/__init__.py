"""Training: a Trainer that patches and measures, what the stock Trainer needs beside the patched blocks, estimates.

Routing replay, by which a token that activation checkpointing recomputes keeps its experts, is installed by
``patch_model`` for the checkpoints that transformers makes. If you call ``torch.utils.checkpoint`` directly, use
:func:`replay_routing` for one call, :class:`ReplayingCheckpoint` where a checkpoint function can be given, or
:func:`replay_contexts` where a ``context_fn`` can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_neuron_moe._lazy import lazy
from hf_neuron_moe.modules.sharded_lora import prepare_adapters
from hf_neuron_moe.patching.checkpoint_names import disable_moe_resume, enable_moe_resume
from hf_neuron_moe.patching.model_methods import routing_replay_stats
from hf_neuron_moe.patching.routing_replay import ReplayingCheckpoint, ReplayStats, replay_contexts, replay_routing
from hf_neuron_moe.training.checkpoint_files import find_last_complete, mark_complete
from hf_neuron_moe.training.checkpoints import SafeCheckpointMixin, refuse_nonfinite
from hf_neuron_moe.training.saved_tensors import SavedBytes, measure_saved_bytes

if TYPE_CHECKING:
    from hf_neuron_moe.training.arguments import NeuronMoEArguments, NeuronMoETrainingArguments
    from hf_neuron_moe.training.callback import NeuronMoECallback
    from hf_neuron_moe.training.fit import fit_layout
    from hf_neuron_moe.training.memory_estimate import TrainingEstimate, estimate_training
    from hf_neuron_moe.training.one_rank import Layout
    from hf_neuron_moe.training.trainer import NeuronMoETrainer, NeuronMoETrainerMixin

__all__ = [
    "Layout",
    "NeuronMoEArguments",
    "NeuronMoECallback",
    "NeuronMoETrainer",
    "NeuronMoETrainerMixin",
    "NeuronMoETrainingArguments",
    "ReplayStats",
    "ReplayingCheckpoint",
    "SafeCheckpointMixin",
    "SavedBytes",
    "TrainingEstimate",
    "disable_moe_resume",
    "enable_moe_resume",
    "estimate_training",
    "find_last_complete",
    "fit_layout",
    "mark_complete",
    "measure_saved_bytes",
    "prepare_adapters",
    "refuse_nonfinite",
    "replay_contexts",
    "replay_routing",
    "routing_replay_stats",
]

# Names that bring in transformers' Trainer, which takes seconds to import, are loaded when they are first used.
_LAZY, __getattr__ = lazy(
    __name__,
    {
        "arguments": ("NeuronMoEArguments", "NeuronMoETrainingArguments"),
        "callback": ("NeuronMoECallback",),
        "fit": ("fit_layout",),
        "memory_estimate": ("TrainingEstimate", "estimate_training"),
        "one_rank": ("Layout",),
        "trainer": ("NeuronMoETrainer", "NeuronMoETrainerMixin"),
    },
)
