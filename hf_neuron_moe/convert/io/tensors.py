"""Reads single tensors, or single experts of them, from safetensors files that stay open; threads may share a reader.

Files are read, not mapped: a failing disk or a shrinking file is then an error with a name and no bus error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path

import torch

from hf_neuron_moe.convert.io.encoded import read_group_scales, read_values, value_chunks
from hf_neuron_moe.convert.io.source import TORCH_DTYPES, Encoding, SourceTensor, damaged, nbytes_of, read_header
from hf_neuron_moe.convert.transaction import disk

CHUNK_BYTES = 1 << 20  # Read at a time where they are only passed on: what fits a core's cache


class TensorReader:
    """Access to the tensors of a folder's files; the caller holds the memory of what it read.

    Tensors named in `encodings` are codes in the files: their values are read, as bf16.
    """

    def __init__(self, directory: Path, stack: ExitStack, encodings: Mapping[str, Encoding]) -> None:
        self._directory = directory
        self._stack = stack
        self._encodings = encodings
        self._files: dict[str, tuple[FileIO, dict[str, SourceTensor]]] = {}
        self._lock = threading.Lock()

    def read(
        self,
        file: str,
        name: str,
        expert: int | None = None,
        buffer: torch.Tensor | None = None,
        rows: slice | None = None,
    ) -> torch.Tensor:
        """Read a tensor; with an expert index, that entry of its first axis; with rows, these of its then first axis.

        `rows` is a range without step. `buffer` are bytes to read into, at least as many as are read: memory that was
        used before costs less than new. Values of codes do not use it.
        """
        if name in self._encodings:
            return read_values(self._read_stored, self._encodings[name], expert, rows)
        return self._read_plain(file, name, expert, buffer, rows)

    def read_scales(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Read the scale bytes of one matrix of MX codes, one per row and 32 columns."""
        return read_group_scales(self._read_stored, self._encodings[name], expert)

    def _read_stored(self, stored: SourceTensor, expert: int | None, rows: slice | None) -> torch.Tensor:
        """Read a tensor of codes or scales as it lies in its file."""
        found = self._find(stored.file, stored.name)[1]
        if (found.dtype, found.shape) != (stored.dtype, stored.shape):
            expected = f"{stored.dtype} of shape {list(stored.shape)}"
            raise damaged(f"{stored.file}: {stored.name}", expected, f"{found.dtype} of shape {list(found.shape)}")
        return self._read_plain(stored.file, stored.name, expert, None, rows)

    def _read_plain(
        self, file: str, name: str, expert: int | None, buffer: torch.Tensor | None, rows: slice | None
    ) -> torch.Tensor:
        handle, tensor = self._find(file, name)
        shape, start = tensor.shape, tensor.start
        if expert is not None:
            shape = tensor.shape[1:]
            start += expert * nbytes_of(tensor.dtype, shape)
        if rows is not None:
            start += rows.start * nbytes_of(tensor.dtype, shape[1:])
            shape = (rows.stop - rows.start, *shape[1:])
        nbytes = nbytes_of(tensor.dtype, shape)
        data = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        self._fill(handle, tensor, data, start)
        return data.view(TORCH_DTYPES[tensor.dtype]).view(shape)

    def chunks(self, file: str, name: str) -> Iterator[torch.Tensor]:
        """Read a tensor's bytes in parts of :data:`CHUNK_BYTES` at most; one is valid until the next is asked for.

        The values of codes come in parts of :data:`~hf_neuron_moe.convert.io.encoded.ROWS_BYTES`.
        """
        if name in self._encodings:
            for values in value_chunks(self._read_stored, self._encodings[name]):
                yield values.view(torch.uint8).flatten()
            return
        handle, tensor = self._find(file, name)
        buffer = torch.empty(min(CHUNK_BYTES, tensor.nbytes), dtype=torch.uint8)
        for position in range(0, tensor.nbytes, CHUNK_BYTES):
            part = buffer[: tensor.nbytes - position]
            self._fill(handle, tensor, part, tensor.start + position)
            yield part

    def _find(self, file: str, name: str) -> tuple[FileIO, SourceTensor]:
        with self._lock:
            if file not in self._files:
                path = self._directory / file
                header = read_header(path)[0]
                self._files[file] = (self._stack.enter_context(disk.open_to_read(path)), header)
            handle, header = self._files[file]
        if name not in header:
            raise damaged(f"{file}: {name}", "in the file", "a header without it")
        return handle, header[name]

    def _fill(self, handle: FileIO, tensor: SourceTensor, data: torch.Tensor, start: int) -> None:
        if disk.read_at(handle, data.numpy().data, start) < data.numel():
            expected = f"{tensor.nbytes} bytes long as the header says"
            raise damaged(f"{tensor.file}: {tensor.name}", expected, "a file that ends before them")


@contextmanager
def open_tensors(directory: Path, encodings: Mapping[str, Encoding] | None = None) -> Iterator[TensorReader]:
    """Open a folder's files as they are needed and close them at the end; `encodings` say which tensors are codes."""
    with ExitStack() as stack:
        yield TensorReader(directory, stack, encodings or {})
