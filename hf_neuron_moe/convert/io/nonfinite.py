"""NaN and infinity in a source: found by their bits, reported by file, tensor and place."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from hf_neuron_moe.errors import SourceDamageError

CHUNK_ELEMENTS = 1 << 19  # Elements looked at together: what fits a core's cache

_EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}
"""Integers of the same width, and the bits of infinity: anything above it in magnitude is NaN."""


class Place(NamedTuple):
    """Where a matrix of values lies in its tensor."""

    expert: int | None  # Index on the first of three axes; None for a tensor without it
    rows: slice
    columns: slice

    def of(self, row: int, column: int) -> list[int]:
        """Indices in the tensor of a value, given its indices in the matrix."""
        own = [part.start + at * (part.step or 1) for part, at in ((self.rows, row), (self.columns, column))]
        return own if self.expert is None else [self.expert, *own]


def check_or_count(
    values: torch.Tensor, on_nonfinite: str, counts: Counter[str], *, file: str, name: str, at: Place | None = None
) -> None:
    """Refuse NaN and infinity with ``"error"``; with ``"keep"`` add their number to that of tensor `name`.

    With `at`, the error names the first one's place in the tensor.
    """
    bad = count_nonfinite(values)
    if bad and on_nonfinite == "error":
        got = f"{bad:,} NaN or infinite ones"
        if at is not None:
            row, column = (~values.isfinite()).nonzero()[0].tolist()
            got += f", the first at {at.of(row, column)}"
        fix = "Repair the checkpoint, or convert it as it is with --on-nonfinite keep."
        raise SourceDamageError.about(f"{file}: {name}", "of finite values", got, fix)
    counts[name] += bad


def count_nonfinite(values: torch.Tensor) -> int:
    """Count NaN and infinite values; dtypes without infinity and NaN have none."""
    if values.dtype not in _EXPONENTS or values.numel() == 0:
        return 0
    integers, infinity = _EXPONENTS[values.dtype]
    if values.ndim < 2 or values.is_contiguous():
        chunks = values.reshape(-1).split(CHUNK_ELEMENTS)
    else:  # nothing is copied where rows are contiguous
        chunks = values.split(max(1, CHUNK_ELEMENTS // values[0].numel()))
    bad = 0
    for chunk in chunks:
        # Shifting the sign out is one operation on integers; isfinite takes several and a mask as large as the values.
        magnitude = chunk.view(integers) & torch.iinfo(integers).max
        if int(magnitude.max()) >= infinity:
            bad += int(torch.count_nonzero(~chunk.isfinite()))
    return bad
