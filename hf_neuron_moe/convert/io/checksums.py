"""Checksums of single tensors: fast ones that name what was altered, beside the SHA-256 of whole files.

A conversion reads and hashes every source file and every shard as a whole. The checksum of each tensor on top of that
is XXH3 (128 bits, the `xxhash` library): it costs a thirtieth of SHA-256 and finds damage as well; what SHA-256 has
over it, resistance to somebody's intent, the checksums of the files have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import xxhash

XXH3 = "xxh3_128"
SHA256 = "sha256"
"""What conversions of the format versions 1 and 2 recorded."""


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class TensorChecksum:
    """The checksum of a tensor's bytes, given front to back; its text starts with the algorithm's name.

    The algorithm is that of the checksum `like`; a ValueError says that it is unknown.
    """

    def __init__(self, like: str = XXH3) -> None:
        self._kind = like.partition(":")[0]
        kinds: dict[str, Callable[[], _Digest]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}
        if self._kind not in kinds:
            raise ValueError(f"a checksum of unknown kind {self._kind!r}")
        self._digest = kinds[self._kind]()

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(data)

    def text(self) -> str:
        """``"algorithm:hexadecimal digits"`` of all bytes so far."""
        return f"{self._kind}:{self._digest.hexdigest()}"
