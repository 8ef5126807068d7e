"""Checksums of single tensors, which name what was altered, next to the SHA-256 of whole files.

XXH3 (128 bits) costs a thirtieth of SHA-256 and finds damage as well; against intent there are the files' checksums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import xxhash

SHA256 = "sha256"  # What conversions of the format versions 1 and 2 recorded


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


_KINDS: dict[str, Callable[[], _Digest]] = {"xxh3_128": xxhash.xxh3_128, SHA256: hashlib.sha256}


class TensorChecksum:
    """The checksum of a tensor's bytes, given front to back, of the kind of the checksum `like`."""

    def __init__(self, like: str = "xxh3_128") -> None:
        self._kind = like.partition(":")[0]
        if self._kind not in _KINDS:
            raise ValueError(f"a checksum of unknown kind {self._kind!r}")
        self._digest = _KINDS[self._kind]()
        self.update = self._digest.update

    def text(self) -> str:
        """``"algorithm:hexadecimal digits"`` of all bytes so far."""
        return f"{self._kind}:{self._digest.hexdigest()}"
