"""Reads single tensors, or single experts of them, from safetensors files that stay open and mapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class TensorReader:
    """Access to the tensors of a folder's files; at most one tensor's memory is held by the caller."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._files: dict[str, Any] = {}

    def read(self, file: str, name: str, expert: int | None = None) -> torch.Tensor:
        """Read a tensor; with an expert index, that entry of its first axis."""
        if file not in self._files:
            path = self._directory / file
            self._files[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        handle = self._files[file]
        return handle.get_tensor(name) if expert is None else handle.get_slice(name)[expert]


@contextmanager
def open_tensors(directory: Path) -> Iterator[TensorReader]:
    """Open a folder's files as they are needed and close them at the end."""
    with ExitStack() as stack:
        yield TensorReader(directory, stack)
