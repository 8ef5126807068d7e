"""A progress line on a terminal: bytes, bytes per second, time left and peak memory; nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Update = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

SAMPLE_SECONDS = 0.1
"""At most ten looks at the memory per second: reading /proc takes about 30 microseconds."""


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, in bytes; 0 where the system does not tell.

    Mapped checkpoint files are not counted: the system takes their pages back when it needs them.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


class Watch:
    """Counts bytes and seconds, and keeps the largest memory it saw.

    Attributes:
        done: bytes reported last.
        peak: largest :func:`anonymous_bytes` seen.
    """

    def __init__(self) -> None:
        self.done = 0
        self.peak = anonymous_bytes()
        self._start = time.monotonic()
        self._sampled = self._start

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def update(self, done: int, total: int) -> None:
        """Take note of a step."""
        self.done = done
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_SECONDS or done == total:
            self._sampled = now
            self.peak = max(self.peak, anonymous_bytes())


@contextmanager
def watching(label: str, *, quiet: bool = False) -> Iterator[tuple[Watch, Update]]:
    """Give a watch and the function that a long operation calls with its progress.

    Args:
        label: what is being done, such as "converting".
        quiet: draw nothing even on a terminal.
    """
    watch = Watch()
    if quiet or not sys.stderr.isatty():
        yield watch, watch.update
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(label),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("peak {task.fields[peak]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, peak="")

        def update(done: int, total: int) -> None:
            watch.update(done, total)
            bar.update(task, completed=done, total=total, peak=in_words(watch.peak))

        yield watch, update


def in_words(nbytes: float) -> str:
    """A number of bytes for people: ``512 B``, ``1.5 MB``; powers of 1000 as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
