"""Training with the stock Trainer: what it needs beside the patched blocks, and what to measure."""

from __future__ import annotations

from hf_neuron_moe.training.resume import disable_moe_resume, enable_moe_resume
from hf_neuron_moe.training.saved_tensors import SavedBytes, measure_saved_bytes

__all__ = ["SavedBytes", "disable_moe_resume", "enable_moe_resume", "measure_saved_bytes"]
