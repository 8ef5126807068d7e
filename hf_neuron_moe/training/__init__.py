"""Training with the stock Trainer: what it needs beside the patched blocks."""

from __future__ import annotations

from hf_neuron_moe.training.resume import disable_moe_resume, enable_moe_resume

__all__ = ["disable_moe_resume", "enable_moe_resume"]
