"""Target layouts: the tensors that hold a weight, for each purpose, precision and kernel.

E experts, F rows and K columns of a matrix, K being the contraction axis of the matmul that reads it. Forward, gate_up
is [2I, H] and down [H, I]. Backward, the gradient of the input contracts over the other axis: gate_up transposed,
[H, 2I] with gate and up as one axis (nki-library 2.31 ``mlp_bwd_mxfp8``), and down transposed, [I, H]. Quantised values
cannot be transposed, since their blocks lie along K, so each orientation is quantised from bf16.

========================== ================================= =====================================================
layout                     shape                             who reads it
========================== ================================= =====================================================
bf16_fused                 [(E,) F, K]                       Hugging Face's fused modules
bf16_kernel                [F, K]; experts [E, K, F]         MLP kernels; ``moe_cte`` and ``blockwise_mm_bwd``
bf16_swizzled              [K/4, 4F]                         MLP forward, pre-swizzled mode
mxfp8_fused_codes          [(E,) F, K]                       no kernel: codes in Hugging Face's axis order
mxfp8_compact_scales       [(E,) K/32, F]
mxfp8_swizzled_codes       [(E,) K/4, 4F]                    MLP kernels, one matrix per expert
mxfp8_packed_scales        [(E,) 128*ceil(K/2048), F]
mxfp8_oversized_scales     [(E,) K/4, F]
mxfp8_moe_words, mxfp4_... :mod:`~hf_neuron_moe.formats.moe_mx` ``moe_cte``'s MX implementations
..._moe_scales             the same, one row per 8 partitions
..._moe_packed_scales      the same, four tiles in a buffer  ``use_packed_scales``
========================== ================================= =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, PadRule, Part, part_of
from hf_neuron_moe.convert.manifest import WrittenTensor
from hf_neuron_moe.convert.options import FORWARD, ConvertOptions
from hf_neuron_moe.errors import ConversionError, public
from hf_neuron_moe.formats.constants import MX_BLOCK, PACKED_SLAB_K, PACKED_SLAB_ROWS
from hf_neuron_moe.formats.moe_mx import PARTITIONS, TILE, padded_intermediate
from hf_neuron_moe.formats.scales import scale_row_count

SOURCE = "source"
BF16_FUSED = "bf16_fused"
BF16_KERNEL = "bf16_kernel"
BF16_SWIZZLED = "bf16_swizzled"
MX_FUSED_CODES = "mxfp8_fused_codes"
MX_FUSED_SCALES = "mxfp8_compact_scales"
MX_KERNEL_CODES = "mxfp8_swizzled_codes"
MX_KERNEL_SCALES = "mxfp8_packed_scales"
MX_OVERSIZED_SCALES = "mxfp8_oversized_scales"
MOE_WORDS = {"mxfp8": "mxfp8_moe_words", "mxfp4": "mxfp4_moe_words"}
MOE_SCALES = {"mxfp8": "mxfp8_moe_scales", "mxfp4": "mxfp4_moe_scales"}
MOE_PACKED_SCALES = {"mxfp8": "mxfp8_moe_packed_scales", "mxfp4": "mxfp4_moe_packed_scales"}

SCALE_SUFFIX = "_scale"
"""Appended to a weight's name for its block scales."""

BACKWARD_SUFFIX = "_T"
"""Appended to a weight's name for the transposed matrix of the backward."""

SCALES = frozenset(
    {MX_FUSED_SCALES, MX_KERNEL_SCALES, MX_OVERSIZED_SCALES, *MOE_SCALES.values(), *MOE_PACKED_SCALES.values()}
)
"""Layouts of tensors that hold block scales."""

_GROUPED_OTHERWISE = 384
"""Contraction size that the forward kernel takes as one tile when it quantises an operand itself, while a prepared one
has tiles of 256 and 128: the two cannot be multiplied (nki-library 2.30 ``mlp_fwd_mxfp8``)."""

_WORD_DTYPES = {"mxfp8": "U32", "mxfp4": "U16"}
_MOE_FORMATS = {layout: precision for precision, layout in MOE_WORDS.items()}


@dataclass(frozen=True)
class StoredForm:
    """One tensor that stores (part of) a weight; attributes as of :class:`~hf_neuron_moe.convert.WrittenTensor`."""

    suffix: str  # Appended to the weight's name
    dtype: str  # Safetensors dtype
    shape: tuple[int, ...]  # Shape as stored
    layout: str  # A layout name of this file
    part: Part  # Which part of the weight it holds, the zeros it ends in included
    scale_layout: str | None = None  # Where block scales lie
    orientation: str = FORWARD  # ``"forward"`` or ``"backward"``
    extra_zeros: int = 0  # Zeros on the I axis beyond the part's, which the layout itself adds
    rule: str = "neuron"  # Scale rule of quantised values

    def written(self, weight: str) -> WrittenTensor:
        """Describe it as a tensor of a checkpoint, without its file and checksum."""
        padding = dict(self.part.padding)
        if self.extra_zeros:
            padding["I"] = padding.get("I", 0) + self.extra_zeros
        rank = self.part.rank
        suffix = self.suffix if rank is None else f"{self.suffix}.tp{rank}"
        return WrittenTensor(
            name=weight + suffix,
            file="",
            dtype=self.dtype,
            shape=self.shape,
            layout=self.layout,
            weight=weight,
            scale_layout=self.scale_layout,
            orientation=self.orientation,
            tp_rank=rank,
            padding=padding,
        )


def stored_forms(weight: FusedWeight, options: ConvertOptions, rank: int | None = None) -> tuple[StoredForm, ...]:
    """Describe the tensors that will hold one rank's part of `weight`.

    `rank` is None where ``options.tp_degree`` is 1. A ConversionError says which size does not fit the layout.

    Returns:
        Values, then their scales if quantised, for each orientation in turn.
    """
    part = part_of(weight, rank, options.tp_degree, _pad_rule(weight, options))
    experts = weight.shape[:-2]
    if not _is_quantized(weight, options):
        return (_bf16_form(weight, options, part),)
    if reads_words(weight, options):
        return _moe_forms(weight, options, part)
    forms: list[StoredForm] = []
    for orientation in options.orientations:
        F, K = part.shape if orientation == FORWARD else part.shape[::-1]
        _check_blocks(weight, options, K)
        suffix = "" if orientation == FORWARD else BACKWARD_SUFFIX
        codes, code_shape, scales, rows = _operand_layout(weight, options, F, K)
        where = _scale_layout(scales)
        forms += [
            StoredForm(suffix, "F8_E4M3", (*experts, *code_shape), codes, part, where, orientation, 0, options.rule),
            StoredForm(suffix + SCALE_SUFFIX, "U8", (*experts, rows, F), scales, part, where, orientation),
        ]
    return tuple(forms)


def reads_words(weight: FusedWeight, options: ConvertOptions) -> bool:
    """Whether `weight` is stored as ``moe_cte``'s MX implementations take it."""
    return weight.has_experts and options.quantized and options.layout == "kernel" and options.purpose == "inference"


def moe_precision(layout: str) -> str | None:
    """Precision of ``moe_cte`` words; None for another layout."""
    return _MOE_FORMATS.get(layout)


def matrix_shape(tensor: WrittenTensor, *, gate_up: bool) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor of values holds, in its own orientation, zeros included."""
    if moe_precision(tensor.layout) is not None:
        if gate_up:
            *_, tiles, inner = tensor.shape
            return 2 * inner, tiles * TILE
        _, partitions, tiles, hidden = tensor.shape
        return hidden, 4 * partitions * tiles
    rows, columns = tensor.shape[-2:]
    if tensor.layout in (BF16_SWIZZLED, MX_KERNEL_CODES):
        return columns // 4, 4 * rows
    return (columns, rows) if tensor.layout == BF16_KERNEL and len(tensor.shape) == 3 else (rows, columns)


def _is_quantized(weight: FusedWeight, options: ConvertOptions) -> bool:
    """MXFP4 is for experts; a shared expert or a dense layer beside them stays bf16, as no kernel takes it in FP4."""
    return options.quantized and (weight.has_experts or options.precision != "mxfp4")


def _pad_rule(weight: FusedWeight, options: ConvertOptions) -> PadRule | None:
    """The sizes that the kernels take which will read `weight`."""
    if not options.pad:
        return None
    if reads_words(weight, options):
        return _pad_words
    if weight.has_experts and not options.quantized:
        return _pad_experts
    stays_bf16 = options.quantized and not _is_quantized(weight, options)
    return _pad_operand if options.swizzled and not stays_bf16 else _pad_lanes


def _pad_words(axis: str, size: int) -> int:
    """``moe_cte``'s MX implementations: H in 512s; I below 512 in 32s, else in 512s."""
    small = _up(size, MX_BLOCK)
    return small if axis == "I" and small < TILE else _up(size, TILE)


def _pad_experts(axis: str, size: int) -> int:
    """``moe_cte``: H in 512s; ``blockwise_mm_bwd``: I in 32s on each of two cores."""
    return _up(size, TILE if axis == "H" else 2 * MX_BLOCK)


def _pad_lanes(axis: str, size: int) -> int:
    """MLP kernels: 128s."""
    return _up(size, PARTITIONS)


def _pad_operand(axis: str, size: int) -> int:
    """MLP kernels with prepared weights: 128s, but not 384."""
    lanes = _up(size, PARTITIONS)
    return TILE if lanes == _GROUPED_OTHERWISE else lanes


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@public("convert")
def _bf16_form(weight: FusedWeight, options: ConvertOptions, part: Part) -> StoredForm:
    F, K = part.shape
    experts = weight.shape[:-2]
    if options.swizzle and not options.quantized:
        if experts:
            raise ConversionError.about(
                f"swizzle of {weight.name}",
                "off for experts in bf16: only the MLP forward reads bf16 operands that are swizzled",
                "on",
                "Leave --swizzle out.",
            )
        _check_blocks(weight, options, K)
        return StoredForm("", "BF16", (K // 4, 4 * F), BF16_SWIZZLED, part)
    kernel = options.layout == "kernel"
    # Dense kernels take [F, K] as it is; the MoE kernels take [E, K, F] (gate_up [E, H, 2, I] with 2, I merged).
    shape = (*experts, K, F) if kernel and experts else (*experts, F, K)
    return StoredForm("", "BF16", shape, BF16_KERNEL if kernel else BF16_FUSED, part)


@public("convert")
def _operand_layout(
    weight: FusedWeight, options: ConvertOptions, F: int, K: int
) -> tuple[str, tuple[int, int], str, int]:
    """Layout and shape of MX codes, and layout and rows of their scales."""
    if options.layout == "fused":
        return MX_FUSED_CODES, (F, K), MX_FUSED_SCALES, K // MX_BLOCK
    scales = options.scales or "packed"
    if scales == "compact":
        raise ConversionError.about(
            f"scales of {weight.name}",
            "packed or oversized: the MLP kernels take no compact ones",
            scales,
            "Leave --scales out: each kernel then gets the layout it takes.",
        )
    layout = MX_KERNEL_SCALES if scales == "packed" else MX_OVERSIZED_SCALES
    return MX_KERNEL_CODES, (K // 4, 4 * F), layout, scale_row_count(K, scales)


def _scale_layout(layout: str) -> str:
    return {MX_FUSED_SCALES: "compact", MX_KERNEL_SCALES: "packed", MX_OVERSIZED_SCALES: "oversized"}[layout]


def _moe_forms(weight: FusedWeight, options: ConvertOptions, part: Part) -> tuple[StoredForm, ...]:
    """Words and scales as in the table of :mod:`hf_neuron_moe.formats.moe_mx`."""
    E, H, inner = weight.shape[0], part.padded_hidden, part.width
    scales = options.scales or "compact"
    if H % TILE:
        raise _refuse_moe(weight, f"a multiple of {TILE} (hidden size)", H, _remedy_for_size(options))
    if inner % MX_BLOCK:
        expected = f"a multiple of {MX_BLOCK} (intermediate size of a rank)"
        raise _refuse_moe(weight, expected, inner, _remedy_for_size(options))
    if scales == "oversized":
        raise _refuse_moe(weight, "packed or compact (scales)", scales, "Leave --scales out.")
    padded = padded_intermediate(inner)
    tiles = H // TILE if part.gate_up else -(-padded // TILE)
    partitions = PARTITIONS if part.gate_up else padded // tiles // 4
    tail: tuple[int, ...] = (tiles, inner) if part.gate_up else (tiles, H)
    pair: tuple[int, ...] = (2,) if part.gate_up else ()
    precision, rule = options.precision, options.rule
    rows, layout = (E, partitions // 8, *pair, *tail), MOE_SCALES[precision]
    if scales == "packed":
        buffers = -(-tiles * TILE // PACKED_SLAB_K)
        rows, layout = (E, PACKED_SLAB_ROWS, buffers, *pair, tail[-1]), MOE_PACKED_SCALES[precision]
    extra = 0 if part.gate_up else padded - inner
    words = (E, partitions, *pair, *tail)
    return (
        StoredForm("", _WORD_DTYPES[precision], words, MOE_WORDS[precision], part, scales, FORWARD, extra, rule),
        StoredForm(SCALE_SUFFIX, "U8", rows, layout, part, scales, FORWARD, extra),
    )


@public("convert")
def _check_blocks(weight: FusedWeight, options: ConvertOptions, K: int) -> None:
    if K % MX_BLOCK or K == 0:
        raise ConversionError.about(
            f"contraction size of {weight.name}",
            f"a multiple of {MX_BLOCK} for {'MXFP8' if options.quantized else 'swizzled operands'}",
            K,
            "Use --pad (in kernel layout), or --precision bf16 without --swizzle for this model.",
        )


def _remedy_for_size(options: ConvertOptions) -> str:
    if options.precision == "mxfp4":  # no kernel trains with it
        return "Use --pad."
    return "Use --pad, or --for training, whose operands need multiples of 32 only."


def _refuse_moe(weight: FusedWeight, expected: str, got: object, remedy: str) -> ConversionError:
    return ConversionError.about(
        f"size or scales of {weight.name}, for moe_cte's MX weights,", expected, got, remedy
    ).named("convert")
