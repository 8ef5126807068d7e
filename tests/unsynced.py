"""Leave out the wait for the disk.

What was written can be read at once; only a power cut would show whether it was synced. Tests that are about the order
of the syncs record or simulate them. Most of the time of a conversion of a tiny model is this wait.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

real_fsync = os.fsync
_CALLS = {name: getattr(os, name) for name in ("fsync", "posix_fadvise") if hasattr(os, name)}
"""Of these the second one starts the writing early, which removing the file then waits for."""


def leave_out_syncs() -> None:
    """Let the calls only check their descriptor."""
    for name in _CALLS:
        setattr(os, name, _checked)


def wait_for_syncs() -> None:
    """Let the calls wait again."""
    for name, function in _CALLS.items():
        setattr(os, name, function)


def _checked(descriptor: Any, *_: int) -> None:
    os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())


def rewrite(path: Path, content: bytes | bytearray) -> None:
    """Give a file other content without emptying it first: ext4 writes such a file out at once, which takes 3 ms."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
