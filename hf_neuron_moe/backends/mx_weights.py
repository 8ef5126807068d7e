"""Weights that exist as MX codes and scales only, and how a part of one becomes fp32 values: never requantised.

Letters: F free axis, K contraction axis of the forward matmul, P = K/4, B = K/32 blocks, E experts.

============ ========================== =====================================================
arrangement  codes of one matrix        scales
============ ========================== =====================================================
natural      ``[F, K]``                 compact ``[K/32, F]``
swizzled     ``[K/4, 4F]``              compact, oversized or packed ``[rows, F]``
============ ========================== =====================================================

Experts put their axis in front of both. Which K values share a scale is the scheme's matter; it, too, is recorded and
never guessed from shapes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, refuse
from hf_neuron_moe.formats.constants import LANES, MX_BLOCK, ElementFormat, SwizzleScheme, element_format
from hf_neuron_moe.formats.mx import dequantize_mx_natural
from hf_neuron_moe.formats.scales import ScaleLayout, scale_row_count, scale_rows
from hf_neuron_moe.formats.swizzle import tile_segments, unswizzle

NATURAL, SWIZZLED = "natural", "swizzled"
ARRANGEMENTS = (NATURAL, SWIZZLED)
SCHEMES = (SwizzleScheme.WRAPX, SwizzleScheme.WRAPX_SINGLE, SwizzleScheme.ONE_TILE)
"""Schemes in which the kernels quantise activations, so that both operands of a matmul form the same blocks."""

COLUMN_TILE = 2048
"""Contraction elements of the down projection brought to fp32 at a time; a multiple of every scheme's largest tile."""


@dataclass(frozen=True)
class MXLayout:
    """How the codes and scales of one projection are stored.

    Attributes:
        fmt: element format, ``"e4m3fn"``, ``"e5m2"`` or ``"e2m1"`` (one code per byte).
        arrangement: ``"natural"`` or ``"swizzled"``.
        scheme: which K values share a block, see :class:`~hf_neuron_moe.formats.constants.SwizzleScheme`.
        scales: ``"compact"``, ``"oversized"`` or ``"packed"``.
    """

    fmt: str = "e4m3fn"
    arrangement: str = NATURAL
    scheme: str = SwizzleScheme.WRAPX.value
    scales: str = ScaleLayout.COMPACT.value

    def __post_init__(self) -> None:
        element_format(self.fmt, where="MXLayout")
        known = {
            "arrangement": list(ARRANGEMENTS),
            "scheme": [scheme.value for scheme in SCHEMES],
            "scales": [layout.value for layout in ScaleLayout],
        }
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise refuse(
                    ConfigError,
                    where="MXLayout",
                    argument=name,
                    expected=f"one of {', '.join(allowed)}",
                    got=repr(getattr(self, name)),
                    remedy="Choose one of these.",
                )

    @property
    def key(self) -> str:
        """The layout as one string, for operators; :meth:`from_key` is the inverse."""
        return ":".join(astuple(self))

    @classmethod
    def from_key(cls, key: str) -> MXLayout:
        """Return the layout that :attr:`key` named."""
        return cls(*key.split(":"))

    def shapes(self, F: int, K: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of one matrix's codes and scales."""
        codes = (F, K) if self.arrangement == NATURAL else (K // LANES, LANES * F)
        return codes, (scale_row_count(K, self.scales), F)


@dataclass(frozen=True)
class MXMatrix:
    """One projection ``[F, K]`` as codes and scales.

    Attributes:
        codes: uint8, as `layout` arranges them.
        scales: uint8.
        layout: arrangement of both.
        shape: ``(F, K)``.
    """

    codes: Tensor
    scales: Tensor
    layout: MXLayout
    shape: tuple[int, int]

    @property
    def fmt(self) -> ElementFormat:
        """Element format of the codes."""
        return element_format(self.layout.fmt, where="MXMatrix")

    def values(self, rows: slice, columns: slice, out_FK: Tensor) -> Tensor:
        """Write the values of a part into fp32 `out_FK` and return it.

        Args:
            rows: part of F.
            columns: part of K that starts and ends at borders of contraction tiles (:func:`column_tiles`).
            out_FK: fp32, of the part's shape.
        """
        first, last = columns.start // MX_BLOCK, columns.stop // MX_BLOCK
        if self.layout.arrangement == NATURAL:
            codes_FK = self.codes[rows, columns]
        else:
            part = self.codes[columns.start // LANES : columns.stop // LANES, LANES * rows.start : LANES * rows.stop]
            codes_FK = unswizzle(part, self.layout.scheme)
        if self.layout.scales == ScaleLayout.COMPACT:
            scales_BF = self.scales[first:last, rows]
        else:
            held = scale_rows(self.shape[1], self.layout.scales, self.scales.device)
            scales_BF = self.scales[:, rows].index_select(0, held[first:last])
        return dequantize_mx_natural(codes_FK, scales_BF, fmt=self.fmt, scheme=self.layout.scheme, out_FK=out_FK)


@dataclass(frozen=True)
class MXProjections:
    """Gate and up (the rows of one ``[2I, H]``, gate first) and down ``[H, I]`` of one network."""

    gate_up: MXMatrix
    down: MXMatrix


@dataclass(frozen=True)
class MXExpertStack:
    """The projections of E experts, or of a dense MLP, whose tensors have no experts' axis.

    Attributes:
        gate_up_codes, gate_up_scales, down_codes, down_scales: uint8, `E` in front where there are experts.
        gate_up_layout, down_layout: how they are stored.
        hidden: H.
        inner: I.
    """

    gate_up_codes: Tensor
    gate_up_scales: Tensor
    down_codes: Tensor
    down_scales: Tensor
    gate_up_layout: MXLayout
    down_layout: MXLayout
    hidden: int
    inner: int

    def expert(self, number: int | None) -> MXProjections:
        """Return one expert's projections; None for a dense MLP."""
        tensors = (self.gate_up_codes, self.gate_up_scales, self.down_codes, self.down_scales)
        gate_up, gate_up_scales, down, down_scales = (t if number is None else t[number] for t in tensors)
        return MXProjections(
            MXMatrix(gate_up, gate_up_scales, self.gate_up_layout, (2 * self.inner, self.hidden)),
            MXMatrix(down, down_scales, self.down_layout, (self.hidden, self.inner)),
        )


def column_tiles(inner: int, scheme: str) -> list[slice]:
    """Cut the intermediate axis where no block of the down projection is cut."""
    segments = tile_segments(inner, scheme)
    if segments[0].tile > COLUMN_TILE or COLUMN_TILE % segments[0].tile:
        return [slice(0, inner)]
    return [slice(start, min(start + COLUMN_TILE, inner)) for start in range(0, inner, COLUMN_TILE)]


def as_bytes(tensor: Tensor) -> Tensor:
    """View codes or scales of a one-byte dtype as uint8."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
