"""Discover, plan, apply, report, undo: the blocks of a Hugging Face model replaced in place."""

from __future__ import annotations

from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.patching.report import PatchEntry, PatchReport
from hf_neuron_moe.patching.update import refresh_weights, set_activations, set_backend

__all__ = [
    "PatchEntry",
    "PatchReport",
    "patch_model",
    "refresh_weights",
    "set_activations",
    "set_backend",
    "unpatch_model",
]
