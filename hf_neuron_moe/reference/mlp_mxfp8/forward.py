"""The MXFP8 MLP forward of nki-library (``experimental.mlp_mxfp8``, releases 2.30 to 2.33).

Legend: S tokens, H hidden, I intermediate. ``Q_K`` quantizes to MXFP8 e4m3 along K; every product accumulates in fp32.

    gate = Q_H(X) Q_H(Wg)^T    up = Q_H(X) Q_H(Wu)^T    intermediate = bf16(silu(gate) * up)
    Y = Q_I(intermediate) Q_I(Wd)^T
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import check_flags, check_multiple, check_same_device
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.mlp_mxfp8.arguments import (
    check_logical,
    check_no_mix_at_384,
    check_raw_axis,
    describe,
    scale_rule,
)
from hf_neuron_moe.reference.mlp_mxfp8.results import MLPForward
from hf_neuron_moe.reference.mlp_mxfp8.tiles import gate_up_tiles, product_tiles
from hf_neuron_moe.reference.mx_operand import MXOperand, TensorDescriptor

STORED = (torch.bfloat16, torch.float32)
"""Dtypes of results: the device's, and fp32 to see the accumulators."""

NAMES = ("hidden", "gate_up_weights", "down_weights")
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

    Args:
        hidden: activations; S a multiple of 8. Raw tensors are bf16 or fp16.
        gate_up_weights: gate rows first, then up rows; I a multiple of 128, H too unless both its users are prepared.
        down_weights: the down projection.
        save_gate_pre: return the gate pre-activations, rounded once from the fp32 accumulator.
        save_gate_act: return ``silu(gate)``, rounded once from the fp32 gate.
        save_up: return the up pre-activations.
        save_hidden: return the intermediate ``silu(gate) * up``.
        dtype: of the output and the checkpoints: bf16, or fp32 to see the accumulators (down reads bf16 either way).
        use_scale_packing: layout of the given scales: packed ``[128*ceil(K/2048), F]`` or oversized ``[K/4, F]``.
        hidden_scales: uint8 or float8_e8m0fnu scales of hidden.
        gate_up_scales: of gate_up_weights.
        down_scales: of down_weights.
        hidden_is_swizzled: hidden is pre-swizzled; implied by scales.
        gate_up_is_swizzled: gate_up_weights is.
        down_is_swizzled: down_weights is.
        mx_scale_rule: block scales of everything that is quantized here: ``"neuron"`` (nki 0.5 and later,
            ``2^(emax - 7)``) or ``"floor"`` (earlier releases, ``2^(emax - 8)``).

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an operand breaks a rule above; a switch is no bool (buffers
            are ``mlp_forward_mxfp8_nki``'s); scales in the other layout than announced; raw and prepared operands
            mixed on a contraction of exactly 384 (upstream: garbage).
    """
    wanted = save_gate_pre, save_gate_act, save_up, save_hidden
    _check_switches(dict(zip(_SAVES, wanted, strict=True)))
    check_flags({"use_scale_packing": use_scale_packing})
    tds = describe_forward(
        use_scale_packing,
        hidden=(hidden, hidden_scales, hidden_is_swizzled),
        gate_up=(gate_up_weights, gate_up_scales, gate_up_is_swizzled),
        down=(down_weights, down_scales, down_is_swizzled),
    )
    return _forward(tds, dtype, wanted, scale_rule(mx_scale_rule))


def _forward(
    tds: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor],
    dtype: torch.dtype,
    wanted: tuple[bool, bool, bool, bool],
    rule: ScaleRule,
) -> MLPForward:
    tokens, hidden_size, inner = check_forward(*tds, dtype)
    *others, save_hidden = wanted
    assert tds[0].data is not None
    shape, device = (tokens, inner), tds[0].data.device
    kept = (*others, save_hidden and dtype != torch.bfloat16)
    saved = ForwardBuffers(*(torch.empty(shape, dtype=dtype, device=device) if want else None for want in kept))
    intermediate = torch.empty(shape, dtype=torch.bfloat16, device=device)
    output = torch.empty((tokens, hidden_size), dtype=dtype, device=device)
    with torch.no_grad():
        run_forward(ForwardOperands.of(*tds, rule), intermediate, output, saved, slice(0, tokens))
    product = (intermediate if saved.product is None else saved.product) if save_hidden else None
    return MLPForward(output, saved.gate_pre, saved.gate_act, saved.up, product)


def _check_switches(saves: Mapping[str, object]) -> None:
    for name, value in saves.items():
        if isinstance(value, Tensor):
            raise ConfigError.about(
                name,
                "True or False: this function returns what it saves",
                "a tensor",
                "Pass True, or call mlp_forward_mxfp8_nki, which fills its caller's buffers.",
            )
    check_flags(saves)


@dataclass(frozen=True)
class ForwardBuffers:
    """Buffers ``[S, I]`` that receive fp32 values, each cast once; None is not kept."""

    gate_pre: Tensor | None = None
    gate_act: Tensor | None = None
    up: Tensor | None = None
    product: Tensor | None = None


@dataclass(frozen=True)
class ForwardOperands:
    """The three operands as the engine loads them."""

    hidden: MXOperand
    gate_up: MXOperand
    down: MXOperand

    @staticmethod
    def of(
        hidden: TensorDescriptor,
        gate_up: TensorDescriptor,
        down: TensorDescriptor,
        rule: ScaleRule,
        names: tuple[str, str, str] = NAMES,
    ) -> ForwardOperands:
        described = zip((hidden, gate_up, down), names, strict=True)
        operands = [MXOperand(td, argument=name, lone_384=True, rule=rule) for td, name in described]
        return ForwardOperands(*operands)


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


def describe_forward(
    use_scale_packing: bool, **operands: tuple[Tensor, Tensor | None, bool]
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Check and describe ``hidden``, ``gate_up`` and ``down``: each data, scales, is_swizzled."""
    raw = {
        "hidden": ("hidden", "[S, H]"),
        "gate_up": ("gate_up_weights", "[2I, H]"),
        "down": ("down_weights", "[H, I]"),
    }
    hidden, gate_up, down = (
        describe(
            *operands[name],
            argument=argument,
            scales_argument=f"{name}_scales",
            use_scale_packing=use_scale_packing,
            raw_shape=raw_shape,
        )
        for name, (argument, raw_shape) in raw.items()
    )
    return hidden, gate_up, down


def check_forward(
    hidden: TensorDescriptor,
    gate_up: TensorDescriptor,
    down: TensorDescriptor,
    dtype: torch.dtype,
    names: tuple[str, str, str] = NAMES,
) -> tuple[int, int, int]:
    """Check the operands against each other; return S, H and I. Errors as :func:`mlp_forward_mxfp8`."""
    if dtype not in STORED:
        raise ConfigError.about(
            "dtype",
            "torch.bfloat16 or torch.float32",
            str(dtype),
            "The kernel stores bf16; fp32 shows the accumulators.",
        )
    hidden_size, tokens = hidden.logical_shape
    for td, name in ((hidden, names[0]), (gate_up, names[1])):
        check_raw_axis(td, td.logical_shape[0], "H", argument=name)
    check_logical(gate_up, hidden_size, gate_up.logical_shape[1], "[2I, H]", argument=names[1])
    both = gate_up.logical_shape[1]
    check_multiple(both, 2, f"2I of {names[1]}", "gate rows, then up rows")
    inner = both // 2
    rule = "the contraction axis of down, whose left operand the kernel always quantizes itself"
    check_multiple(inner, 128, f"I of {names[1]}", rule)
    check_logical(down, inner, hidden_size, "[H, I]", argument=names[2])
    check_multiple(tokens, 8, f"S of {names[0]}", "the loader reads groups of 8 rows")
    check_no_mix_at_384({names[0]: hidden, names[1]: gate_up}, hidden_size)
    if not down.is_raw:
        raw = TensorDescriptor()
        check_no_mix_at_384({names[2]: down, "the intermediate, which is always raw": raw}, inner)
    data = {name: td.data for name, td in zip(names, (hidden, gate_up, down), strict=True)}
    scales = {f"scales of {name}": td.scales for name, td in zip(names, (hidden, gate_up, down), strict=True)}
    check_same_device({**data, **scales})
    return tokens, hidden_size, inner
