"""One matrix to its stored tensors and back, in the layouts of ``orientations`` that are more than a view.

F rows and K columns of the matrix. Rows are worked on in chunks: a block of values that share a scale lies in one row,
so chunks change no bit, and temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_neuron_moe.convert.layout import orientations
from hf_neuron_moe.convert.layout.tensor_parallel import Part
from hf_neuron_moe.convert.options import FORWARD
from hf_neuron_moe.formats import moe_mx
from hf_neuron_moe.formats.constants import E2M1, E4M3FN, LANES, MX_BLOCK, PATCH_ROWS, ScaleRule, SwizzleScheme
from hf_neuron_moe.formats.e8m0 import divide_by_scale_
from hf_neuron_moe.formats.elements import encode_
from hf_neuron_moe.formats.mx import dequantize_mx, quantize_mx
from hf_neuron_moe.formats.mx_operand import quantize_into
from hf_neuron_moe.formats.scales import to_compact, to_oversized, to_packed
from hf_neuron_moe.formats.swizzle import swizzle, unswizzle

CHUNK_ELEMENTS = 1 << 22  # Elements of a chunk of rows
TRANSPOSED_ROWS = 256
"""Rows transposed at a time: a multiple of a cache line's values, few enough for the copy to stay in the cache."""

_FORMATS = {layout: {"mxfp8": E4M3FN, "mxfp4": E2M1}[kind] for layout, kind in orientations.WORD_LAYOUTS.items()}


def encode(matrix_FK: torch.Tensor, forms: Sequence[orientations.StoredForm], places: Sequence[torch.Tensor]) -> None:
    """Fill the stored tensors, without the experts' axis, of one matrix: bf16, forward orientation, zeros included."""
    if forms[0].layout == orientations.BF16_SWIZZLED:
        for rows, chunk in _row_chunks(matrix_FK):
            places[0][:, LANES * rows.start : LANES * rows.stop] = swizzle(chunk)
        return
    for form, scale_form, codes, scales in zip(forms[::2], forms[1::2], places[::2], places[1::2]):
        if form.layout not in _FORMATS:
            oriented = matrix_FK if form.orientation == FORWARD else matrix_FK.t()
            _encode_operand(oriented, form, codes, scale_form.layout, scales)
            continue
        fmt = _FORMATS[form.layout]
        if form.part.gate_up:
            weight_EH2I = matrix_FK.unflatten(0, (form.part.halves, -1)).permute(2, 0, 1)[None]
            quantized = moe_mx.quantize_moe_gate_up(weight_EH2I, fmt=fmt, rule=form.rule)
        else:
            quantized = moe_mx.quantize_moe_down(matrix_FK.t()[None], fmt=fmt, rule=form.rule)
        _store_words(quantized, scale_form, (codes, scales))


def keep_codes(
    matrix_FK: torch.Tensor,
    scales_FG: torch.Tensor,
    forms: Sequence[orientations.StoredForm],
    places: Sequence[torch.Tensor],
) -> None:
    """Fill words and scales with the source's codes and scales; dividing its values by the scales rounds nothing."""
    fmt, (F, K) = _FORMATS[forms[0].layout], matrix_FK.shape
    words_FP = torch.empty(F, K // LANES, dtype=fmt.carrier)
    for rows, chunk in _row_chunks(matrix_FK):
        blocks = chunk.float().unflatten(1, (-1, MX_BLOCK))
        codes = encode_(divide_by_scale_(blocks, scales_FG[rows][..., None]), fmt)
        words_FP[rows] = moe_mx.group_words(codes.flatten(1), fmt)
    parts = [words_FP, scales_FG]
    if forms[0].part.gate_up:
        parts = [part.unflatten(0, (forms[0].part.halves, -1)) for part in parts]
    _store_words(moe_mx.arrange_moe_words(parts[0][None], parts[1][None], fmt), forms[1], places)


def _store_words(
    weight: moe_mx.MoEWeightMX, scale_form: orientations.StoredForm, places: Sequence[torch.Tensor]
) -> None:
    packed = scale_form.layout in orientations.MOE_PACKED_SCALES.values()
    places[0].copy_(weight.words[0])
    places[1].copy_((moe_mx.pack_moe_scales(weight.scales) if packed else weight.scales)[0])


def copy_transposed(place_KF: torch.Tensor, matrix_FK: torch.Tensor) -> None:
    """Copy a matrix to where its transpose belongs, by contiguous pieces, which torch transposes ten times as fast."""
    for start in range(0, len(matrix_FK), TRANSPOSED_ROWS):
        rows = matrix_FK[start : start + TRANSPOSED_ROWS].to(place_KF.dtype).contiguous()
        place_KF[:, start : start + len(rows)].copy_(rows.t().contiguous())


def decode(
    layouts: Sequence[str], stored: Sequence[torch.Tensor], part: Part, rows: slice
) -> Iterator[tuple[int, torch.Tensor]]:
    """Give chunks of `rows` of the forward matrix: their start behind ``rows.start``, and bf16 or fp32 ``[f, K]``.

    `layouts` and `stored` are those of values and scales, as :func:`encode` filled them; K has the layout's zeros.
    """
    layout = layouts[0]
    if layout in _FORMATS:
        words, scales = stored
        if layouts[1] in orientations.MOE_PACKED_SCALES.values():
            scales = moe_mx.unpack_moe_scales(scales[None], words.shape[-2], words.shape[0] // PATCH_ROWS)[0]
        weight = moe_mx.MoEWeightMX(words[None], scales[None], _FORMATS[layout])
        permuted = layout in orientations.PERMUTED_WORDS.values()
        if part.gate_up:
            values_2IH = moe_mx.dequantize_moe_gate_up(weight)[0].permute(1, 2, 0)
            if permuted:
                values_2IH = moe_mx.from_groups(values_2IH)
                values_2IH = moe_mx.from_groups(values_2IH.mT, min(words.shape[-1], moe_mx.TILE)).mT
            yield 0, values_2IH.reshape(-1, words.shape[-2] * moe_mx.TILE)[rows]
        else:
            values_HI = moe_mx.dequantize_moe_down(weight)[0].t()
            tile = min(values_HI.shape[1], moe_mx.TILE)
            yield 0, (moe_mx.from_groups(values_HI, tile) if permuted else values_HI)[rows]
        return
    quantized, natural = layout != orientations.BF16_SWIZZLED, layout == orientations.MX_FUSED_CODES
    values = stored[0].view(torch.uint8) if quantized else stored[0]
    K = values.shape[1] if natural else LANES * values.shape[0]
    if quantized:
        compact_BF = stored[1] if natural else to_compact(stored[1], K)
    step = max(1, CHUNK_ELEMENTS // K)
    for start in range(rows.start, rows.stop, step):
        chunk = slice(start, min(start + step, rows.stop))
        part_P4F = swizzle(values[chunk]) if natural else values[:, LANES * chunk.start : LANES * chunk.stop]
        if quantized:
            part_P4F = dequantize_mx(part_P4F.contiguous(), compact_BF[:, chunk].contiguous())
        yield start - rows.start, unswizzle(part_P4F)


def _encode_operand(
    matrix_FK: torch.Tensor, form: orientations.StoredForm, codes: torch.Tensor, scale_layout: str, scales: torch.Tensor
) -> None:
    """Quantize an operand of the MLP kernels along its rows."""
    F, K = matrix_FK.shape
    compact_BF = scales if scale_layout == orientations.MX_FUSED_SCALES else scales.new_empty(K // MX_BLOCK, F)
    if form.layout == orientations.MX_KERNEL_CODES:
        rule = ScaleRule(form.rule)
        quantize_into(matrix_FK, codes, compact_BF, fmt=E4M3FN, rule=rule, scheme=SwizzleScheme.WRAPX)
    else:
        for rows, chunk in _row_chunks(matrix_FK):
            mx = quantize_mx(chunk, rule=form.rule)
            compact_BF[:, rows] = mx.scales
            codes[rows] = unswizzle(mx.codes)
    if scale_layout != orientations.MX_FUSED_SCALES:
        arrange = to_packed if scale_layout == orientations.MX_KERNEL_SCALES else to_oversized
        scales.copy_(arrange(compact_BF))


def _row_chunks(matrix_FK: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows in chunks of about :data:`CHUNK_ELEMENTS`, with their places."""
    F, K = matrix_FK.shape
    step = max(1, CHUNK_ELEMENTS // K)
    for start in range(0, F, step):
        rows = slice(start, min(start + step, F))
        yield rows, matrix_FK[rows]
