"""What MX does to one operand of a product, gathered over a text: by expert, channel and token.

Legend: E experts (1 of a dense block), R rows, C channels, K contraction axis of the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_
from hf_neuron_moe.formats.mx import fake_quantize_mx
from hf_neuron_moe.formats.padding import padded_size

MXFP8, MXFP4 = "e4m3fn", "e2m1"
"""Element formats of what ``mxfp8`` and ``mxfp4`` name; in the latter only weights have the second."""


def mx_values(values_RC: Tensor, axis: int, fmt: str = MXFP8, rule: str = "neuron") -> Tensor:
    """Return what a kernel's product sees of `values_RC`, blocks along `axis` (0 or 1), fp32 of the same shape.

    The values are rounded to bf16 and zero padded to a multiple of 128 along the axis first, as the kernels get them.
    """
    size = values_RC.shape[axis]
    missing = padded_size(size) - size
    padded = values_RC.detach().bfloat16().float()
    if missing:
        padded = F.pad(padded, (0, missing) if axis == 1 else (0, 0, 0, missing))
    padded = padded.contiguous()
    if padded.data_ptr() == values_RC.data_ptr():
        padded = padded.clone()
    if (fmt, rule) == (MXFP8, "neuron"):
        return fake_quantize_(padded, axis).narrow(axis, 0, size)
    return fake_quantize_mx(padded, axis, fmt=fmt, rule=rule).narrow(axis, 0, size)


@dataclass
class Operand:
    """Sums over what one operand of one product was; fp64 where many values are added."""

    amax_EC: Tensor
    signal_EC: Tensor  # sum of squares
    noise_EC: Tensor  # sum of squared differences from what the product sees
    flushed_E: Tensor  # values that are not zero and become it
    saturated_E: Tensor  # values beyond the largest code
    count_E: Tensor
    top_token: Tensor = field(default_factory=lambda: torch.tensor([-1], dtype=torch.int64))  # with the largest value

    @classmethod
    def empty(cls, experts: int, channels: int) -> Operand:
        """Return the sums over nothing."""
        wide = [torch.zeros(experts, channels, dtype=kind) for kind in (torch.float32, torch.float64, torch.float64)]
        narrow = [torch.zeros(experts, dtype=torch.float64) for _ in range(3)]
        return cls(*wide, *narrow)

    def add(self, expert: int, values_RC: Tensor, seen_RC: Tensor, token_R: Tensor | None = None) -> None:
        """Add rows of an expert; `seen_RC` is what the product sees of them, `token_R` their places in the text."""
        magnitude_RC = values_RC.abs()
        amax_C = magnitude_RC.amax(0)
        if token_R is not None and amax_C.max() > self.amax_EC.max():
            self.top_token[0] = token_R[magnitude_RC[:, amax_C.argmax()].argmax()]
        self.amax_EC[expert] = torch.maximum(self.amax_EC[expert], amax_C)
        self.signal_EC[expert] += magnitude_RC.square().sum(0)
        self.noise_EC[expert] += (values_RC - seen_RC).square_().sum(0)
        if amax_C.isfinite().all():  # zeros stay zeros, so that counting is enough, which is faster
            self.flushed_E[expert] += values_RC.count_nonzero() - seen_RC.count_nonzero()
        else:  # the scales leave headroom: only infinities get the largest code
            self.flushed_E[expert] += ((seen_RC == 0) & (values_RC != 0)).sum()
            self.saturated_E[expert] += (magnitude_RC.isinf() & seen_RC.isfinite()).sum()
        self.count_E[expert] += values_RC.numel()

    def figures(self) -> dict[str, Any]:
        """Return plain figures of all experts together."""
        signal, noise, count = (float(part.sum()) for part in (self.signal_EC, self.noise_EC, self.count_E))
        amax_C = self.amax_EC.amax(0)
        amax, median = float(amax_C.max()), float(amax_C.median())
        return {
            "sqnr_db": decibels(signal, noise),
            "flushed": float(self.flushed_E.sum()) / count if count else math.nan,
            "saturated": float(self.saturated_E.sum()) / count if count else math.nan,
            "amax": amax,
            "channel": int(amax_C.argmax()),
            "channels": [[int(place), float(amax_C[place])] for place in amax_C.topk(min(5, len(amax_C))).indices],
            "expert": int(self.amax_EC.amax(1).argmax()),
            "token": int(self.top_token),
            "channel_ratio": amax / median if median else math.nan,
        }

    def sqnr_by_expert(self) -> list[float]:
        """Return each expert's SQNR in dB; NaN of experts without values."""
        pairs = zip(self.signal_EC.sum(1).tolist(), self.noise_EC.sum(1).tolist(), strict=True)
        return [decibels(signal, noise) for signal, noise in pairs]


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``: infinite without noise, NaN without either."""
    if noise == 0:
        return math.inf if signal else math.nan
    return 10 * math.log10(signal / noise) if signal else -math.inf
