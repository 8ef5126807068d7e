"""Activations saved for the backward: in the compute dtype, or in FP8 with one bf16 scale per group.

Legend: R rows, I intermediate, H hidden, G groups of a row.

The FP8 form is COAT's ("Compressing Optimizer States and Activation for Memory-Efficient FP8 Training", ICLR 2025):
e4m3 codes, ``value = code * scale``. Groups have 64 elements, where COAT has 16, so that the scales cost 3 % instead of
12 %; the last group of a row may be shorter. Values at or beyond a limit have a code of their own. Rounding would move
half of the values near a limit to its other side, and their gradients would come or go.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import Gating, Limits, clip_
from hf_neuron_moe.formats.constants import E4M3FN
from hf_neuron_moe.formats.elements import round_to_fp8_
from hf_neuron_moe.formats.group_fp8 import SCALE_EPSILON, group_dequantize_fp8, group_quantize_fp8

GROUP = 64  # elements that share a scale
_AT_LIMIT = (0x7F, 0xFF)  # codes of what is at or beyond the upper and the lower limit; e4m3 has them for NaN


@dataclass(frozen=True)
class FP8Rows:
    """A ``[R, I]`` activation in FP8: e4m3 codes as uint8 ``[R, I]`` and scales bf16 ``[R, G]``.

    Bytes, because few of torch's own operations know the FP8 dtypes.
    """

    codes: Tensor
    scales: Tensor
    limits: Limits = (None, None)
    """Upper and lower limit of the values. Those at or beyond one are stored as a code of their own, so that a mask
    read from what is taken is that of the values that were put."""
    exact: bool = False
    """Whether that is so of the values themselves (fp32), and not as they are rounded to bf16."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, start: int, end: int) -> FP8Rows:
        return replace(self, codes=self.codes[start:end], scales=self.scales[start:end])

    def columns(self, part: slice) -> FP8Rows:
        """Return views of the columns of `part`, which starts at a whole group."""
        return replace(self, codes=self.codes[:, part], scales=self.scales[:, _groups(part)])

    def put(self, rows: slice, columns: slice, values: Tensor) -> Tensor:
        """Save a tile that starts at a whole group; return its values rounded to bf16, which is what is quantized."""
        rounded = values.to(torch.bfloat16)
        if not rounded.numel():
            return rounded
        stored = clip_(rounded.clone(), self.limits) if self.limited else rounded
        padded, scales = group_quantize_fp8(_whole_groups(stored), GROUP)
        codes = padded.view(torch.uint8)[:, : rounded.shape[1]]
        for limit, code, beyond in zip(self.limits, _AT_LIMIT, (torch.ge, torch.le), strict=True):
            if limit is not None:
                codes = codes.masked_fill(beyond(values if self.exact else rounded.float(), limit), code)
        self.codes[rows, columns] = codes
        self.scales[rows, _groups(columns)] = scales
        return rounded

    def take(self, rows: slice, columns: slice) -> Tensor:
        """Return a tile that starts at a whole group, fp32: what was at or beyond a limit is the limit."""
        codes, scales = self.codes[rows, columns], self.scales[rows, _groups(columns)]
        if not codes.numel():
            return codes.to(torch.float32)
        padded = _whole_groups(codes).contiguous().view(torch.float8_e4m3fn)
        values = group_dequantize_fp8(padded, scales)[:, : codes.shape[1]]
        return self._within_limits(values, codes, scales) if self.limited else values

    @property
    def limited(self) -> bool:
        return self.limits != (None, None)

    def _within_limits(self, values: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Put the limits where their codes are, and nothing else on or beyond them."""
        inside = tuple(_next_to(limit, away) for limit, away in zip(self.limits, (-math.inf, math.inf), strict=True))
        values = clip_(values, (inside[0], inside[1]))
        # A group with a NaN or an infinity has no usable scale, and is NaN throughout.
        usable = scales.isfinite().repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
        for limit, code in zip(self.limits, _AT_LIMIT, strict=True):
            if limit is not None:
                values = values.masked_fill((codes == code) & usable, limit)
        return values


@functools.cache
def _next_to(limit: float | None, towards: float) -> float | None:
    """Return the float32 next to `limit`."""
    if limit is None:
        return None
    return float(torch.tensor(limit, dtype=torch.float32).nextafter(torch.tensor(towards)))


class StoredRows(Protocol):
    """A ``[R, I]`` activation in another form than a matrix, brought back tile by tile."""

    @property
    def shape(self) -> torch.Size: ...

    def rows(self, start: int, end: int) -> StoredRows: ...

    def take(self, rows: slice, columns: slice) -> Tensor:
        """Return a tile in fp32, valid until the next call."""


SavedRows = Tensor | StoredRows  # a saved activation ``[R, I]``


def fp8_storage(anchor: Tensor, leading: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes ``[*leading, columns]`` and scales ``[*leading, G]`` where `anchor` is."""
    codes = anchor.new_empty((*leading, columns), dtype=torch.uint8)
    return codes, anchor.new_empty((*leading, -(-columns // GROUP)), dtype=torch.bfloat16)


def put_tile(kept: SavedRows, rows: slice, columns: slice, values: Tensor) -> Tensor:
    """Save a tile; return it as it was rounded."""
    if isinstance(kept, FP8Rows):
        return kept.put(rows, columns, values)
    assert isinstance(kept, Tensor), "only matrices and FP8 rows are written tile by tile"
    return kept[rows, columns].copy_(values)


def take_tile(kept: SavedRows, rows: slice, columns: slice) -> Tensor:
    """Return a saved tile, in fp32 from another form than a matrix."""
    return kept[rows, columns] if isinstance(kept, Tensor) else kept.take(rows, columns)


class FP8Gating(Gating):
    """The SwiGLU product's backward as COAT computes it from FP8 activations.

    With ``v1`` the activation (COAT's is SiLU) of the kept gate, itself quantized in groups, ``v2`` the kept up and g
    the product's gradient: ``y1 = bf16(g * v2)`` towards the activation, ``y2 = bf16(g * v1)`` towards up,
    ``bf16(y1 * act'(gate))`` towards the gate: ``fp8_silu_forward``, ``fp8_mul_backward`` and ``fp8_silu_backward`` in
    one pass over a tile.
    """

    rounds_itself = True

    def product(self, gate: Tensor, up_value: Tensor, out: Tensor, act: Tensor) -> Tensor:
        """Write ``v1`` into `act` and ``v1 * v2`` into `out`; return `out`. Without a gate, act(up) into both."""
        if self.skip_gate:
            return super().product(gate, up_value, out, act)
        return torch.mul(_round_groups_(self.activation(gate, out=act)), up_value, out=out)

    def slope(self, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Write ``bf16(factor) * act'(values)`` into `out`."""
        return super().slope(values, factor.copy_(factor.to(torch.bfloat16)), out)


def _round_groups_(values_RI: Tensor) -> Tensor:
    """Round fp32 `values_RI` to group FP8 in place as ``fp8_silu_forward`` does: divided by the unrounded scale."""
    groups_RGQ = _whole_groups(values_RI).unflatten(1, (-1, GROUP))
    largest = torch.full_like(values_RI[:1, :1], E4M3FN.max)
    scale_RG1 = groups_RGQ.abs().amax(-1, keepdim=True).add_(SCALE_EPSILON).div_(largest)
    codes = round_to_fp8_(groups_RGQ / scale_RG1, E4M3FN)
    rounded = codes.to(torch.float32).mul_(scale_RG1.to(torch.bfloat16).to(torch.float32))
    return values_RI.copy_(rounded.flatten(1)[:, : values_RI.shape[1]])


def _whole_groups(values_RI: Tensor) -> Tensor:
    """Pad the last group of each row with zeros."""
    missing = -values_RI.shape[1] % GROUP
    return F.pad(values_RI, (0, missing)) if missing else values_RI


def _groups(columns: slice) -> slice:
    return slice(columns.start // GROUP, -(-columns.stop // GROUP))
