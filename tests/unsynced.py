"""Leave out the wait for the disk.

What was written can be read at once; only a power cut would show whether it was synced. Tests that are about the order
of the syncs record or simulate them. Most of the time of a conversion of a tiny model is this wait.
"""

from __future__ import annotations

import os
from typing import Any

real_fsync = os.fsync


def leave_out_syncs() -> None:
    """Let ``os.fsync`` only check its descriptor, and start no early writing, for the rest of this process."""
    os.fsync = _checked
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise = _checked  # type: ignore[assignment]


def _checked(descriptor: Any, *_: int) -> None:
    os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
