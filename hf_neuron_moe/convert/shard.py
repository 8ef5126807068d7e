"""Writes one safetensors file tensor by tensor: the header first, since names, dtypes and shapes are known before."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from hf_neuron_moe.convert.commit import sync
from hf_neuron_moe.convert.source import ITEM_BYTES, nbytes_of

_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(ITEM_BYTES)}


class Entry(NamedTuple):
    """Name, safetensors dtype and shape of one tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ShardWriter:
    """A safetensors file being written; a context manager that leaves it complete and synced, or raises.

    Data are ordered by dtype, widest first, then by name, as the safetensors library orders them: it keeps every tensor
    aligned, and the same tensors and metadata give the same bytes. Tensors may be written in any order.
    """

    def __init__(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
        self._left: dict[str, tuple[int, Entry]] = {}
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        for entry in sorted(entries, key=lambda entry: (-_DTYPE_RANK[entry.dtype], entry.name)):
            end = position + nbytes_of(entry.dtype, entry.shape)
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [position, end]}
            self._left[entry.name] = (position, entry)
            position = end
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._data_start = 8 + len(raw)
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(raw)) + raw)

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write one tensor's bytes and return their SHA-256.

        Args:
            name: an entry that was not written yet.
            tensor: contiguous, with the entry's number of bytes.
        """
        position, entry = self._left.pop(name)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert data.nbytes == nbytes_of(entry.dtype, entry.shape), f"{name}: wrong size"
        self._file.seek(self._data_start + position)
        self._file.write(data)
        return hashlib.sha256(data).hexdigest()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._left, f"not written: {sorted(self._left)}"
                sync(self._file)
        finally:
            self._file.close()
