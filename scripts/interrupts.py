"""Ctrl-C while a script still imports its packages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hf_neuron_moe.cli.exit_codes import INTERRUPTED


@contextmanager
def importing(name: str) -> Iterator[None]:
    """End the process in one line on Ctrl-C while the program `name` imports.

    A KeyboardInterrupt is not enough: packages turn one that is raised inside of their imports into other errors.
    """
    begun = name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if begun:
        signal.signal(signal.SIGINT, _end)
    yield
    if begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted before it began\n")
    os._exit(INTERRUPTED.code)
