"""Gradient checkpointing by the name that the installed transformers has for it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
NAME = NEW if hasattr(PreTrainedModel, f"{NEW}_enable") else OLD
"""Of its methods and arguments; transformers 5.17 knows the old name only."""


def switch_on(model: nn.Module, *options: Any, **more: Any) -> None:
    """Let a model recompute its layers in the backward."""
    getattr(model, f"{NAME}_enable")(*options, **more)
