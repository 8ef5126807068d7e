"""Who computes a backend's kernel calls for a while in place of its device: a model of the device, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

Answer = Callable[[str, dict[str, Any]], tuple[Tensor, ...]]
"""Takes what the call is for (as ``"moe_forward"``) and its arguments by name; returns the kernel's results."""

_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)


def current_answer() -> Answer | None:
    """Return what answers kernel calls now; None where the device does."""
    return _answer.get()


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Let `answer` return the results of all kernel calls in the block of code."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)
