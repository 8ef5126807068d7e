"""How a kernel is launched: its tile sizes, which are data, and its grid, whose size depends on shapes alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.triton.device_functions import INTERPRETED
from hf_neuron_moe.errors import DeviceError, DTypeError

Tiles = Mapping[str, int]
"""Keyword arguments of a kernel: tile sizes, ``num_warps`` and ``num_stages``."""


@functools.cache
def candidates(kernel: str) -> list[dict[str, int]]:
    """Return the rows of a kernel in ``tile_sizes.json``."""
    table = json.loads(Path(__file__).with_name("tile_sizes.json").read_text(encoding="utf-8"))
    rows: list[dict[str, int]] = table[kernel]
    return rows


def tile_sizes(kernel: str, rows: int = 0, groups: int = 1) -> Tiles:
    """Return the first row without ``rows``, or whose ``rows`` are at least the average rows per group.

    Shapes alone decide: nothing is measured or asked of the device while a model runs.
    """
    chosen = next(row for row in candidates(kernel) if rows <= row.get("rows", rows) * max(groups, 1))
    return {name: value for name, value in chosen.items() if name != "rows"}


def launch(kernel: Any, grid: tuple[int, ...], anchor: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run `kernel` on the device of `anchor`. Nothing waits for it, and an empty grid is no error."""
    if 0 in grid:
        return
    if not anchor.is_cuda and not INTERPRETED.value:
        fix = "Set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter."
        raise DeviceError.about("the Triton kernels' tensors", "on a CUDA device", str(anchor.device), fix)
    with torch.cuda.device(anchor.device) if anchor.is_cuda else nullcontext():
        kernel[grid](*arguments, **constants)


def as_bits(tensor: Tensor | None, argument: str) -> Tensor | None:
    """Return fp32 as it is and bf16 as int16, as the kernels read and write them; None stays."""
    if tensor is None or tensor.dtype == torch.float32:
        return tensor
    if tensor.dtype != torch.bfloat16:
        raise DTypeError.about(argument, "float32 or bfloat16", tensor.dtype, "Cast it first.")
    return tensor.view(torch.int16)
