"""What a kernel call would have been launched with on the device: checked, kept for whoever asks, otherwise unused.

Tile counts, spilling and the number of cores do not change a kernel's values, so the functions here accept them only to
check them. ``record_launches`` shows them::

    with record_launches() as launches:
        mlp_forward_mxfp8_nki(hidden, gate_up, down, scratch, gate_up_tiles_n=2)
    launches[0].options["gate_up_tiles_n"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelLaunch:
    """One call: the kernel's name and its options that have no effect on values."""

    kernel: str
    options: dict[str, object] = field(default_factory=dict)


_launches: ContextVar[list[KernelLaunch] | None] = ContextVar("launches", default=None)


@contextmanager
def record_launches() -> Iterator[list[KernelLaunch]]:
    """Collect the launches of the calls in the block; an inner block takes its calls from the outer one."""
    launches: list[KernelLaunch] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def note_launch(kernel: str, **options: object) -> None:
    """Add one launch to the innermost open :func:`record_launches`, if there is one."""
    launches = _launches.get()
    if launches is not None:
        launches.append(KernelLaunch(kernel, options))
