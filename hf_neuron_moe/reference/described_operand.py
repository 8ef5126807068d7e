"""One operand of an MX matmul, in any of the layouts the kernels read, and the description upstream gives it.

Letters: F free axis, K contraction axis. The layouts (nki-library 2.30 ``TensorDescriptor`` and its loaders):

============== =================================================== ==========================================
mode           data                                                scales
============== =================================================== ==========================================
raw            bf16 or fp16 ``[F, K]``                             none: quantized along K when loaded
pre-swizzled   bf16 ``[K/4, 4F]``                                  none: quantized when loaded
pre-quantized  x4 words int32 or uint32 ``[K/4, F]``, or           ``[K/4, F]`` (oversized) or
               float8_e4m3fn ``[K/4, 4F]``: the same bytes         ``[128*ceil(K/2048), F]`` (packed)
============== =================================================== ==========================================

All of them give the same values to a matmul as long as they were made from the same bf16 tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_
from hf_neuron_moe.checks import VIEW, Rule, check_dtype, check_multiple, check_rules
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, naming, not_one_of, public
from hf_neuron_moe.formats.constants import ELEMENT_FORMATS, LANES, MX_BLOCK, PATCH_ROWS, ScaleRule, SwizzleScheme
from hf_neuron_moe.formats.mx import MXTensor, dequantize_mx, fake_quantize_mx, quantize_mx_swizzled
from hf_neuron_moe.formats.scales import SCALE_DTYPES, ScaleLayout, kernel_row_counts, to_compact
from hf_neuron_moe.formats.swizzle import k_map, swizzle, unswizzle
from hf_neuron_moe.reference.moe_types import check_switches
from hf_neuron_moe.reference.specification import multiples

RAW_DTYPES = (torch.bfloat16, torch.float16)  # what the raw loader takes (nki-library 2.30)
UNSCALED = "Convert values, for example with .to({}); stored codes need their scales too."  # for raw operands
X4_DTYPES = (torch.int32, torch.uint32)  # words of four e4m3 codes; signed ones carry the bits of NKI's unsigned ones
_RAW_AXIS = multiples("mlp_forward")["H"]
_LOAD_ELEMENTS = 1 << 18  # loaded at a time on a CPU: 1 MiB of fp32, half a core's second-level cache or less
_GATHER = ("indirect_dma", "scalar_offset", "effective_f_dim")  # how fields of a load through an index begin
_SCHEMES = [SwizzleScheme.WRAPX.value, SwizzleScheme.CONSECUTIVE.value]


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor with what upstream's loaders know about it; the fields and their defaults are nki-library's.

    Outputs are described too (raw, ``[F, K]``). Gather loads are those of the blockwise MoE kernels.
    """

    data: Tensor | None = None  # this and the scales: see the layouts at the top of this file
    scales: Tensor | None = None  # uint8 or float8_e8m0fnu
    is_swizzled: bool = False  # data is [K/4, 4F]; forced True when quantized
    is_f_by_k: bool | None = None  # None: whether raw. False for raw data: [K, F], F a multiple of 512 (no MLP kernel)
    is_x4: bool = False  # data are x4 words; set from the dtype
    scales_are_packed: bool = False  # set from the row count: 128*ceil(K/2048) rows that are not K/4
    is_col_parallel_sharded: bool = False  # two cores hold one half of F each; changes only the sharded shapes
    is_quantized: bool | None = None  # None: whether scales are given
    vector_offset_pattern_512: Tensor | None = None  # how the device moves the data, as the next two; no effect
    vector_offset_pattern_256: Tensor | None = None
    vector_offset_pattern_128: Tensor | None = None
    quant_scheme: str = "wrapX"  # or "1x32": which K values share a block
    load_with_PE_swizzle: bool = False  # no effect on values
    fast_dma_transpose: bool = False  # raw loader that groups the whole remainder of K after tiles of 512 as one tile
    indirect_dma_vector_offset: Tensor | None = None  # gather loads, to the end: errors here, index the tensor instead
    scalar_offset: Tensor | None = None
    scalar_offset_scales: Tensor | None = None
    effective_f_dim: int | None = None
    effective_f_dim_scales: int | None = None
    skip_dma: object = None
    is_unswizzled_bf16: bool = field(init=False, default=False)  # data is raw
    physical_shape: tuple[int, ...] = field(init=False, default=())  # of data
    logical_shape: tuple[int, int] = field(init=False, default=(0, 0))  # (K, F)
    sharded_physical_shape: tuple[int, ...] = field(init=False, default=())  # per core
    sharded_logical_shape: tuple[int, int] = field(init=False, default=(0, 0))

    @public("TensorDescriptor")
    def __post_init__(self) -> None:
        self._check_options()
        quantized = self.scales is not None or bool(self.is_quantized)
        swizzled = self.is_swizzled or quantized
        by_row = not swizzled if self.is_f_by_k is None else self.is_f_by_k
        expected = "False for swizzled or quantized data, which is K-major"
        check_rules([Rule(not (swizzled and by_row), "is_f_by_k", expected, "True", "Leave it None.")])
        derived: dict[str, object] = {"is_quantized": quantized, "is_swizzled": swizzled}
        derived |= {"is_f_by_k": by_row, "is_unswizzled_bf16": not swizzled}
        if self.data is not None:
            check_layout(self.data, swizzled=swizzled, quantized=quantized)
            derived |= self._shapes(self.data, swizzled, by_row)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_options(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        check_switches(self)
        if self.quant_scheme not in _SCHEMES:
            raise not_one_of("quant_scheme", self.quant_scheme, _SCHEMES)
        raw_scales = self.scales is not None and self.is_quantized is False
        fix = "Leave it None: it follows from the scales."
        rules = [Rule(not raw_scales, "is_quantized", "True where scales are given", "False", fix)]
        if self.is_x4 and self.data is not None:
            expected, got = "False unless data are int32 or uint32 words", f"True with {self.data.dtype}"
            fix = "Leave it False: it follows from the dtype. View fp8 codes as int32 to make words of them."
            rules.append(Rule(self.data.dtype in X4_DTYPES, "is_x4", expected, got, fix))
        expected = "None: loads through an index are not part of the MLP kernels"
        fix = "Index the tensor first (torch.index_select)."
        for name, value in values.items():
            given = value is not None if name.startswith(_GATHER) else name == "skip_dma" and value not in (None, False)
            rules.append(Rule(not given, name, expected, type(value).__name__, fix))
        check_rules(rules)

    def _shapes(self, data: Tensor, swizzled: bool, by_row: bool) -> dict[str, object]:
        """Return the fields that follow from the data and the scales, which are checked."""
        K, F = logical_shape(data, swizzled=swizzled, by_row=by_row)
        packed = self.scales_are_packed
        if self.scales is not None:
            layout, rows = check_scales(self.scales, K, F, argument="scales"), len(self.scales)
            expected = f"False unless the scales have the {kernel_row_counts(K)[1]} packed rows of K={K}"
            fix = "Leave it False: it follows from the rows. formats.oversized_to_packed converts."
            fits = not packed or rows == kernel_row_counts(K)[1]
            check_rules([Rule(fits, "scales_are_packed", expected, f"True with {rows} rows", fix)])
            packed = packed or layout is ScaleLayout.PACKED
        rows, columns = data.shape
        halves = 2 if self.is_col_parallel_sharded else 1
        return {
            "is_x4": self.is_x4 or data.dtype in X4_DTYPES,
            "scales_are_packed": packed,
            "physical_shape": (rows, columns),
            "logical_shape": (K, F),
            "sharded_physical_shape": (rows // halves, columns) if by_row else (rows, columns // halves),
            "sharded_logical_shape": (K, F // halves),
        }

    @property
    def is_raw(self) -> bool:
        """Whether the kernel itself swizzles and quantizes this operand."""
        return self.is_unswizzled_bf16


def logical_shape(data: Tensor, *, swizzled: bool, by_row: bool = False) -> tuple[int, int]:
    """Return K and F of swizzled data (``[K/4, F]`` in x4 words), of raw ``[F, K]`` if `by_row`, or ``[K, F]``."""
    rows, columns = data.shape
    if swizzled:
        return LANES * rows, columns if data.dtype in X4_DTYPES else columns // LANES
    return (columns, rows) if by_row else (rows, columns)


def check_layout(data: Tensor, *, swizzled: bool, quantized: bool, argument: str = "data") -> None:
    """Check one operand's data against its mode: dtype (no raw bytes: upstream reads e5m2), a matrix, whole blocks."""
    if not quantized:
        check_dtype(data, (torch.bfloat16,) if swizzled else (*RAW_DTYPES, torch.float32), argument, UNSCALED)
    elif isinstance(data, Tensor) and data.dtype not in (*X4_DTYPES, torch.float8_e4m3fn):
        expected = "of dtype int32 or uint32 (x4 words) or float8_e4m3fn, because it has scales"
        fix = "Without scales a bf16 tensor is quantized by the kernel."
        if data.dtype == torch.uint8:
            fix = "Bytes do not say which fp8 format they hold; view them as one of these dtypes."
        raise DTypeError.about(argument, expected, str(data.dtype), fix)
    if data.ndim != 2 or 0 in data.shape:
        fix = "Flatten leading axes; one matmul operand is two-dimensional."
        raise ShapeError.about(argument, "a non-empty matrix", str(list(data.shape)), fix)
    if swizzled:
        rule = "swizzled rows are K/4, and an MX block has 8 of them"
        check_multiple(data.shape[0], MX_BLOCK // LANES, f"K/4 of {argument}", rule)
        if data.dtype not in X4_DTYPES:
            check_multiple(data.shape[1], LANES, f"4F of {argument}", "a swizzled row has 4 lanes per position of F")


def check_scales(scales: Tensor, K: int, F: int, *, argument: str) -> ScaleLayout:
    """Check dtype and shape of block scales against their operand; return their layout."""
    check_dtype(scales, SCALE_DTYPES, argument, VIEW)
    oversized, packed = kernel_row_counts(K)
    if scales.ndim != 2 or scales.shape[0] not in (oversized, packed) or scales.shape[1] != F:
        expected = f"of shape [{oversized}, {F}] (oversized) or [{packed}, {F}] (packed) for K={K}"
        fix = "Compact scales are expanded by hf_neuron_moe.formats.to_packed or to_oversized."
        raise ShapeError.about(argument, expected, str(list(scales.shape)), fix)
    return ScaleLayout.OVERSIZED if scales.shape[0] == oversized else ScaleLayout.PACKED


def check_loadable(td: TensorDescriptor, argument: str) -> None:
    """Apply the loaders' rules to an operand (nki-library 2.30)."""
    if td.data is None or (td.is_quantized and td.scales is None):
        expected = "described with its data, and with its scales if it is quantized"
        raise ConfigError.about(argument, expected, "None", "Give the TensorDescriptor both.")
    F = td.logical_shape[1]
    if not td.is_raw:
        check_multiple(F, 2, f"F of {argument}", "tiles have an even free size")
        return
    check_dtype(td.data, RAW_DTYPES, argument, UNSCALED)
    check_raw_axis(td, "K", argument)
    whole, rule = (8, "the loader reads groups of 8 rows") if td.is_f_by_k else (512, "the loader of K-major raw data")
    check_multiple(F, whole, f"F of {argument}", rule)


def check_raw_axis(td: TensorDescriptor, axis: str, argument: str) -> None:
    """Raise ShapeError for a raw operand whose contraction axis, called `axis`, is no multiple of 128."""
    if td.is_raw:
        rule = "needed by the transposing loader while this operand is neither swizzled nor quantized"
        check_multiple(td.logical_shape[0], _RAW_AXIS, f"{axis} of {argument}", rule)


class MXOperand:
    """The fp32 values that a matmul sees of one described operand; K, F and `scheme` say how K is grouped.

    Errors name `argument`, and `where` unless a function around this one names itself. With `lone_384` a raw operand
    with K of exactly 384 is one tile, as in ``mlp_fwd_mxfp8`` and the 2.30 backward. `rule` is the block scale rule of
    an operand that is quantized when loaded.
    """

    def __init__(
        self,
        td: TensorDescriptor,
        *,
        where: str = "",
        argument: str,
        lone_384: bool = False,
        rule: ScaleRule = ScaleRule.NEURON,
    ) -> None:
        with naming(where):
            check_loadable(td, argument)
        self.td, self.rule = td, rule
        self.K, self.F = td.logical_shape
        self.scheme = SwizzleScheme(td.quant_scheme)
        one_tile = (lone_384 and self.K == 384) or td.fast_dma_transpose
        if td.is_raw and one_tile and self.scheme is SwizzleScheme.WRAPX:
            self.scheme = SwizzleScheme.WRAPX_SINGLE
        self._compact = None if td.scales is None else to_compact(td.scales, self.K)

    def load(self, start: int, stop: int, *, k_major: bool, scratch: Scratch, name: str) -> Tensor:
        """Return the positions ``start..stop`` of F as fp32 ``[F', K]``, exact MX values.

        They lie in the buffer `name` of `scratch`, valid until that name is used again, as ``[K, F']`` if `k_major`.
        """
        size = stop - start
        buffer = scratch.get(name, (self.K, size) if k_major else (size, self.K), torch.float32)
        step = max(16, _LOAD_ELEMENTS // self.K) if buffer.device.type == "cpu" else size
        for first in range(0, size, step):
            width = min(step, size - first)
            part = buffer.narrow(1 if k_major else 0, first, width)
            self._fill(part, start + first, start + first + width, k_major, scratch)
        return buffer.t() if k_major else buffer

    def dequantized(self) -> Tensor:
        """Return all values as fp32 ``[F, K]``."""
        assert self.td.data is not None
        return self.load(0, self.F, k_major=False, scratch=Scratch(self.td.data.device), name="all")

    def load_and_quantize_tile(self, f: slice, k: slice) -> MXTensor:
        """Return one tile as it lies on chip: the positions `f` of F, and `k`, a range of swizzled rows, of K/4.

        Raw data are swizzled and quantized, pre-swizzled data quantized, pre-quantized data taken as they are. `k`
        begins and ends at whole blocks, 8 rows. The bytes are the whole operand's: no block spans two tiles.
        """
        data, lanes = self.td.data, slice(LANES * f.start, LANES * f.stop)
        assert data is not None
        if self._compact is not None:
            codes = data[k, f] if self.td.is_x4 else data[k, lanes]
            blocks = slice(k.start // PATCH_ROWS, k.stop // PATCH_ROWS)
            codes = codes.contiguous().view(torch.uint8)
            return MXTensor(codes, self._compact[blocks, f], ELEMENT_FORMATS["e4m3fn"])
        if self.td.is_raw:
            natural_FK = data[f] if self.td.is_f_by_k else data[:, f].t()
            elements = k_map(self.K, self.scheme, data.device)[k].flatten()
            return quantize_mx_swizzled(swizzle(natural_FK[:, elements], "1x32"), rule=self.rule)
        return quantize_mx_swizzled(data[k, lanes], rule=self.rule)

    def _fill(self, part: Tensor, start: int, stop: int, k_major: bool, scratch: Scratch) -> None:
        natural_FK = self._natural(start, stop)
        part.copy_(natural_FK.t() if k_major else natural_FK)
        if self._compact is None:
            axis = 0 if k_major else 1
            if self.scheme is SwizzleScheme.CONSECUTIVE or self.rule is not ScaleRule.NEURON:
                part.copy_(fake_quantize_mx(part, axis, rule=self.rule, scheme=self.scheme))
            else:
                exponents = scratch.get("exponents", (part.numel(),), torch.int32)
                fake_quantize_(part, axis, exponents, scheme=self.scheme)

    def _natural(self, start: int, stop: int) -> Tensor:
        """Return ``[F', K]``: dequantized fp32, or values that have yet to be quantized."""
        data = self.td.data
        assert data is not None
        if self.td.is_raw:
            return data[start:stop] if self.td.is_f_by_k else data[:, start:stop].t()
        lanes = slice(LANES * start, LANES * stop)
        if self._compact is None:
            return unswizzle(data[:, lanes], self.scheme)
        if self.td.is_x4:
            codes = data.view(torch.int32)[:, start:stop].contiguous().view(torch.uint8)
        else:
            codes = data.view(torch.uint8)[:, lanes]
        return unswizzle(dequantize_mx(codes, self._compact[:, start:stop]), self.scheme)
