"""Target layouts: the tensors that hold a weight, for each purpose, precision and kernel.

E experts, F rows and K columns of a matrix, K being the contraction axis of the matmul that reads it. Forward, gate_up
is [2I, H] and down [H, I]. Backward, the gradient of the input contracts over the other axis: gate_up transposed,
[H, 2I] with gate and up as one axis (nki-library 2.31 ``mlp_bwd_mxfp8``), and down transposed, [I, H]. Quantized values
cannot be transposed, since their blocks lie along K, so each orientation is quantized from bf16.

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
..._moe_permuted_words     the same, H and I permuted         the same, of an input that is permuted likewise
..._moe_scales             the same, one row per 8 partitions
..._moe_packed_scales      the same, four tiles in a buffer  ``use_packed_scales``
========================== ================================= =====================================================

The permutation makes each group of the words one of 32 adjacent values of the source, whose codes and scales they then
are (:func:`~hf_neuron_moe.formats.moe_mx.to_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, PadRule, Part, halves_in, part_of
from hf_neuron_moe.convert.manifest import WrittenTensor
from hf_neuron_moe.convert.options import FORWARD, NO_COMPACT_SCALES, ConvertOptions
from hf_neuron_moe.errors import ConversionError, public
from hf_neuron_moe.formats.constants import LANES, MX_BLOCK, PACKED_SLAB_K, PACKED_SLAB_ROWS
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
PERMUTED_WORDS = {"mxfp8": "mxfp8_moe_permuted_words", "mxfp4": "mxfp4_moe_permuted_words"}
WORD_LAYOUTS = {layout: precision for row in (MOE_WORDS, PERMUTED_WORDS) for precision, layout in row.items()}
MOE_SCALES = {"mxfp8": "mxfp8_moe_scales", "mxfp4": "mxfp4_moe_scales"}
MOE_PACKED_SCALES = {"mxfp8": "mxfp8_moe_packed_scales", "mxfp4": "mxfp4_moe_packed_scales"}

SCALE_SUFFIX = "_scale"  # Appended to a weight's name for its block scales
BACKWARD_SUFFIX = "_T"  # Appended to a weight's name for the transposed matrix of the backward
SCALES = frozenset(
    {MX_FUSED_SCALES, MX_KERNEL_SCALES, MX_OVERSIZED_SCALES, *MOE_SCALES.values(), *MOE_PACKED_SCALES.values()}
)
"""Layouts of tensors that hold block scales."""

_OPERAND_SCALES = {"compact": MX_FUSED_SCALES, "packed": MX_KERNEL_SCALES, "oversized": MX_OVERSIZED_SCALES}
_WORD_DTYPES = {"mxfp8": "U32", "mxfp4": "U16"}


class Bf16Layout(NamedTuple):
    """A row of :data:`BF16_LAYOUTS`: how bf16 values of a matrix ``[F, K]``, or of each expert's, are stored."""

    name: str
    experts: bool | None  # Only for weights with experts, or without; None: for both
    takes: Callable[[ConvertOptions], bool]  # Whether these options ask for it; the first row that fits wins
    shape: Callable[[int, int], tuple[int, int]]  # Of the stored matrix, for F and K; for that shape, F and K again
    view: Callable[[Tensor], Tensor] | None  # Stored matrices seen as [..., F, K]; None where ``codecs`` fills it


def _swizzled(F: int, K: int) -> tuple[int, int]:
    return K // LANES, LANES * F


# Dense kernels take [F, K] as it is; the MoE kernels take [E, K, F] (gate_up [E, H, 2, I] with 2, I merged).
BF16_LAYOUTS: tuple[Bf16Layout, ...] = (
    Bf16Layout(BF16_SWIZZLED, None, lambda o: bool(o.swizzle) and not o.quantized, _swizzled, None),
    Bf16Layout(BF16_KERNEL, True, lambda o: o.layout == "kernel", lambda F, K: (K, F), lambda stored: stored.mT),
    Bf16Layout(BF16_KERNEL, False, lambda o: o.layout == "kernel", lambda F, K: (F, K), lambda stored: stored),
    Bf16Layout(BF16_FUSED, None, lambda o: True, lambda F, K: (F, K), lambda stored: stored),
)


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
    rule: str = "neuron"  # Scale rule of quantized values
    ep_rank: int | None = None  # Rank whose experts it holds
    first_expert: int = 0

    def written(self, weight: str) -> WrittenTensor:
        """Describe it as a tensor of a checkpoint, without its file and checksum."""
        padding, rank = self.part.padding, self.part.rank
        suffix = "" if rank is None else f".tp{rank}"
        if self.extra_zeros:
            padding["I"] = self.extra_zeros  # --pad leaves none to add
        return WrittenTensor(
            name=weight + self.suffix + (suffix if self.ep_rank is None else f".ep{self.ep_rank}"),
            file="",
            dtype=self.dtype,
            shape=self.shape,
            layout=self.layout,
            weight=weight,
            scale_layout=self.scale_layout,
            orientation=self.orientation,
            tp_rank=rank,
            padding=padding,
            ep_rank=self.ep_rank,
            first_expert=self.first_expert,
        )


@public("convert")
def stored_forms(weight: FusedWeight, options: ConvertOptions, rank: int | None = None) -> tuple[StoredForm, ...]:
    """Describe the tensors that will hold one rank's part of `weight`; `rank` is None where nothing is split.

    Values, then their scales if quantized, for each orientation in turn. A size that does not fit is a ConversionError.
    """
    if 0 in weight.shape:
        fix = "Correct the sizes in config.json, or take it from where the weights came from."
        raise ConversionError.about(f"shape of {weight.name}", "one without a 0", list(weight.shape), fix)
    options = options.of(weight.name)
    if weight.has_experts and options.ep_degree > 1 and rank is not None:
        return _forms_of_experts(weight, options, rank)
    part = part_of(weight, rank, options.tp_degree, _pad_rule(weight, options))
    if not _is_quantized(weight, options):
        return (_bf16_form(weight, options, part),)
    if _reads_words(weight, options):
        return _moe_forms(weight, options, part)
    return tuple(
        form for orientation in options.orientations for form in _operand_forms(weight, options, part, orientation)
    )


def ranks_of(weight: FusedWeight, options: ConvertOptions) -> Sequence[int | None]:
    """The ranks among which a weight is divided; None alone where it is whole."""
    degree = options.ep_degree if weight.has_experts and options.ep_degree > 1 else options.tp_degree
    return (None,) if degree == 1 else range(degree)


def _forms_of_experts(weight: FusedWeight, options: ConvertOptions, rank: int) -> tuple[StoredForm, ...]:
    """One rank's range of whole experts."""
    count, rest = divmod(weight.shape[0], options.ep_degree)
    if rest:
        expected = f"divisible among {options.ep_degree} expert-parallel ranks"
        fix = "Choose an --ep-degree that divides it."
        raise ConversionError.about(f"number of experts of {weight.name}", expected, weight.shape[0], fix)
    whole = stored_forms(weight, replace(options, tp_degree=1, ep_degree=1))
    return tuple(
        replace(form, shape=(count, *form.shape[1:]), ep_rank=rank, first_expert=count * rank) for form in whole
    )


def matrix_shape(tensor: WrittenTensor) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor of values holds, in its own orientation, zeros included."""
    if tensor.layout in WORD_LAYOUTS:
        if halves := halves_in(tensor.weight):
            *_, tiles, inner = tensor.shape
            return halves * inner, tiles * TILE
        _, partitions, tiles, hidden = tensor.shape
        return hidden, 4 * partitions * tiles
    rows, columns = tensor.shape[-2:]
    if (row := bf16_layout(tensor.layout, len(tensor.shape) == 3)) is not None:
        return row.shape(rows, columns)
    return _swizzled(rows, columns) if tensor.layout == MX_KERNEL_CODES else (rows, columns)


def bf16_layout(name: str, has_experts: bool) -> Bf16Layout | None:
    """The row of a layout of bf16 values; None for codes, words and scales."""
    return next((row for row in BF16_LAYOUTS if row.name == name and row.experts in (None, has_experts)), None)


def _is_quantized(weight: FusedWeight, options: ConvertOptions) -> bool:
    """MXFP4 is for experts; a shared expert or a dense layer beside them stays bf16, as no kernel takes it in FP4."""
    return options.quantized and (weight.has_experts or options.precision != "mxfp4")


def _reads_words(weight: FusedWeight, options: ConvertOptions) -> bool:
    """Whether `weight` is stored as ``moe_cte``'s MX implementations take it."""
    return weight.has_experts and options.quantized and options.layout == "kernel" and options.purpose == "inference"


def _pad_rule(weight: FusedWeight, options: ConvertOptions) -> PadRule | None:
    """The sizes that the kernels take which will read `weight`."""
    if not options.pad:
        return None
    if _reads_words(weight, options):  # ``moe_cte``'s MX implementations: H in 512s; I below 512 in 32s, else in 512s
        return lambda axis, size: _up(size, MX_BLOCK if axis == "I" and size < TILE else TILE)
    if weight.has_experts and not options.quantized:  # ``moe_cte``: H in 512s; ``blockwise_mm_bwd``: I in 32s, 2 cores
        return lambda axis, size: _up(size, TILE if axis == "H" else 2 * MX_BLOCK)
    if options.swizzled and (_is_quantized(weight, options) or not options.quantized):
        # MLP kernels with prepared weights: 128s, but not 384. The forward kernel takes 384 as one tile when it
        # quantizes an operand itself, while a prepared one has tiles of 256 and 128. The two cannot be multiplied
        # (nki-library 2.30 ``mlp_fwd_mxfp8``).
        return lambda axis, size: TILE if _up(size, PARTITIONS) == 384 else _up(size, PARTITIONS)
    return lambda axis, size: _up(size, PARTITIONS)  # MLP kernels: 128s


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _bf16_form(weight: FusedWeight, options: ConvertOptions, part: Part) -> StoredForm:
    F, K = part.shape
    row = next(row for row in BF16_LAYOUTS if row.experts in (None, weight.has_experts) and row.takes(options))
    if row.name == BF16_SWIZZLED:
        if weight.has_experts:
            expected = "off for experts in bf16: only the MLP forward reads bf16 operands that are swizzled"
            raise ConversionError.about(f"swizzle of {weight.name}", expected, "on", "Leave --swizzle out.")
        _check_blocks(weight, options, K)
    return StoredForm("", "BF16", (*weight.shape[:-2], *row.shape(F, K)), row.name, part)


def _operand_forms(weight: FusedWeight, options: ConvertOptions, part: Part, orientation: str) -> list[StoredForm]:
    """Codes and scales of one operand of the MLP kernels."""
    F, K = part.shape if orientation == FORWARD else part.shape[::-1]
    _check_blocks(weight, options, K)
    experts, suffix = weight.shape[:-2], "" if orientation == FORWARD else BACKWARD_SUFFIX
    fused = options.layout == "fused"
    where = "compact" if fused else options.scales or "packed"
    if where == "compact" and not fused:
        remedy = "Leave --scales out: each kernel then gets the layout it takes."
        raise ConversionError.about(f"scales of {weight.name}", NO_COMPACT_SCALES, where, remedy)
    layout, shape = (MX_FUSED_CODES, (F, K)) if fused else (MX_KERNEL_CODES, _swizzled(F, K))
    rows, scales = K // MX_BLOCK if fused else scale_row_count(K, where), _OPERAND_SCALES[where]
    return [
        StoredForm(suffix, "F8_E4M3", (*experts, *shape), layout, part, where, orientation, 0, options.rule),
        StoredForm(suffix + SCALE_SUFFIX, "U8", (*experts, rows, F), scales, part, where, orientation),
    ]


def _moe_forms(weight: FusedWeight, options: ConvertOptions, part: Part) -> tuple[StoredForm, ...]:
    """Words and scales as in the table of :mod:`hf_neuron_moe.formats.moe_mx`."""
    E, H, inner = weight.shape[0], part.padded_hidden, part.width
    where = options.scales or "compact"
    remedy = "Use --pad."
    if options.precision != "mxfp4":  # with which no kernel trains
        remedy = "Use --pad. In mxfp8, --for training needs multiples of 32 only."
    for wrong, what, expected, got, fix in (
        (H % TILE, "hidden size", f"a multiple of {TILE}", H, remedy),
        (inner % MX_BLOCK, "intermediate size of a rank", f"a multiple of {MX_BLOCK}", inner, remedy),
        (where == "oversized", "option scales", "packed or compact", where, "Leave --scales out."),
    ):
        if wrong:
            subject = f"{what} of {weight.name}, for moe_cte's MX weights,"
            raise ConversionError.about(subject, expected, got, fix)
    permuted = weight.codes == options.precision and _keeps_codes(weight, options, part)
    pair: tuple[int, ...]
    if part.gate_up:
        pair, tiles, partitions, columns, extra = (part.halves,), H // TILE, PARTITIONS, inner, 0
    else:
        padded = padded_intermediate(inner)
        tiles = -(-padded // TILE)
        pair, partitions, columns, extra = (), padded // tiles // LANES, H, padded - inner
    rows, layouts = (partitions // 8, *pair, tiles, columns), MOE_SCALES
    if where == "packed":
        rows, layouts = (PACKED_SLAB_ROWS, -(-tiles * TILE // PACKED_SLAB_K), *pair, columns), MOE_PACKED_SCALES
    precision, words = options.precision, (E, partitions, *pair, tiles, columns)
    dtype, layout = _WORD_DTYPES[precision], (PERMUTED_WORDS if permuted else MOE_WORDS)[precision]
    return (
        StoredForm("", dtype, words, layout, part, where, FORWARD, extra, options.rule),
        StoredForm(SCALE_SUFFIX, "U8", (E, *rows), layouts[precision], part, where, FORWARD, extra),
    )


def _keeps_codes(weight: FusedWeight, options: ConvertOptions, part: Part) -> bool:
    """Whether the source's codes become the words; where they cannot, quantizing them again has to be allowed."""
    kind = options.precision.upper()
    for wrong, got, fix in (
        (options.scale_rule is not None, f"scale rule {options.scale_rule}", "Leave --scale-rule out"),
        (part.width % TILE and part.width > TILE, f"an intermediate size of {part.width}", "Use --pad"),
        (part.start % MX_BLOCK or part.stop % MX_BLOCK, f"values {part.start} to {part.stop}", "Use fewer ranks"),
    ):
        if wrong and options.allow_inexact:
            return False
        if wrong:
            subject = f"{kind} codes of {weight.name}, for moe_cte's words,"
            expected = "kept: whole groups of 32 per rank, 512s of the intermediate size, no scale rule"
            fix += ", or use --allow-inexact to quantize the decoded values again."
            raise ConversionError.about(subject, expected, got, fix)
    return True


def _check_blocks(weight: FusedWeight, options: ConvertOptions, K: int) -> None:
    if K % MX_BLOCK:
        expected = f"a multiple of {MX_BLOCK} for {'MXFP8' if options.quantized else 'swizzled operands'}"
        fix = "Use --pad (in kernel layout), or --precision bf16 without --swizzle for this model."
        raise ConversionError.about(f"contraction size of {weight.name}", expected, K, fix)
