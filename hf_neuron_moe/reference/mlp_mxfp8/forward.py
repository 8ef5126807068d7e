"""The MXFP8 MLP forward of nki-library (``experimental.mlp_mxfp8``, releases 2.30 to 2.33).

Legend: S tokens, H hidden, I intermediate. ``Q_K`` quantizes to MXFP8 e4m3 along K; every product accumulates in fp32.

    gate = Q_H(X) Q_H(Wg)^T    up = Q_H(X) Q_H(Wu)^T    intermediate = bf16(silu(gate) * up)
    Y = Q_I(intermediate) Q_I(Wd)^T
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import check_flags, check_multiple, check_same_device
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.described_operand import MXOperand, TensorDescriptor
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    STORED,
    Call,
    check_logical,
    check_no_mix_at_384,
    check_raw_axis,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import gate_up_tiles, product_tiles
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPForward

_SAVES = ("save_gate_pre", "save_gate_act", "save_up", "save_hidden")


@public
def mlp_forward_mxfp8(
    hidden: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    *,
    save_gate_pre: bool = False,
    save_gate_act: bool = False,
    save_up: bool = False,
    save_hidden: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    use_scale_packing: bool = True,
    hidden_scales: Tensor | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    hidden_is_swizzled: bool = False,
    gate_up_is_swizzled: bool = False,
    down_is_swizzled: bool = False,
    mx_scale_rule: str = "neuron",
) -> MLPForward:
    """Compute what ``mlp_forward_mxfp8_nki`` computes; every buffer is returned, no argument is written to.

    Each operand comes raw, pre-swizzled (``*_is_swizzled``) or pre-quantized (``*_scales``), independently:

    =============== ============= ==================== ===================================================
    operand         raw           pre-swizzled bf16    pre-quantized x4 (or float8_e4m3fn with 4F columns)
    =============== ============= ==================== ===================================================
    hidden          ``[S, H]``    ``[H/4, 4S]``        ``[H/4, S]``
    gate_up_weights ``[2I, H]``   ``[H/4, 8I]``        ``[H/4, 2I]``
    down_weights    ``[H, I]``    ``[I/4, 4H]``        ``[I/4, H]``
    =============== ============= ==================== ===================================================

    * S is a multiple of 8, I of 128, and H of 128 unless both its users are prepared. Raw tensors are bf16 or fp16.
    * gate_up_weights: gate rows first, then up rows.
    * save_gate_pre, save_up: return the pre-activations, rounded once from the fp32 accumulator; save_gate_act:
      ``silu(gate)``, rounded once from the fp32 gate; save_hidden: the intermediate ``silu(gate) * up``.
    * dtype: of the output and the checkpoints: bf16, or fp32 to see the accumulators (down reads bf16 either way).
    * use_scale_packing: layout of the given scales (uint8 or float8_e8m0fnu): packed ``[128*ceil(K/2048), F]`` or
      oversized ``[K/4, F]``.
    * mx_scale_rule: block scales of everything that is quantized here: ``"neuron"`` (nki 0.5 and later,
      ``2^(emax - 7)``) or ``"floor"`` (earlier releases, ``2^(emax - 8)``).

    Raises ConfigError for raw and prepared operands mixed on a contraction of exactly 384 (upstream: garbage).
    """
    call = dict(locals())
    _check_switches({name: call[name] for name in _SAVES})
    check_flags({"use_scale_packing": use_scale_packing})
    tds = ForwardTensors.of(call)
    tokens, hidden_size, inner = tds.check(dtype)
    shape, device = (tokens, inner), hidden.device
    kept = (save_gate_pre, save_gate_act, save_up, save_hidden and dtype != torch.bfloat16)
    saved = ForwardBuffers(*(torch.empty(shape, dtype=dtype, device=device) if want else None for want in kept))
    intermediate = torch.empty(shape, dtype=torch.bfloat16, device=device)
    output = torch.empty((tokens, hidden_size), dtype=dtype, device=device)
    run_forward(tds.operands(scale_rule(mx_scale_rule)), intermediate, output, saved, slice(0, tokens))
    product = (intermediate if saved.product is None else saved.product) if save_hidden else None
    return MLPForward(output, saved.gate_pre, saved.gate_act, saved.up, product)


def _check_switches(saves: Mapping[str, object]) -> None:
    for name, value in saves.items():
        if isinstance(value, Tensor):
            expected = "True or False: this function returns what it saves"
            fix = "Pass True, or call mlp_forward_mxfp8_nki, which fills its caller's buffers."
            raise ConfigError.about(name, expected, "a tensor", fix)
    check_flags(saves)


@dataclass(frozen=True)
class ForwardBuffers:
    """Buffers ``[S, I]`` that receive fp32 values, each cast once; None is not kept."""

    gate_pre: Tensor | None = None
    gate_act: Tensor | None = None
    up: Tensor | None = None
    product: Tensor | None = None


class ForwardOperands(NamedTuple):
    """The three operands as the engine loads them."""

    hidden: MXOperand
    gate_up: MXOperand
    down: MXOperand


class ForwardTensors(NamedTuple):
    """The three operands described, with the names of their arguments."""

    hidden: TensorDescriptor
    gate_up: TensorDescriptor
    down: TensorDescriptor
    names: tuple[str, str, str] = ("hidden", "gate_up_weights", "down_weights")

    @staticmethod
    def of(call: Call) -> ForwardTensors:
        """Check and describe the operands among the arguments of a whole forward."""
        return ForwardTensors(
            describe(call, "hidden", "hidden", "[S, H]"),
            describe(call, "gate_up_weights", "gate_up", "[2I, H]"),
            describe(call, "down_weights", "down", "[H, I]"),
        )

    def operands(self, rule: ScaleRule) -> ForwardOperands:
        """Return them as the engine loads them."""
        described = zip(self[:3], self.names)
        return ForwardOperands(*(MXOperand(td, argument=name, lone_384=True, rule=rule) for td, name in described))

    def check(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """Check the operands against each other and the result's dtype; return S, H and I."""
        hidden, gate_up, down, (hidden_name, gate_up_name, down_name) = self
        if dtype not in STORED:
            fix = "The kernel stores bf16; fp32 shows the accumulators."
            raise ConfigError.about("dtype", "torch.bfloat16 or torch.float32", str(dtype), fix)
        (hidden_size, tokens), both = hidden.logical_shape, gate_up.logical_shape[1]
        check_raw_axis(hidden, "H", hidden_name)
        check_raw_axis(gate_up, "H", gate_up_name)
        check_logical(gate_up, hidden_size, both, "[2I, H]", gate_up_name)
        check_multiple(both, 2, f"2I of {gate_up_name}", "gate rows, then up rows")
        inner = both // 2
        rule = "the contraction axis of down, whose left operand the kernel always quantizes itself"
        check_multiple(inner, 128, f"I of {gate_up_name}", rule)
        check_logical(down, inner, hidden_size, "[H, I]", down_name)
        check_multiple(tokens, 8, f"S of {hidden_name}", "the loader reads groups of 8 rows")
        check_no_mix_at_384({hidden_name: hidden, gate_up_name: gate_up}, hidden_size)
        if not down.is_raw:
            check_no_mix_at_384({down_name: down, "the intermediate, which is always raw": TensorDescriptor()}, inner)
        data = {name: td.data for td, name in zip(self[:3], self.names)}
        check_same_device(data | {f"scales of {name}": td.scales for td, name in zip(self[:3], self.names)})
        return tokens, hidden_size, inner


@torch.no_grad()
def run_forward(
    operands: ForwardOperands, intermediate: Tensor, output: Tensor, saved: ForwardBuffers, rows: slice
) -> None:
    """Fill the rows of all buffers: gate, up and the activation first, then one down product over all of them."""
    scratch = call_scratch(output.device)
    for part, columns, gate, up in gate_up_tiles(operands.hidden, operands.gate_up, scratch, rows=rows):
        assert gate is not None and up is not None
        for buffer, values in ((saved.gate_pre, gate), (saved.up, up)):
            if buffer is not None:
                buffer[part, columns].copy_(values)
        act = F.silu(gate, inplace=True)
        if saved.gate_act is not None:
            saved.gate_act[part, columns].copy_(act)
        product = act.mul_(up)
        if saved.product is not None:
            saved.product[part, columns].copy_(product)
        intermediate[part, columns].copy_(product)
    inter = intermediate_operand(TensorDescriptor(intermediate), operands)
    for tile in product_tiles([(inter, operands.down)], scratch, rows=rows):
        output[tile.rows, tile.columns].copy_(tile.values)


@public("mlp_forward_mxfp8")
def intermediate_operand(td: TensorDescriptor, operands: ForwardOperands) -> MXOperand:
    """Return the left operand of down, which the kernel always quantizes itself."""
    return MXOperand(td, argument="intermediate", lone_384=True, rule=operands.down.rule)
