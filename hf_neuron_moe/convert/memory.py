"""How much memory this process holds that no file backs."""

from __future__ import annotations

from pathlib import Path


def anonymous_bytes() -> int:
    """Bytes of anonymous memory in use; 0 where the system does not tell.

    Pages of mapped files are not counted: the system takes them back when it needs them.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
