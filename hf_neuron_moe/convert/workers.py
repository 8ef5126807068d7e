"""Several threads at work on one shard.

torch, file reads and writes and SHA-256 all release Python's lock while they work. Every task writes to places of its
own and results keep the tasks' order, so that the number of threads changes no byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, on the calling thread."""


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes it is called with, at most `total`, and passes the sum on."""
    done = 0

    def step(nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, total)
        if progress is not None:
            progress(done, total)

    return step


def cores() -> int:
    """Return how many cores this process may run on: the number of workers where none is asked for."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Runs tasks on a pool of threads; without one, on the calling thread."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def run(self, tasks: Sequence[Callable[[], ResultT]]) -> Iterator[ResultT]:
        """Give the tasks' results in the tasks' order, each as soon as it and all before it are there.

        The first failure ends the iteration. Tasks not begun are dropped, and those at work are waited for, so that
        nothing writes into a folder that is being put in order.
        """
        if self._pool is None:
            for task in tasks:
                yield task()
            return
        futures = [self._pool.submit(task) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()


@contextmanager
def working(count: int) -> Iterator[Workers]:
    """Give `count` workers, which share torch's own threads: together more than cores, they would hinder each other."""
    if count == 1:
        yield Workers(None)
        return
    before = torch.get_num_threads()
    # For threads that begin after this call; it does not reach those of the caller's other thread pools.
    torch.set_num_threads(max(1, before // count))
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="hf-neuron-moe") as pool:
            yield Workers(pool)
    finally:
        torch.set_num_threads(before)


def anonymous_bytes() -> int:
    """Return the bytes of memory in use that no file backs, which the system cannot take back; 0 if it is not told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
