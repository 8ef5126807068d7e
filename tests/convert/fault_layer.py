"""A layer around every disk call of a conversion: it counts them, and makes one of them the last or a failing one.

Used in the process of tests/convert/fault_driver.py and its children only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.transaction import disk

CALLS = (
    "create",
    "write_at",
    "fsync",
    "fsync_folder",
    "rename",
    "exchange",
    "make_folder",
    "unlink",
    "remove_folder",
    "open_to_read",
    "read_at",
)
CHANGES = CALLS[:9]
"""Calls that change what a killed process leaves behind; reading does not."""

SPACE = ("create", "write_at", "make_folder")
"""Calls that need space."""


@dataclass
class Layer:
    """What to do at which call.

    Attributes:
        at: number of the call, counted from 1; None only counts.
        action: ``"kill"`` ends the process with SIGKILL before the call, a write after half of its data. ``"powercut"``
            and ``"powercut-names"`` do so and take away what was not synced: the data, or also the names. A number
            fails the call with this errno, and ``(number,)`` all calls from there on that need space.
        calls: which functions count.
    """

    at: int | None = None
    action: Any = "kill"
    calls: tuple[str, ...] = CALLS
    count: int = 0
    created: list[str] = field(default_factory=list)
    log: Callable[[str], None] = lambda line: None
    dirty: set[str] = field(default_factory=set)
    moved: list[tuple[str, str, str, bytes | None]] = field(default_factory=list)

    @property
    def kills(self) -> bool:
        """Whether the process ends at the call."""
        return self.at is not None and isinstance(self.action, str)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the layer in place."""
        functions = {name: getattr(disk, name) for name in CALLS}
        try:
            for name, function in functions.items():
                setattr(disk, name, self._wrapped(name, function))
            yield
        finally:
            for name, function in functions.items():
                setattr(disk, name, function)

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self.calls:
                self.count += 1
                if self.at is not None and self.count >= self.at:
                    self._strike(name, function, arguments)
            replaced = None
            if name == "rename" and os.path.isfile(arguments[1]):
                replaced = Path(arguments[1]).read_bytes()
            result = function(*arguments)
            self._note(name, arguments, result, replaced)
            return result

        return call

    def _strike(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        lasting = isinstance(self.action, tuple)
        if (self.count > self.at and not lasting) or (lasting and name not in SPACE):
            return
        if name == "write_at":
            file, data, offset = arguments
            function(file, data[: len(data) // 2], offset)
        if isinstance(self.action, str):
            if self.action != "kill":
                self._lose_power(names=self.action == "powercut-names")
            os.kill(os.getpid(), signal.SIGKILL)
        code = self.action[0] if lasting else self.action
        raise OSError(code, os.strerror(code), str(arguments[0]))

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any, replaced: bytes | None) -> None:
        """Remember what is on the disk for good and what is not."""
        if name == "create":
            self.log(Path(arguments[0]).name)
            self.dirty.add(str(arguments[0]))
        elif name == "write_at":
            self.dirty.add(self._path_of(arguments[0]))
        elif name == "fsync":
            self.dirty.discard(self._path_of(arguments[0]))
        elif name == "fsync_folder":
            folder = str(arguments[0])
            self.moved = [entry for entry in self.moved if os.path.dirname(entry[2]) != folder]
        elif name == "rename" or (name == "exchange" and result):
            old, new = map(str, arguments)
            self.dirty = {new + path[len(old) :] if path.startswith(old) else path for path in self.dirty}
            self.moved.append((name, old, new, replaced))

    @staticmethod
    def _path_of(file: Any) -> str:
        return str(file.name)

    def _lose_power(self, *, names: bool) -> None:
        for path in self.dirty:
            if os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 3)
        for name, old, new, replaced in reversed(self.moved if names else []):
            if name == "exchange":
                disk.exchange(Path(old), Path(new))
            elif os.path.lexists(new) and not os.path.lexists(old):
                os.rename(new, old)
                if replaced is not None:  # a rename over a file is one step: one of the two is there at any time
                    Path(new).write_bytes(replaced)
