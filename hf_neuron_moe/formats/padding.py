"""Padding of the model's sizes to what the kernels accept, and what it costs.

Zero padding is exact: a padded column of hidden size H meets a zero in the weight, a padded row of intermediate size I
produces silu(0) * 0 = 0.
"""

from __future__ import annotations

LANES = 128
"""H and I are multiples of this in the kernels: the tensor engine's partitions (nki-library ``mlp_bwd_mxfp8``)."""


def padded_size(size: int) -> int:
    """Return the smallest multiple of 128 that is at least `size`."""
    return -(-size // LANES) * LANES


def overhead_percent(hidden: int, intermediate: int, padded: tuple[int, int] | None = None) -> float:
    """Return the extra multiply-adds of padding to `padded` H and I (multiples of 128 if None), in percent.

    Every matmul of a SwiGLU block has both axes, so its cost grows with their product.
    """
    H, I = padded or (padded_size(hidden), padded_size(intermediate))  # noqa: E741
    return 100.0 * (H * I / (hidden * intermediate) - 1.0)
