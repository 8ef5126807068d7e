"""Who looks at the operators of blocks while they are computed: nobody, unless a watcher is in the list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import BlockCall, ExpertWeights, FFNWeights, Routing


class OpCall(NamedTuple):
    """One forward (without `dout`) or backward of a block's operator, with what it returned."""

    call: BlockCall
    x_TH: Tensor
    routing: Routing | None
    weights: FFNWeights | ExpertWeights | MXExpertStack
    saved: Sequence[Tensor]
    results: Sequence[Tensor]  # the output, or the gradients in the operator's order
    dout_TH: Tensor | None = None


WATCHERS: list[Callable[[OpCall], None]] = []


def watched(*fields: object) -> None:
    """Show a call, given by the fields of :class:`OpCall`, to all watchers. A program that is traced shows none."""
    if WATCHERS and not torch.compiler.is_compiling():
        seen = OpCall(*fields)  # type: ignore[arg-type]
        for watcher in tuple(WATCHERS):
            watcher(seen)
