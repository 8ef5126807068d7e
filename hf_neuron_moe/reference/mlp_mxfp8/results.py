"""What the MXFP8 MLP functions return. Legend: S tokens, H hidden, I intermediate."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MLPForward(NamedTuple):
    """``output [S, H]``; the checkpoints ``[S, I]`` are None unless asked for."""

    output: Tensor
    gate_pre: Tensor | None
    gate_act: Tensor | None
    up: Tensor | None
    hidden: Tensor | None


class MLPBackward(NamedTuple):
    """All bf16: ``[S, H]``, ``[2I, H]`` (gate rows first) and ``[H, I]``."""

    hidden_states_grad: Tensor
    gate_up_weight_grad: Tensor
    down_proj_weight_grad: Tensor
