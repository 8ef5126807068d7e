"""Training: a Trainer that patches and measures, what the stock Trainer needs beside the patched blocks, estimates.

The names that bring in transformers' Trainer, which takes seconds to import, are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_neuron_moe.training.checkpoint_files import find_last_complete, mark_complete
from hf_neuron_moe.training.checkpoints import SafeCheckpointMixin, refuse_nonfinite
from hf_neuron_moe.training.replay import (
    ReplayingCheckpoint,
    ReplayStats,
    replay_contexts,
    replay_routing,
    routing_replay_stats,
)
from hf_neuron_moe.training.resume import disable_moe_resume, enable_moe_resume
from hf_neuron_moe.training.saved_tensors import SavedBytes, measure_saved_bytes

if TYPE_CHECKING:
    from hf_neuron_moe.training.arguments import NeuronMoEArguments, NeuronMoETrainingArguments
    from hf_neuron_moe.training.callback import NeuronMoECallback
    from hf_neuron_moe.training.estimate import TrainingEstimate, estimate_training
    from hf_neuron_moe.training.trainer import NeuronMoETrainer, NeuronMoETrainerMixin

__all__ = [
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
    "mark_complete",
    "measure_saved_bytes",
    "refuse_nonfinite",
    "replay_contexts",
    "replay_routing",
    "routing_replay_stats",
]

_HOME = {
    "NeuronMoEArguments": "hf_neuron_moe.training.arguments",
    "NeuronMoECallback": "hf_neuron_moe.training.callback",
    "NeuronMoETrainer": "hf_neuron_moe.training.trainer",
    "NeuronMoETrainerMixin": "hf_neuron_moe.training.trainer",
    "NeuronMoETrainingArguments": "hf_neuron_moe.training.arguments",
    "TrainingEstimate": "hf_neuron_moe.training.estimate",
    "estimate_training": "hf_neuron_moe.training.estimate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
