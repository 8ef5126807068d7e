"""A recomputed token keeps its experts: decisions of a checkpointed function's first run are replayed in later runs.

Where a router's two best candidates are nearly tied, one rounding step (another thread count, autocast, an atomic sum)
lets the second run of a checkpointed layer choose another expert. Its gradient then belongs to a forward that never
took place. Where experts save as many rows as they were given tokens, torch stops with a ``CheckpointError``. Here
later runs take the indices that the first one chose. The values are gathered from the recomputed scores, so weights
stay differentiable functions of the logits in every router, also in those that choose groups first, then experts.

A decision is a call of ``topk``, ``argmax`` or ``max`` along a dimension on a floating-point tensor, by function or
method, anywhere inside. Kept are its indices in the smallest integer type: one byte per chosen expert up to 256
experts, two per key that sparse attention selects up to 32,768 keys. They live until the graph of that call is freed.

Nothing is recorded or replayed while ``torch.compile`` traces: the compiler decides what of a graph is computed again.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hf_neuron_moe.errors import RoutingReplayError

WIDEST_COUNTED = 64
"""Wider selections are keys of sparse attention, not experts: replayed, but not compared."""

_TOPK, _MAX, _ARGMAX = "topk", "max", "argmax"
_DECISIONS = {getattr(owner, kind): kind for owner in (torch, Tensor) for kind in (_TOPK, _MAX, _ARGMAX)}


@dataclass
class Decision:
    """What one call chose."""

    kind: str  # ``"topk"``, ``"max"`` or ``"argmax"``
    indices: Tensor  # chosen positions along the dimension, as the call returned them, in the smallest integer type


@dataclass
class ReplayStats:
    """How often replay was needed."""

    decisions: int = 0  # rows decided in recomputations; a token makes one per ``topk`` of its router
    changed: dict[torch.device, Tensor] = field(default_factory=dict)
    """Those of them that would have chosen another set without replay, per device."""

    def add(self, kept: Tensor, fresh: Tensor, dim: int) -> None:
        """Compare what was kept with what a recomputation would have chosen along `dim`; no synchronization."""
        # Sets, not sequences: two near-tied experts that change places are still the same two experts.
        differs = (kept.to(fresh.dtype).sort(dim).values != fresh.sort(dim).values).any(dim)
        self.decisions += differs.numel()
        count = differs.sum()
        before = self.changed.get(count.device)
        self.changed[count.device] = count if before is None else before + count

    def total_changed(self) -> int:
        """Return `changed` over all devices; waits for them."""
        return sum(int(count) for count in self.changed.values())

    def clear(self) -> None:
        """Start counting anew."""
        self.decisions = 0
        self.changed.clear()


class _Chosen(torch.autograd.Function):
    """The values at chosen positions; saves the positions only.

    Both runs use it, since a checkpoint wants the same tensors saved in both. Its gradient is bit for bit that of
    ``topk``: zeros with the incoming values written to the chosen positions.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, indices: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.dim, ctx.shape = dim, scores.shape
        return scores.gather(dim, indices.long())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        (indices,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(ctx.dim, indices.long(), grad), None, None


class _Deciding(TorchFunctionMode):
    """Stands in for every decision in its scope; the two runs differ in where the indices come from."""

    def __init__(self, decisions: list[Decision], stats: ReplayStats | None = None) -> None:
        super().__init__()
        self.decisions = decisions
        self.stats = stats

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _DECISIONS.get(func)
        if kind is None or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        asked = _asked(kind, args, kwargs)
        if asked is None:
            return func(*args, **kwargs)
        scores, dim, keepdim = asked

        def choose() -> Tensor:
            with torch.no_grad():
                result = func(*args, **kwargs)
            return result if kind == _ARGMAX else result.indices

        indices = self.decide(kind, scores, dim, choose)
        if kind == _ARGMAX:
            return indices.long()
        values = _Chosen.apply(scores, indices if keepdim else indices.unsqueeze(dim), dim)
        result = getattr(torch.return_types, kind)
        return result((values if keepdim else values.squeeze(dim), indices.long()))

    @abstractmethod
    def decide(self, kind: str, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        """Return the indices of a decision about `scores` along `dim`, in a small integer type."""


class _Recording(_Deciding):
    def __enter__(self) -> _Recording:
        self.decisions.clear()
        super().__enter__()
        return self

    def decide(self, kind: str, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        indices = choose().to(_smallest_dtype(scores.shape[dim]))
        self.decisions.append(Decision(kind, indices))
        return indices


class _Replaying(_Deciding):
    def __enter__(self) -> _Replaying:
        self.next = 0  # a graph that is kept may be recomputed more than once
        super().__enter__()
        return self

    def decide(self, kind: str, scores: Tensor, dim: int, choose: Callable[[], Tensor]) -> Tensor:
        kept = self.decisions[self.next] if self.next < len(self.decisions) else None
        self.next += 1
        if kept is None or kept.kind != kind or not _fits(kept.indices, scores, dim, kind):
            first = f"{kept.kind} with indices of shape {tuple(kept.indices.shape)}" if kept else "absent"
            raise RoutingReplayError.about(
                f"decision {self.next} of the recomputation",
                f"the one of the first run ({first})",
                f"{kind} of scores of shape {tuple(scores.shape)}",
                "A checkpointed function must do the same in every run: look for state that the first run changed.",
            ).named("replay_routing")
        if self.stats is not None:
            if kept.indices.ndim < scores.ndim:  # the call dropped the dimension
                self.stats.add(kept.indices.unsqueeze(dim), choose().unsqueeze(dim), dim)
            elif kept.indices.shape[dim] <= WIDEST_COUNTED:
                self.stats.add(kept.indices, choose(), dim)
        return kept.indices


def _asked(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int, bool] | None:
    """Return ``(scores, dimension, whether the result keeps it)`` of a call; None if it decides nothing per token."""
    names = ("input", "k", "dim") if kind == _TOPK else ("input", "dim", "keepdim")
    given = dict(zip(names, args)) | kwargs
    scores, dim = given["input"], given.get("dim", -1 if kind == _TOPK else None)
    # max() without a dimension, or with a second tensor in its place, is arithmetic; integers are not scores.
    if not isinstance(dim, int) or given.get("out") is not None or not scores.is_floating_point() or not scores.ndim:
        return None
    return scores, dim, kind == _TOPK or given.get("keepdim", False)


def _smallest_dtype(size: int) -> torch.dtype:
    """The smallest integer dtype that holds positions below `size`."""
    if size <= 1 << 8:
        return torch.uint8
    return torch.int16 if size <= 1 << 15 else torch.int32 if size <= 1 << 31 else torch.int64


def _fits(indices: Tensor, scores: Tensor, dim: int, kind: str) -> bool:
    """Whether `indices` may have been chosen from a tensor of the shape of `scores`."""
    dim %= scores.ndim
    rows = scores.shape[:dim] + scores.shape[dim + 1 :]
    if indices.ndim < scores.ndim:
        return kind != _TOPK and indices.shape == rows
    return indices.shape[:dim] + indices.shape[dim + 1 :] == rows and indices.shape[dim] <= scores.shape[dim]


class _Replayed:
    """A function that records in its first run and replays in the later ones."""

    def __init__(self, function: Callable[..., Any], stats: ReplayStats | None) -> None:
        self.function = function
        self.stats = stats
        self.decisions: list[Decision] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        if self.decisions is not None:
            with _Replaying(self.decisions, self.stats):
                return self.function(*args, **kwargs)
        decisions: list[Decision] = []
        with _Recording(decisions):
            result = self.function(*args, **kwargs)
        self.decisions = decisions  # only now: a run that failed half way is not the one to repeat
        return result


def replay_routing(function: Callable[..., Any], stats: ReplayStats | None = None) -> Callable[..., Any]:
    """Return `function` with its routing fixed by its first run, for one call of ``torch.utils.checkpoint.checkpoint``.

    Make a new one for every call: ``checkpoint(replay_routing(layer), hidden, use_reentrant=False)``; it holds what its
    first run chose. Works for reentrant and non-reentrant checkpoints, nested ones, several forwards before a backward
    and repeated backwards. A recomputation whose decisions are of another kind or shape than the first run's raises
    :class:`~hf_neuron_moe.errors.RoutingReplayError`.

    Args:
        function: what is checkpointed.
        stats: where to count decisions that would have changed. Leave it out together with a selective checkpoint's
            ``context_fn``, which accepts no operation in the recomputation that the first run did not have.
    """
    return _Replayed(function, stats)


def replay_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the same as a ``context_fn`` of non-reentrant checkpoints: contexts of the forward and of recomputations.

    ``checkpoint(layer, hidden, use_reentrant=False, context_fn=replay_contexts)``.
    """
    decisions: list[Decision] = []
    return _Recording(decisions), _Replaying(decisions)


class ReplayingCheckpoint:
    """A checkpoint function whose recomputations keep the routing, to be used wherever one can be given.

    For example ``checkpoint_wrapper(layer, checkpoint_fn=ReplayingCheckpoint(), use_reentrant=False)``. `inner` has
    the signature of ``torch.utils.checkpoint.checkpoint``. Its ``stats`` count decisions in recomputations, and how
    many would have changed; not where the checkpoint has a ``context_fn``, see :func:`replay_routing`.
    """

    def __init__(self, inner: Callable[..., Any] = checkpoint) -> None:
        self.inner = inner
        self.stats = ReplayStats()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner` with `function` made to replay; without gradients nothing is recomputed, or recorded."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.inner(function, *args, **kwargs)
        bound = self.inner.keywords if isinstance(self.inner, functools.partial) else {}
        selective = "context_fn" in kwargs or "context_fn" in bound
        return self.inner(replay_routing(function, None if selective else self.stats), *args, **kwargs)
