"""Progress on standard error: a line that moves on a terminal, or one per minute in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import typer

Update = Callable[[int, int], None]
"""Called with bytes, or what else is counted, done and in all."""

SAMPLE_SECONDS = 0.02  # between two looks at the memory, each of about 30 microseconds
WIDE = 80  # columns of a terminal from which on there is a bar
LOG_SECONDS = 60.0  # between two lines in a log: what takes less has none


@dataclass
class Watch:
    """What is known of a long operation."""

    unit: str = ""  # of what is counted; bytes without
    done: int = 0  # reported last
    peak: int = 0  # largest anonymous memory seen, in bytes
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def update(self, done: int, total: int) -> None:
        """Take note of a step."""
        self.done = done

    def cost(self) -> dict[str, float]:
        """Return time and memory, and the bytes where these are counted, for JSON."""
        counted = {} if self.unit else {"bytes": self.done}
        return {**counted, "seconds": round(self.seconds, 3), "peak_memory_bytes": self.peak}


@contextmanager
def watching(label: str, *, quiet: bool = False, unit: str = "") -> Iterator[tuple[Watch, Update]]:
    """Give a watch and the function that a long operation calls with its progress, which `quiet` does not show.

    What is counted are bytes, or with `unit` things of that name. The watch sees memory in either case.
    A thread looks at the memory: steps are too far apart for that, and when one is reported it is given back already.
    """
    watch, stop = Watch(unit), threading.Event()
    thread = threading.Thread(target=_sample, args=(watch, stop), name="memory", daemon=True)
    thread.start()
    try:
        if quiet:
            yield watch, watch.update
        elif sys.stderr.isatty():
            with _drawn(label, watch, unit) as update:
                yield watch, update
        else:
            yield watch, _logged(label, watch, unit)
    finally:
        stop.set()
        thread.join()


def _sample(watch: Watch, stop: threading.Event) -> None:
    from hf_neuron_moe.convert.workers import anonymous_bytes

    while True:
        watch.peak = max(watch.peak, anonymous_bytes())
        if stop.wait(SAMPLE_SECONDS):
            return


def _logged(label: str, watch: Watch, unit: str) -> Update:
    """Write a line when a minute has passed since the last one."""
    last: float = watch.seconds
    begin: tuple[float, int] | None = None  # what an earlier run did says nothing about this one's speed

    def update(done: int, total: int) -> None:
        nonlocal last, begin
        watch.update(done, total)
        now = watch.seconds
        begin = begin or (now, done)
        if now - last >= LOG_SECONDS:
            last = now
            words = f"{done:,} of {total:,} {unit}" if unit else f"{in_words(done)} of {in_words(total)}"
            rate = "" if unit else f", {in_words(done / now)}/s"
            spent, here = (now - begin[0], done - begin[1]) if done > begin[1] else (now, max(done, 1))
            minutes = round(spent * (total - done) / here / 60)
            left = f"about {minutes:,} min left" if minutes else "less than a minute left"
            progress = f"{words} ({100 * done // max(total, 1)} %){rate}"
            line = f"{label}: {progress}, {left}, peak {in_words(watch.peak)}"
            typer.echo(line, err=True)

    return update


@contextmanager
def _drawn(label: str, watch: Watch, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    counted = (TextColumn(f"{{task.completed}}/{{task.fields[whole]}} {unit}"),) if unit else ()
    console = Console(stderr=True)
    columns = [TextColumn(label), *(counted or [DownloadColumn()]), TimeRemainingColumn()]
    if console.width >= WIDE:
        speed = [] if counted else [TransferSpeedColumn()]
        columns[1:] = [BarColumn(), columns[1], *speed, columns[2], TextColumn("peak {task.fields[peak]}")]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None, peak="", whole="?")

        def update(done: int, total: int) -> None:
            watch.update(done, total)
            bar.update(task, completed=done, total=total, peak=in_words(watch.peak), whole=total)

        yield update


def duration(seconds: float) -> str:
    """A time in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def in_words(nbytes: float) -> str:
    """A number of bytes for people: ``512 B``, ``1.5 MB``; powers of 1000 as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
