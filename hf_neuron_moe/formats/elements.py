"""Element codes: scaled fp32 values to bytes and back."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_neuron_moe.formats.constants import E2M1_VALUES, ElementFormat


def encode_(scaled: Tensor, fmt: ElementFormat) -> Tensor:
    """Round scaled values to element codes: clip to the largest finite value, then nearest, ties to even.

    Args:
        scaled: fp32, overwritten. NaN stays NaN in the fp8 formats and becomes code 0 in E2M1 (whose callers put the
            NaN in the block's scale).
        fmt: element format.

    Returns:
        uint8 codes of the same shape; E2M1 codes are 0 to 15.
    """
    # torch's e5m2 cast overflows to infinity and older e4m3 casts to NaN: the clip makes both saturate.
    clipped = scaled.clamp_(-fmt.max, fmt.max)
    if fmt.dtype is not None:
        return clipped.to(fmt.dtype).view(torch.uint8)
    sign = torch.signbit(clipped).to(torch.uint8) << (fmt.code_bits - 1)
    magnitude = clipped.nan_to_num_(nan=0.0).abs_()
    # Steps are 1/2 below 2, 1 below 4 and 2 above, and torch.round is to even: equal to even codes in each range.
    code = torch.where(
        magnitude < 2,
        (magnitude * 2).round_(),
        torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round_() + 4),
    )
    return code.to(torch.uint8) | sign


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the fp32 values of element codes.

    Args:
        codes: uint8, any shape. E2M1 reads the low four bits.
        fmt: element format.

    Returns:
        fp32 of the same shape, exact; NaN and infinity codes as the format defines them.
    """
    index = codes & 0xF if fmt.dtype is None else codes
    table = decode_table(fmt, codes.device)
    # One gather from a small table: several times faster than torch's own e4m3 to fp32 conversion on CPUs.
    return table.index_select(0, index.flatten().to(torch.int32)).view(codes.shape)


@lru_cache(maxsize=16)
def decode_table(fmt: ElementFormat, device: torch.device) -> Tensor:
    """Return the fp32 value of every code of a format, ``[2**code_bits]``. Shared: do not write to it."""
    if fmt.dtype is None:
        positive = torch.tensor(E2M1_VALUES, device=device)
        return torch.cat([positive, -positive])
    return torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype).to(torch.float32)
