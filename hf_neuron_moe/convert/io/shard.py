"""Writes one safetensors file tensor by tensor: the header first, since names, dtypes and shapes are known before."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from hf_neuron_moe.convert.io.checksums import TensorChecksum
from hf_neuron_moe.convert.io.source import ITEM_BYTES, nbytes_of
from hf_neuron_moe.convert.transaction import disk

_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(ITEM_BYTES)}


class Entry(NamedTuple):
    """Name, safetensors dtype and shape of one tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


def shard_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Everything of a safetensors file that comes before its data: the length, the JSON text, the padding.

    Data are ordered as the safetensors library orders them, by dtype, widest first, then by name: tensors are aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for entry in in_file_order(entries):
        end = position + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order in which tensors lie in a file."""
    return sorted(entries, key=lambda entry: (-_DTYPE_RANK[entry.dtype], entry.name))


class TensorStream:
    """One tensor of a shard, written front to back."""

    def __init__(self, file: FileIO, name: str, start: int, nbytes: int) -> None:
        self._file = file
        self._name = name
        self._position = start
        self._stop = start + nbytes
        self._checksum = TensorChecksum()

    def append(self, part: torch.Tensor) -> None:
        """Write the next bytes; `part` may be changed afterwards."""
        data = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert self._position + data.nbytes <= self._stop, f"{self._name}: too long"
        disk.write_at(self._file, data, self._position)
        self._checksum.update(data)
        self._position += data.nbytes

    def end(self) -> str:
        """Checksum of what was written, which must be all."""
        assert self._position == self._stop, f"{self._name}: too short"
        return self._checksum.text()


class ShardWriter:
    """A safetensors file being written, tensors in any order and by several threads; complete and synced in the end."""

    def __init__(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
        ordered = in_file_order(entries)
        header = shard_header(ordered, metadata)
        self._left: dict[str, tuple[int, int]] = {}
        position = len(header)
        for entry in ordered:
            self._left[entry.name] = (position, entry.nbytes)
            position += entry.nbytes
        self._file = disk.create(path)
        try:
            disk.write_at(self._file, memoryview(header), 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write one tensor's bytes and return their checksum."""
        return self.write_parts(name, (tensor,))

    def write_parts(self, name: str, parts: Iterable[torch.Tensor]) -> str:
        """Write one tensor from parts of its data, each used before the next is asked for; return its checksum."""
        stream = self.begin(name)
        for part in parts:
            stream.append(part)
        return stream.end()

    def begin(self, name: str) -> TensorStream:
        """Start an entry that was not written yet; its bytes are appended to what this gives."""
        return TensorStream(self._file, name, *self._left.pop(name))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file:
            if kind is None:
                assert not self._left, f"not written: {sorted(self._left)}"
                disk.fsync(self._file)
