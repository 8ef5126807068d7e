"""Routing replay: a token that activation checkpointing recomputes keeps its experts.

``patch_model`` installs it for the checkpoints that transformers makes (``gradient_checkpointing=True``, reentrant or
not) and ``unpatch_model`` takes it out; nothing has to be switched on. Without checkpointing it does nothing at all.
Whoever calls ``torch.utils.checkpoint`` directly uses :func:`replay_routing` for one call,
:class:`ReplayingCheckpoint` where a checkpoint function can be given, or :func:`replay_contexts` where a ``context_fn``
can. How it works and what it keeps: :mod:`hf_neuron_moe.modules.routing_replay`.
"""

from __future__ import annotations

from hf_neuron_moe.modules.routing_replay import ReplayingCheckpoint, ReplayStats, replay_contexts, replay_routing
from hf_neuron_moe.patching.replay import routing_replay_stats

__all__ = ["ReplayStats", "ReplayingCheckpoint", "replay_contexts", "replay_routing", "routing_replay_stats"]
