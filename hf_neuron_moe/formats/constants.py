"""Facts of the number formats, each with its source.

Sources:
    OCP MX v1.0: "OCP Microscaling Formats (MX) Specification", version 1.0.
    OCP FP8: "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0.
    NKI: public documentation of ``nki.isa.quantize_mx`` and ``nki.isa.nc_matmul_mx`` (Neuron SDK 2.32).
    nki-library 2.31: ``mlp_fwd_mxfp8`` / ``mlp_bwd_mxfp8`` and their test helpers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from hf_neuron_moe.errors import not_one_of

MX_BLOCK = 32  # elements that share one scale byte (OCP MX v1.0, section 5.1)
PATCH_ROWS = 8  # rows of the swizzled tensor in one block (NKI: 8 partitions share a scale)
LANES = 4  # columns of the swizzled tensor in one block; also the elements of one x4 word (NKI: ``*_x4`` dtypes)
TILE_SIZES = (512, 256, 128)  # k tile sizes of the wrapX swizzle, largest first (nki-library 2.31 swizzle helper)
E8M0_BIAS = 127  # a scale byte b means 2**(b - 127) (OCP MX v1.0, section 5.4.1)
E8M0_NAN = 255  # the only E8M0 byte that is not a power of two (OCP MX v1.0, section 5.4.1)
PACKED_SLAB_ROWS = 128  # rows of one slab of the packed scale layout: all partitions of the array (nki-library 2.31)
PACKED_SLAB_K = 2048  # contraction elements served by one packed slab: four 512-wide K tiles (nki-library 2.31)
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of scale bytes: plain bytes and torch's name for them


@dataclass(frozen=True)
class ElementFormat:
    """One MX element format."""

    name: str
    exponent_bits: int
    mantissa_bits: int  # stored ones
    bias: int
    emax: int  # exponent of the largest binade (OCP MX v1.0, table 1)
    max: float  # largest finite magnitude
    min_subnormal: float  # smallest magnitude above zero
    code_bits: int  # codes of narrower formats occupy the low bits of one byte before packing
    dtype: torch.dtype | None  # torch's with the same bytes; None where torch has no unpacked one
    carrier: torch.dtype  # of one x4 word; signed where NKI's is unsigned, as torch's signed types have all operators


E4M3FN = ElementFormat("e4m3fn", 4, 3, 7, 8, 448.0, 2.0**-9, 8, torch.float8_e4m3fn, torch.int32)
"""OCP FP8 E4M3: 0x7E is 448, 0x7F and 0xFF are NaN, no infinity. Not the variant that ends at 240."""

E5M2 = ElementFormat("e5m2", 5, 2, 15, 15, 57344.0, 2.0**-16, 8, torch.float8_e5m2, torch.int32)
"""OCP FP8 E5M2: 0x7B is 57344, 0x7C infinity, 0x7D to 0x7F NaN. Quantizing never emits infinity: it saturates."""

E2M1 = ElementFormat("e2m1", 2, 1, 1, 2, 6.0, 0.5, 4, None, torch.int16)
"""OCP MX FP4 E2M1 (v1.0, section 5.3.3): codes 0 to 7 are 0, .5, 1, 1.5, 2, 3, 4, 6. Bit 3 is the sign; no infinity,
no NaN."""

ELEMENT_FORMATS = {fmt.name: fmt for fmt in (E4M3FN, E5M2, E2M1)}


class ScaleRule(StrEnum):
    """How a block's scale byte follows from its largest magnitude ``amax``.

    ``m`` is amax's biased fp32 exponent field, ``Emax`` the element format's. Bytes are clamped to 0 from below, and
    data are divided by the clamped scale.

    * ``NEURON``: ``m - (Emax - 1)`` (NKI ``quantize_mx``). Never saturates for finite input: e4m3 codes end at 256 of
      448. Where amax is a power of two it is one binade coarser than needed, and subnormals start one binade earlier.
      A block with Inf or NaN keeps a finite scale: Inf becomes the largest finite code, NaN stays NaN, finite
      neighbours are mostly flushed to zero. (E2M1 cannot hold NaN: there the byte becomes 255.)
    * ``FLOOR``: ``m - Emax`` (OCP MX v1.0, section 6.3). Saturates the top of every binade. In e4m3 an amax in (1.75,
      2) * 2**n is clipped to 1.75 * 2**n, which costs about 10 % more RMS error on Gaussian data than NEURON.
    * ``CEIL``: FLOOR, one more unless amax is a power of two. Never saturates; equals NEURON except at powers of two,
      where it is one binade finer.
    * ``RCEIL``: the smallest scale with ``amax / scale <= max``. Never saturates and wastes least range.
    * ``EVEN``: FLOOR of amax after rounding it to the element's mantissa width, half up. Saturates less of a binade
      than FLOOR: in e4m3 an amax in (1.75, 1.9375) * 2**n is clipped to 1.75 * 2**n.

    Under the four rules other than NEURON, Inf or NaN anywhere in a block gives byte 255: the whole block is NaN.
    """

    NEURON = "neuron"
    FLOOR = "floor"
    CEIL = "ceil"
    RCEIL = "rceil"
    EVEN = "even"


class SwizzleScheme(StrEnum):
    """Which K values share a block and an x4 word.

    * ``WRAPX``: tiles of 512, then the remainder as 256 + 128 tiles, or as one tile if it is not a multiple of 128. The
      only scheme of the MLP kernels of nki-library 2.31.
    * ``WRAPX_SINGLE``: as WRAPX, but the whole remainder is one tile. It differs only for a remainder of 384. The
      forward kernel groups raw (unswizzled) operands this way when K is exactly 384.
    * ``ONE_TILE``: all of K is one tile, so the lanes lie K/4 apart (the hidden axis of ``moe_cte``'s MX weights,
      nki-library 2.29).
    * ``CONSECUTIVE``: blocks of 32 consecutive K values, words of 4 consecutive ones (OCP row-major grouping).
    """

    WRAPX = "wrapX"
    WRAPX_SINGLE = "wrapX_single"
    ONE_TILE = "one_tile"
    CONSECUTIVE = "1x32"


Choice = TypeVar("Choice", bound=StrEnum)


def choose(kind: type[Choice], value: str | Choice, *, argument: str) -> Choice:
    """Return the member of `kind` for a member or its value, e.g. ``"neuron"``; `argument` names it in the error."""
    known = [member.value for member in kind]
    if value in known:
        return kind(value)
    raise not_one_of(argument, value, known)


def element_format(fmt: str | ElementFormat) -> ElementFormat:
    """Return the format of ``"e4m3fn"``, ``"e5m2"``, ``"e2m1"`` or an :class:`ElementFormat`."""
    if isinstance(fmt, ElementFormat):
        return fmt
    if isinstance(fmt, str) and fmt in ELEMENT_FORMATS:
        return ELEMENT_FORMATS[fmt]
    raise not_one_of("fmt", fmt, ELEMENT_FORMATS)
