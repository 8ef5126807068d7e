"""SHA-256 of files: of finished ones, of shards that are checked tensor by tensor, of one that is being written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

from hf_neuron_moe.convert.io.checksums import TensorChecksum
from hf_neuron_moe.convert.io.shard import Entry, in_file_order, shard_header
from hf_neuron_moe.convert.io.tensors import CHUNK_BYTES
from hf_neuron_moe.convert.manifest import WrittenTensor, header_metadata
from hf_neuron_moe.convert.transaction import disk


def entries_of(tensors: Iterable[WrittenTensor]) -> list[Entry]:
    """What a shard's header says of its tensors."""
    return [Entry(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def hash_file(path: Path, step: Callable[[int], None] = lambda nbytes: None) -> str:
    """SHA-256 of a file; `step` is called with the bytes just read."""
    digest = hashlib.sha256()
    with disk.open_to_read(path) as file:
        for part in _parts(file, 0, path.stat().st_size):
            digest.update(part)
            step(part.nbytes)
    return digest.hexdigest()


def check_shard(path: Path, tensors: Sequence[WrittenTensor], checksums: Mapping[str, str]) -> str | None:
    """SHA-256 of a shard that holds exactly `tensors`, with these checksums of each one's bytes; None of any other."""
    entries = in_file_order(entries_of(tensors))
    header = shard_header(entries, header_metadata(tensors))
    if path.stat().st_size != len(header) + sum(entry.nbytes for entry in entries):
        return None
    digest = hashlib.sha256(header)
    position = len(header)
    with disk.open_to_read(path) as file:
        if b"".join(bytes(part) for part in _parts(file, 0, len(header))) != header:
            return None
        for entry in entries:
            checksum = TensorChecksum()
            for part in _parts(file, position, entry.nbytes):
                checksum.update(part)
                digest.update(part)
            if checksum.text() != checksums.get(entry.name):
                return None
            position += entry.nbytes
    return digest.hexdigest()


class PrefixHash:
    """SHA-256 of a shard that is being written, taken from its front as far as its tensors are complete.

    Next to the threads that write, while what they wrote is in memory, it costs hardly any time; later it is a wait.
    """

    def __init__(self, path: Path, tensors: Sequence[WrittenTensor]) -> None:
        self._path = path
        self._left = in_file_order(entries_of(tensors))[::-1]
        self._complete: set[str] = set()
        self._position = 0
        self._header_bytes = len(shard_header(self._left, header_metadata(tensors)))
        self._digest = hashlib.sha256()

    def __enter__(self) -> PrefixHash:
        self._file = disk.open_to_read(self._path)
        self._take(self._header_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def follow(self, names: Iterable[str]) -> None:
        """Learn that these tensors are complete, and hash what is complete without a gap."""
        self._complete.update(names)
        while self._left and self._left[-1].name in self._complete:
            self._take(self._left.pop().nbytes)

    def hexdigest(self) -> str:
        """The whole file's SHA-256; every tensor must be complete."""
        assert not self._left, f"not complete: {self._left[-1].name}"
        return self._digest.hexdigest()

    def _take(self, nbytes: int) -> None:
        for part in _parts(self._file, self._position, nbytes):
            self._digest.update(part)
        self._position += nbytes


def _parts(file: FileIO, start: int, nbytes: int) -> Iterator[memoryview]:
    """A range of a file in parts; each is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    for position in range(0, nbytes, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, nbytes - position)]
        yield part[: disk.read_at(file, part, start + position)]
