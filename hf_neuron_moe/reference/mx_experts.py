"""MX expert weights of the blockwise MoE forward, and the online quantization of its activations.

Legend: E experts, H hidden (a multiple of 512), I intermediate, pI partitions of the intermediate axis (128, or I/4
below 512). The layouts of words and scales are those of :mod:`hf_neuron_moe.formats.moe_mx`.

One expert is dequantized at a time, so the fp32 copy is bounded by one expert. Activations are rounded to MXFP8 e4m3
whatever the weights' format. Groups of hidden states are {lane * H/4 + tile * 128 + 8j + i}, those of the intermediate
{tile * 512 + lane * pI + 8j + i} (lane 0..3, i 0..7), one token per group.

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
from hf_neuron_moe.checks import check_dtype, check_layouts, check_multiple
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.constants import E2M1, E4M3FN, E5M2, LANES, ElementFormat, ScaleRule, SwizzleScheme
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
from hf_neuron_moe.reference.block_rows import LAYOUTS
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_types import QuantizationType

MX_LAYOUTS = LAYOUTS | {"gate_up_proj_weight": "[E, 128, 2, H/512, I]", "down_proj_weight": "[E, pI, ceil(I/512), H]"}
_WORDS = {torch.int32: torch.int32, torch.uint32: torch.int32, torch.int16: torch.int16, torch.uint16: torch.int16}
_AS_WORDS = "Quantize it with hf_neuron_moe.formats, or view stored words, for example with .view({})."
_FP8_FORMATS = {None: E4M3FN, torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
_BLOCK128_ROWS = 4
_UNIT_SCALE = 127  # the byte of 2^0
_SCALES = {
    "gate_up_proj_scale": ("[E, 16, 2, H/512, I]", "[E, 128, ceil(H/2048), 2, I]", "[E, 4, 2, H/512, ceil(I/128)]"),
    "down_proj_scale": ("[E, pI/8, ceil(I/512), H]", "[E, 128, ceil(I/2048), H]", "[E, 4, ceil(I/512), ceil(H/128)]"),
}
"""Layouts of the scale bytes: one per group, the same of four tiles in one buffer (packed), one per 128 x 128 block."""


@dataclass(frozen=True)
class MXExperts:
    """Checked MX weights of all experts."""

    gate_up: Tensor  # words [E, 128, 2, H/512, I], int32 or int16
    down: Tensor  # words [E, pI, ceil(I/512), H]
    gate_up_scale: Tensor | None  # uint8 as the caller gave them; None for STATIC_MX, where every byte is 127
    down_scale: Tensor | None  # likewise
    fmt: ElementFormat  # element format of both

    def expert(self, number: int) -> FFNWeights:
        """Return one expert's projections in fp32, the intermediate axis padded to whole tiles."""
        gate_up_H2I = dequantize_moe_gate_up(self._expert(number, self.gate_up, self.gate_up_scale))[0]
        inner = gate_up_H2I.shape[2]
        padding = (0, 0, 0, padded_intermediate(inner) - inner)
        gate_IH, up_IH = (pad(gate_up_H2I[:, half].t(), padding) for half in range(2))
        down_IH = dequantize_moe_down(self._expert(number, self.down, self.down_scale))[0]
        return FFNWeights(gate_IH, up_IH, down_IH.t())

    def _expert(self, number: int, words_EPX: Tensor, scale_EX: Tensor | None) -> MoEWeightMX:
        """Return one expert's words ``[1, P, ..., tiles, columns]`` with scales ``[1, P/8, ..., tiles, columns]``."""
        words = words_EPX[number : number + 1]
        _, partitions, *_, tiles, columns = words.shape
        rows, shape = partitions // 8, (1, partitions // 8, *words.shape[2:])
        if scale_EX is None:
            return MoEWeightMX(words, words.new_full(shape, _UNIT_SCALE, dtype=torch.uint8), self.fmt)
        scale = scale_EX[number : number + 1]
        if scale.shape[1] == PARTITIONS:
            scale = unpack_moe_scales(scale, tiles, rows)
        elif tuple(scale.shape) != shape:
            scale = scale.repeat_interleave(4, 1)[:, :rows].repeat_interleave(128, -1)[..., :columns]
        return MoEWeightMX(words, scale, self.fmt)


def read_mx_weights(given: Arguments) -> MXExperts:
    """Check the weights of an MX implementation and their scales, which are required.

    Words are int32 or uint32 (fp8), int16 or uint16 (fp4); scales uint8 or float8_e8m0fnu, but for STATIC_MX.
    """
    gate_up, down = given.gate_up_proj_weight, given.down_proj_weight
    gate_up_scale, down_scale = given.gate_up_proj_scale, given.down_proj_scale
    if gate_up_scale is None or down_scale is None:
        fix = "Pass the scales that quantize_moe_gate_up and quantize_moe_down return."
        raise ConfigError.about("gate_up_proj_scale", f"given with {given.kind.name}", "None", fix)
    options, hidden = given.spec.shard_on_block, given.hidden_states.shape[1]
    check_multiple(hidden, TILE, "H of hidden_states", "MX tiles along H are 512")
    check_dtype(gate_up, tuple(_WORDS), "gate_up_proj_weight", _AS_WORDS)
    formats, expected = _FP8_FORMATS, "None, torch.float8_e4m3fn or torch.float8_e5m2 with 32-bit words"
    fix = "32-bit words hold four fp8 codes; None means e4m3."
    if _WORDS[gate_up.dtype] == torch.int16:
        formats, expected, fix = {None: E2M1}, "None with 16-bit words", "16-bit words hold four fp4 e2m1 codes."
    if options.weight_dtype not in formats:
        raise ConfigError.about("weight_dtype", expected, options.weight_dtype, fix)
    fmt = formats[options.weight_dtype]
    check_dtype(down, tuple(kind for kind in _WORDS if _WORDS[kind] == fmt.carrier), "down_proj_weight", _AS_WORDS)
    sizes = {"H": hidden, "H/512": hidden // TILE}
    inner = check_layouts({"gate_up_proj_weight": gate_up}, MX_LAYOUTS, **sizes)["I"]
    check_multiple(inner, 32, "I of gate_up_proj_weight", "an MX group is 8 partitions of 4 lanes")
    tiles = -(-inner // TILE)
    sizes |= {"E": len(gate_up), "pI": padded_intermediate(inner) // tiles // LANES, "ceil(I/512)": tiles}
    check_layouts({"down_proj_weight": down}, MX_LAYOUTS, **sizes)
    words = gate_up.view(fmt.carrier), down.view(fmt.carrier)
    if options.quantization_type is QuantizationType.STATIC_MX:
        return MXExperts(*words, None, None, fmt)
    gate_up_bytes = _scale_bytes(gate_up_scale, gate_up, options.use_packed_scales, "gate_up_proj_scale")
    down_bytes = _scale_bytes(down_scale, down, options.use_packed_scales, "down_proj_scale")
    return MXExperts(*words, gate_up_bytes, down_bytes, fmt)


def _scale_bytes(scale: Tensor, words: Tensor, packed: bool, argument: str) -> Tensor:
    """Check one scale: a byte per group (or packed) or per 128 x 128 block of `words`."""
    if not isinstance(scale, Tensor) or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        expected = "a tensor of dtype uint8 or float8_e8m0fnu (an MX scale byte per group)"
        raise DTypeError.about(argument, expected, got, "Per-tensor fp32 scales belong to quantization_type=STATIC_MX.")
    experts, partitions, *middle, tiles, columns = words.shape
    by_group = (experts, partitions // 8, *middle, tiles, columns)
    if packed:
        by_group = (experts, PARTITIONS, -(-tiles // LANES), *middle, columns)
    by_block = (experts, _BLOCK128_ROWS, *middle, tiles, -(-columns // 128))
    if tuple(scale.shape) not in (by_group, by_block):
        names = _SCALES[argument]
        rule = f"of shape {names[packed]} = {list(by_group)} or, per 128 x 128 block, {names[2]} = {list(by_block)}"
        tail = "; shard_on_block_mx alone reads packed ones, with use_packed_scales."
        fix = "quantize_moe_gate_up and quantize_moe_down return scales of this shape"
        fix += ", pack_moe_scales packs them." if packed else tail
        raise ShapeError.about(argument, rule, list(scale.shape), fix)
    return scale.view(torch.uint8)


@dataclass(frozen=True)
class ActivationQuantizer:
    """Rounds fp32 activations to MXFP8 e4m3 in place, one token per group."""

    rule: ScaleRule  # of nki 0.5 and later (NEURON), or FLOOR for earlier ones
    scratch: Scratch

    def hidden_(self, x_RH: Tensor) -> Tensor:
        """Round hidden states in groups along H."""
        return self._round_(x_RH, x_RH.shape[1] // LANES, HIDDEN_SCHEME)

    def intermediate_(self, h_RI: Tensor) -> Tensor:
        """Round rows of the intermediate in groups along I (whole tiles of 512, or one smaller one)."""
        return self._round_(h_RI, min(h_RI.shape[1], TILE) // LANES, INTERMEDIATE_SCHEME)

    def _round_(self, values: Tensor, lane: int, scheme: SwizzleScheme) -> Tensor:
        if self.rule is not ScaleRule.NEURON:
            return values.copy_(fake_quantize_mx(values, rule=self.rule, scheme=scheme))
        exponents = self.scratch.get("exponents", (values.numel(),), torch.int32)
        return fake_quantize_tile_(values, 1, lane, exponents)


def quantize_static_(values: Tensor, scale: float) -> Tensor:
    """Round fp32 `values` in place to ``scale * e4m3(values / scale)``, saturating at 448 (STATIC_MX)."""
    codes = values.div_(scale).clamp_(-E4M3FN.max, E4M3FN.max).to(torch.float8_e4m3fn)
    return values.copy_(codes).mul_(scale)
