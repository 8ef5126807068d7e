"""Two runs whose routers choose the same experts, so that a nearly tied token does not count as a difference."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_neuron_moe.patching.routing_replay import _Deciding


class SameRouting(_Deciding):
    """Keeps what routers choose in the run of one process, and gives the other runs their part of it.

    Scores are each run's own, and so are the weights made of them. But a nearly tied token takes the same expert: if it
    took another one, gradients would differ by a whole token's share, which no rounding bounds (one token of 64 is up
    to 0.25 of a router's gradient, where roundings make 0.006). In fp32 nothing may want to choose otherwise in the
    first step. After it the optimizer has divided gradients by their size, those that are roundings alone too; the
    losses of later steps have the limit of moved weights.
    """

    def __init__(self, chosen: list[Tensor] | None, part: int = 0, parts: int = 1) -> None:
        super().__init__([])
        self.known, self.part, self.parts = chosen, part, parts
        self.chosen: list[Tensor] = []
        self.changed: list[int] = []  # by call

    def decide(self, kind: str, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        own = choose()
        kept = own if self.known is None else self.known[len(self.chosen)].chunk(self.parts)[self.part]
        assert kept.shape == own.shape, (kind, kept.shape, own.shape)
        self.chosen.append(kept)
        self.changed.append(int((kept.sort().values != own.sort().values).sum()))
        return kept
