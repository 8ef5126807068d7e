"""Groups of rows that the tests of all Triton kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

ENDS = {
    "one group": [21],
    "one has everything": [0, 0, 37, 37],
    "some are empty": [0, 5, 5, 18, 34, 34],
    "rows after the last": [3, 20],
    "no rows": [0, 0, 0],
    "512 groups": [*[number // 20 for number in range(500)], *[40] * 12],
}
"""End rows of each group, which tiles of 16 and blocks of 32 do not divide."""
LONG = {"long groups": [0, 150, 150, 700]}
"""With rows in every lane of a tile of 512 and in tiles after it."""
AFTER = {"long groups": 4, "rows after the last": 9}


def ends_and_rows(name: str) -> tuple[Tensor, int]:
    """Return the end rows, int32, and the number of rows."""
    ends = (ENDS | LONG)[name]
    return torch.tensor(ends, dtype=torch.int32), ends[-1] + AFTER.get(name, 0)


def runs(name: str) -> list[tuple[int, int, int]]:
    """Return each group, its first and its end row."""
    ends = (ENDS | LONG)[name]
    return list(zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True))


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Return fp32 values of all magnitudes, with zeros of both signs, denormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    exponents = torch.randint(-140, 120, (shape[0], 1), generator=generator)
    values *= torch.exp2((exponents + torch.randint(-8, 8, shape, generator=generator)).float())
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -float("nan"), 0.0, -0.0, 2.0**-149, 1e-40])
    flat = values.view(-1)
    flat[torch.randperm(len(flat), generator=generator)[: len(flat) // 50]] = special[
        torch.randint(0, len(special), (len(flat) // 50,), generator=generator)
    ]
    if len(values) > 3:
        values[1], values[2], values[3] = 0.0, -0.0, 126.13
    return values


def small_integers(*shape: int, seed: int = 0) -> Tensor:
    """Return bf16 values whose products have exact fp32 sums, in whatever order these are made."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)
