"""Weights that exist as MX codes and scales only, and how a part of one becomes fp32 values: never requantized.

Letters: F free axis, K contraction axis of the forward matmul, E experts, H hidden, I intermediate, t tiles of 512.

============ ===================================== ==========================================================
arrangement  codes of one matrix                   scales
============ ===================================== ==========================================================
natural      ``[F, K]``                            compact ``[K/32, F]``
swizzled     ``[K/4, 4F]``                         compact, oversized or packed ``[rows, F]``
words        :mod:`hf_neuron_moe.formats.moe_mx`:  compact (``[16, 2, t, I]``, ``[pI/8, t, H]``) or packed
             gate_up ``[128, 2, t, I]``,           (``[128, ceil(t/4), 2, I]``, ``[128, ceil(t/4), H]``)
             down ``[pI, t, H]``
============ ===================================== ==========================================================

Experts put their axis in front. Without a gate projection gate_up is up alone, with 1 for the 2. Scales are held
compact whatever they were stored as (:func:`held_form`). The scheme says which K values share a scale; it, too, is
recorded and never guessed from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.errors import not_one_of, public
from hf_neuron_moe.formats.constants import LANES, MX_BLOCK, PATCH_ROWS, SwizzleScheme, element_format
from hf_neuron_moe.formats.moe_mx import HIDDEN_SCHEME, TILE, unpack_moe_scales
from hf_neuron_moe.formats.mx import dequantize_mx_natural
from hf_neuron_moe.formats.scales import ScaleLayout, to_compact
from hf_neuron_moe.formats.swizzle import tile_segments, unpack_x4, unswizzle

NATURAL, SWIZZLED, WORDS = "natural", "swizzled", "words"
PERMUTED = "permuted"
_KNOWN = {
    "arrangement": (NATURAL, SWIZZLED, WORDS),
    # In which the kernels quantize activations, so that both operands of a matmul form the same blocks.
    "scheme": (SwizzleScheme.WRAPX, SwizzleScheme.WRAPX_SINGLE, SwizzleScheme.ONE_TILE),
    "scales": tuple(ScaleLayout),
    "order": (NATURAL, PERMUTED),
}
_COLUMN_TILE = 2048  # of the down projection's K brought to fp32 at a time: a multiple of every scheme's largest tile


@dataclass(frozen=True)
class MXLayout:
    """How the codes and scales of one projection are stored."""

    fmt: str = "e4m3fn"  # element format, "e4m3fn", "e5m2" or "e2m1"
    arrangement: str = NATURAL  # "natural", "swizzled" (both one code per byte) or "words"
    scheme: str = SwizzleScheme.WRAPX.value  # which K values share a block
    scales: str = ScaleLayout.COMPACT.value  # "compact", "oversized" or "packed"
    order: str = NATURAL  # of H in gate_up and of I in words; "permuted": by :func:`~.formats.moe_mx.to_groups`

    @public("MXLayout")
    def __post_init__(self) -> None:
        element_format(self.fmt)
        for name, allowed in _KNOWN.items():
            if getattr(self, name) not in allowed:
                raise not_one_of(name, getattr(self, name), allowed)

    @property
    def key(self) -> str:
        """The layout as one string, for operators; :meth:`from_key` is the inverse."""
        return ":".join(astuple(self))

    @classmethod
    def from_key(cls, key: str) -> MXLayout:
        """Return the layout that :attr:`key` named."""
        return cls(*key.split(":"))

    def matrix_shape(self, codes: Sequence[int]) -> tuple[int, int]:
        """Return ``(F, K)`` of a matrix whose codes have the shape `codes`, an experts' axis in front or not."""
        if self.arrangement == NATURAL:
            return codes[-2], codes[-1]
        if self.arrangement == SWIZZLED:
            return codes[-1] // LANES, LANES * codes[-2]
        if self.scheme == HIDDEN_SCHEME:
            *_, partitions, halves, tiles, inner = codes
            return halves * inner, LANES * partitions * tiles
        *_, partitions, tiles, hidden = codes
        return hidden, LANES * partitions * tiles


@dataclass(frozen=True)
class MXMatrix:
    """One projection ``[F, K]`` as codes and scales, both arranged as `layout` says."""

    codes: Tensor  # uint8, or x4 words in their integer carrier
    scales: Tensor  # uint8, compact
    layout: MXLayout

    @property
    def shape(self) -> tuple[int, int]:
        """``(F, K)``, the zeros included that the arrangement adds."""
        return self.layout.matrix_shape(self.codes.shape)

    @public("MXMatrix")
    def values(self, rows: slice, columns: slice, out_FK: Tensor) -> Tensor:
        """Write the values of a part into fp32 `out_FK`, which has its shape, and return it.

        `rows` are part of F; of a gate_up in words, of either the gate or up. `columns` start and end at borders of
        contraction tiles (:func:`column_tiles`).
        """
        fmt, scheme = element_format(self.layout.fmt), self.layout.scheme
        if self.layout.arrangement == WORDS:
            codes_FK, scales_BF = self._words(rows, columns)
        else:
            scales_BF = self.scales[columns.start // MX_BLOCK : columns.stop // MX_BLOCK, rows]
            if self.layout.arrangement == NATURAL:
                codes_FK = self.codes[rows, columns]
            else:
                lanes = slice(LANES * rows.start, LANES * rows.stop)
                codes_FK = unswizzle(self.codes[columns.start // LANES : columns.stop // LANES, lanes], scheme)
        return dequantize_mx_natural(codes_FK, scales_BF, fmt=fmt, scheme=scheme, out_FK=out_FK)

    def _words(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        words, scales = self.codes, self.scales
        tiles = words.shape[-2]
        if words.ndim == 4:
            half, inner = divmod(rows.start, words.shape[-1])
            rows = slice(inner, inner + rows.stop - rows.start)
            words, scales = words[:, half], scales[:, half]
        whole = columns.stop - columns.start == self.shape[1]
        part = slice(0, tiles) if whole else slice(columns.start // TILE, columns.stop // TILE)
        words_PF, scales_BF = (tensor[:, part, rows].transpose(0, 1).flatten(0, 1) for tensor in (words, scales))
        return unswizzle(unpack_x4(words_PF, self.layout.fmt), self.layout.scheme), scales_BF


@dataclass(frozen=True)
class MXExpertStack:
    """The projections of E experts, with an axis E in front, or of one network, as :class:`MXMatrix` has them.

    Gate and up are the rows of one ``[2I, H]``, gate first; up alone is ``[I, H]``. Down is ``[H, I]``; its K may be
    larger, zeros at the end. Biases are float tensors without a gradient, as long as the projections with their
    padding. With permuted words the layer's input has H in their order, and gate_up's bias I; the output and down's
    bias are in natural order.
    """

    gate_up_codes: Tensor
    gate_up_scales: Tensor
    down_codes: Tensor
    down_scales: Tensor
    gate_up_layout: MXLayout
    down_layout: MXLayout
    gate: Gate = SWIGLU
    gate_up_bias: Tensor | None = None  # ``[E, 2I]`` or ``[2I]``, gate first
    down_bias: Tensor | None = None  # ``[E, H]`` or ``[H]``

    @property
    def hidden(self) -> int:
        """H, padding included."""
        return self.gate_up.shape[1]

    @property
    def inner(self) -> int:
        """I, padding included."""
        return self.gate_up.shape[0] // self.gate.halves

    @property
    def gate_up(self) -> MXMatrix:
        """Gate and up, or up alone; of experts only its shape is one of a matrix."""
        return MXMatrix(self.gate_up_codes, self.gate_up_scales, self.gate_up_layout)

    @property
    def down(self) -> MXMatrix:
        """Down, likewise."""
        return MXMatrix(self.down_codes, self.down_scales, self.down_layout)

    def expert(self, number: int | None) -> MXExpertStack:
        """Return one expert's network; None for a dense MLP."""
        if number is None:
            return self
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value[number] for name, value in tensors.items()})


def column_tiles(down: MXMatrix) -> list[slice]:
    """Cut the contraction axis of a down projection where none of its blocks is cut."""
    K = down.shape[1]
    step = K if _COLUMN_TILE % tile_segments(K, down.layout.scheme)[0].tile else _COLUMN_TILE
    return [slice(start, min(start + step, K)) for start in range(0, K, step)]


def held_form(codes: Tensor, scales: Tensor, layout: MXLayout) -> tuple[Tensor, Tensor, MXLayout]:
    """Return stored codes and scales, of a file's dtypes, as a module holds them, and the layout that describes these.

    The bits stay the same. Codes are viewed as uint8, words as the signed integer of their width: floating-point codes
    would be cast by ``module.to(dtype)``, and torch has few operators for unsigned words. Scales become compact: packed
    ones of a small K are mostly holes, and oversized ones are eight times as many as there are blocks.
    """
    signed = {torch.uint32: torch.int32, torch.uint16: torch.int16, torch.int32: torch.int32, torch.int16: torch.int16}
    codes, scales = codes.view(signed.get(codes.dtype, torch.uint8)), scales.view(torch.uint8)
    if layout.scales == ScaleLayout.COMPACT:
        return codes, scales, layout
    if layout.arrangement == WORDS:
        compact = unpack_moe_scales(scales, codes.shape[-2], codes.shape[1] // PATCH_ROWS).contiguous()
    else:
        compact = to_compact(scales, layout.matrix_shape(codes.shape)[1])
    return codes, compact, replace(layout, scales=ScaleLayout.COMPACT.value)
