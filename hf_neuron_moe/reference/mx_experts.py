"""MX expert weights of the blockwise MoE forward, and the online quantization of its activations.

Legend: E experts, H hidden (a multiple of 512), I intermediate, pI partitions of the intermediate axis (128, or I/4
below 512). The layouts of words and scales are those of :mod:`hf_neuron_moe.formats.moe_mx`.

One expert is dequantized at a time, so the fp32 copy is bounded by one expert. Activations are rounded to MXFP8 e4m3
whatever the weights' format: hidden states in groups of {lane * H/4 + tile * 128 + 8j + i}, the intermediate in groups
of {tile * 512 + lane * pI + 8j + i} (lane 0..3, i 0..7), one token per group.

Sources: nki-library 2.29 ``bwmm_shard_on_block_mx``, ``bwmm_shard_on_I_mx``; 2.31 for packed and block128 scales and
STATIC_MX.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.fake_quant import fake_quantize_tile_
from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.checks import check_dtype, check_multiple, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.constants import E2M1, E4M3FN, E5M2, LANES, ElementFormat, ScaleRule
from hf_neuron_moe.formats.moe_mx import (
    HIDDEN_SCHEME,
    INTERMEDIATE_SCHEME,
    PARTITIONS,
    TILE,
    MoEWeightMX,
    dequantize_moe_down,
    dequantize_moe_gate_up,
    padded_intermediate,
    unpack_moe_scales,
)
from hf_neuron_moe.formats.mx import fake_quantize_mx

_WORDS = {torch.int32: torch.int32, torch.uint32: torch.int32, torch.int16: torch.int16, torch.uint16: torch.int16}
_FP8_FORMATS = {None: E4M3FN, torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
_BLOCK128_ROWS = 4
_UNIT_SCALE = 127


@dataclass(frozen=True)
class MXExperts:
    """Checked MX weights of all experts."""

    gate_up: Tensor  # words [E, 128, 2, H/512, I], int32 or int16
    down: Tensor  # words [E, pI, ceil(I/512), H]
    gate_up_scale: Tensor | None  # uint8 as the caller gave them; None for STATIC_MX, where every byte is 127
    down_scale: Tensor | None  # likewise
    fmt: ElementFormat  # element format of both

    @property
    def inner(self) -> int:
        """I."""
        return self.gate_up.shape[-1]

    def expert(self, number: int) -> FFNWeights:
        """Return one expert's projections in fp32, the intermediate axis padded to whole tiles."""
        one = slice(number, number + 1)
        gate_up = MoEWeightMX(self.gate_up[one], _gate_up_bytes(self, one), self.fmt)
        down = MoEWeightMX(self.down[one], _down_bytes(self, one), self.fmt)
        gate_up_H2I = dequantize_moe_gate_up(gate_up)[0]
        padded = padded_intermediate(self.inner)
        gate_IH, up_IH = (pad(gate_up_H2I[:, half].t(), (0, 0, 0, padded - self.inner)) for half in range(2))
        return FFNWeights(gate_IH, up_IH, dequantize_moe_down(down)[0].t())


def read_mx_weights(
    words: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    *,
    hidden: int,
    weight_dtype: torch.dtype | None,
    packed: bool,
) -> MXExperts:
    """Check MX weights and their byte scales.

    Args:
        words: gate and up x4 words ``[E, 128, 2, H/512, I]``: int32 or uint32 (fp8), int16 or uint16 (fp4); down words
            ``[E, pI, ceil(I/512), H]``.
        scales: uint8 (or float8_e8m0fnu); None for STATIC_MX. Of gate and up ``[E, 16, 2, H/512, I]``; with `packed`
            ``[E, 128, ceil(H/2048), 2, I]``; or block128 ``[E, 4, 2, H/512, ceil(I/128)]``. Of down ``[E, pI/8,
            ceil(I/512), H]``; with `packed` ``[E, 128, ceil(I/2048), H]``; or block128 ``[E, 4, ceil(I/512),
            ceil(H/128)]``.
        hidden: H.
        weight_dtype: ``torch.float8_e4m3fn`` (or None) or ``torch.float8_e5m2`` of the 32-bit words; None for fp4.
        packed: the scales of four tiles share a buffer of 128 rows.
    """
    gate_up, down = words
    check_multiple(hidden, TILE, "H of hidden_states", "MX tiles along H are 512")
    fmt = _format(gate_up, weight_dtype)
    check_dtype(down, tuple(kind for kind in _WORDS if _WORDS[kind] == fmt.carrier), "down_proj_weight")
    tiles = hidden // TILE
    check_shape(gate_up, (None, PARTITIONS, 2, tiles, None), "[E, 128, 2, H/512, I]", "gate_up_proj_weight")
    experts, inner = gate_up.shape[0], gate_up.shape[-1]
    check_multiple(inner, 32, "I of gate_up_proj_weight", "an MX group is 8 partitions of 4 lanes")
    down_tiles = -(-inner // TILE)
    partitions = padded_intermediate(inner) // down_tiles // LANES
    check_shape(down, (experts, partitions, down_tiles, hidden), "[E, pI, ceil(I/512), H]", "down_proj_weight")
    gate_up_scale, down_scale = scales
    if gate_up_scale is not None and down_scale is not None:
        layouts = [
            ((experts, _BLOCK128_ROWS, 2, tiles, -(-inner // 128)), "[E, 4, 2, H/512, ceil(I/128)]"),
            ((experts, _BLOCK128_ROWS, down_tiles, -(-hidden // 128)), "[E, 4, ceil(I/512), ceil(H/128)]"),
        ]
        by_group = [
            ((experts, 16, 2, tiles, inner), "[E, 16, 2, H/512, I]"),
            ((experts, partitions // 8, down_tiles, hidden), "[E, pI/8, ceil(I/512), H]"),
        ]
        if packed:
            by_group = [
                ((experts, PARTITIONS, -(-tiles // LANES), 2, inner), "[E, 128, ceil(H/2048), 2, I]"),
                ((experts, PARTITIONS, -(-down_tiles // LANES), hidden), "[E, 128, ceil(I/2048), H]"),
            ]
        gate_up_scale = _scale_bytes(gate_up_scale, [by_group[0], layouts[0]], packed, "gate_up_proj_scale")
        down_scale = _scale_bytes(down_scale, [by_group[1], layouts[1]], packed, "down_proj_scale")
    return MXExperts(gate_up.view(fmt.carrier), down.view(fmt.carrier), gate_up_scale, down_scale, fmt)


def _format(words: Tensor, weight_dtype: torch.dtype | None) -> ElementFormat:
    check_dtype(words, tuple(_WORDS), "gate_up_proj_weight")
    if _WORDS[words.dtype] == torch.int16:
        if weight_dtype is None:
            return E2M1
        expected, remedy = "None with 16-bit words", "16-bit words hold four fp4 e2m1 codes."
    else:
        if weight_dtype in _FP8_FORMATS:
            return _FP8_FORMATS[weight_dtype]
        expected = "None, torch.float8_e4m3fn or torch.float8_e5m2 with 32-bit words"
        remedy = "32-bit words hold four fp8 codes; None means e4m3."
    raise ConfigError.about("weight_dtype", expected, weight_dtype, remedy)


def _scale_bytes(scale: Tensor, layouts: list[tuple[tuple[int, ...], str]], packed: bool, argument: str) -> Tensor:
    """Check one scale, whose shape is one of `layouts` (by group or packed, then by block of 128)."""
    if not isinstance(scale, Tensor) or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        expected = "a tensor of dtype uint8 or float8_e8m0fnu (an MX scale byte per group)"
        raise DTypeError.about(argument, expected, got, "Per-tensor fp32 scales belong to quantization_type=STATIC_MX.")
    if tuple(scale.shape) not in [shape for shape, _ in layouts]:
        words = " or, per 128 x 128 block, ".join(f"{words} = {list(shape)}" for shape, words in layouts)
        tail = "; shard_on_block_mx alone reads packed ones, with use_packed_scales."
        fix = "quantize_moe_gate_up and quantize_moe_down return scales of this shape"
        fix += ", pack_moe_scales packs them." if packed else tail
        raise ShapeError.about(argument, f"of shape {words}", list(scale.shape), fix)
    return scale.view(torch.uint8)


def _gate_up_bytes(experts: MXExperts, one: slice) -> Tensor:
    """Return one expert's gate/up scales as ``[1, 16, 2, H/512, I]``."""
    tiles, inner = experts.gate_up.shape[-2:]
    if experts.gate_up_scale is None:
        return experts.gate_up.new_full((1, 16, 2, tiles, inner), _UNIT_SCALE, dtype=torch.uint8)
    scale = experts.gate_up_scale[one]
    if scale.shape[1] == PARTITIONS:
        return unpack_moe_scales(scale, tiles)
    if scale.shape[1] == _BLOCK128_ROWS:
        return scale.repeat_interleave(4, 1).repeat_interleave(128, -1)[..., :inner]
    return scale


def _down_bytes(experts: MXExperts, one: slice) -> Tensor:
    """Return one expert's down scales as ``[1, pI/8, ceil(I/512), H]``."""
    _, partitions, tiles, hidden = experts.down.shape
    rows = partitions // 8
    if experts.down_scale is None:
        return experts.down.new_full((1, rows, tiles, hidden), _UNIT_SCALE, dtype=torch.uint8)
    scale = experts.down_scale[one]
    if scale.shape[1] == PARTITIONS:
        return unpack_moe_scales(scale, tiles, rows)
    if tuple(scale.shape[1:]) == (rows, tiles, hidden):
        return scale
    return scale.repeat_interleave(4, 1)[:, :rows].repeat_interleave(128, -1)[..., :hidden]


@dataclass(frozen=True)
class ActivationQuantizer:
    """Rounds activations to MXFP8 e4m3 in place, one token per group."""

    rule: ScaleRule  # of nki 0.5 and later (NEURON), or FLOOR for earlier ones
    scratch: Scratch

    def hidden_(self, x_RH: Tensor) -> Tensor:
        """Round fp32 hidden states in groups along H."""
        if self.rule is not ScaleRule.NEURON:
            return x_RH.copy_(fake_quantize_mx(x_RH, rule=self.rule, scheme=HIDDEN_SCHEME))
        return self._fast(x_RH, x_RH.shape[1] // LANES)

    def intermediate_(self, h_RI: Tensor) -> Tensor:
        """Round fp32 rows of the intermediate in groups along I (whole tiles of 512, or one smaller one)."""
        if self.rule is not ScaleRule.NEURON:
            return h_RI.copy_(fake_quantize_mx(h_RI, rule=self.rule, scheme=INTERMEDIATE_SCHEME))
        return self._fast(h_RI, min(h_RI.shape[1], TILE) // LANES)

    def _fast(self, values: Tensor, lane: int) -> Tensor:
        exponents = self.scratch.get("exponents", (values.numel(),), torch.int32)
        return fake_quantize_tile_(values, 1, lane, exponents)


def quantize_static_(values: Tensor, scale: float) -> Tensor:
    """Round fp32 `values` in place to ``scale * e4m3(values / scale)``, saturating at 448 (STATIC_MX)."""
    codes = values.div_(scale).clamp_(-E4M3FN.max, E4M3FN.max).to(torch.float8_e4m3fn)
    return values.copy_(codes).mul_(scale)
